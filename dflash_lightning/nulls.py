"""Refuse YAML's null for a setting that has no such value: jsonargparse lets it pass for any type."""

from dataclasses import is_dataclass
from pydoc import locate
from types import NoneType
from typing import Any, get_args

from jsonargparse import ArgumentParser, Namespace

from dflash_lightning.errors import ConfigError


def refuse_nulls(parser: ArgumentParser, settings: Namespace, place: str = "") -> None:
    """Refuse null where neither the type nor the default is None, in nested settings and named classes too.

    Args:
        settings: what ``parser`` made of a command line and its files.
        place: what the names of the settings begin with.

    Raises:
        ConfigError: naming the setting and what it expects.
    """
    for action in parser._actions:
        kind = getattr(action, "_typehint", None)
        if kind is None or action.dest not in settings:
            continue
        name, value = f"{place}{action.dest}", settings[action.dest]
        kinds = (kind, *get_args(kind))
        if value is None and action.default is not None and NoneType not in kinds:
            raise ConfigError(
                f"{name} is null; expected {getattr(kind, '__name__', kind)}. Leave it out for the default, "
                f"{action.default}."
            )
        several = value if isinstance(value, list) else [value]
        for number, one in enumerate(several):
            _refuse_inside(kinds, one, f"{name}[{number}]" if one is not value else name)


def _refuse_inside(kinds: tuple[Any, ...], value: Any, name: str) -> None:
    """Look into what a class is made from: one that is named, or the dataclass that the type asks for."""
    if not isinstance(value, Namespace):
        return
    if "class_path" in value:
        takes, value, name = locate(value.class_path), value.get("init_args"), f"{name}.init_args"
    else:
        takes = next((kind for kind in kinds if is_dataclass(kind)), None)
    if takes is None or value is None:
        return
    inner = ArgumentParser()
    inner.add_class_arguments(takes, fail_untyped=False)
    refuse_nulls(inner, value, f"{name}.")
