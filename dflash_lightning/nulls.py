"""Refuse YAML's null for a setting that has no such value: jsonargparse lets it pass for any type."""

from dataclasses import is_dataclass
from pydoc import locate
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace

from dflash_lightning.errors import ConfigError

OURS = ("callbacks", "dflash_lightning", "datamodules")
"""The packages whose classes are looked into: of others it isn't known what they make of null."""


def refuse_nulls(parser: ArgumentParser, settings: Namespace, place: str = "") -> None:
    """Refuse null where neither the type nor the default is None, in nested settings and our own classes too.

    Args:
        settings: what ``parser`` made of a command line and its files.
        place: what the names of the settings begin with.

    Raises:
        ConfigError: naming the setting and what it expects.
    """
    typed = [action for action in parser._actions if getattr(action, "_typehint", None) is not None]
    kinds = {action.dest: action._typehint for action in typed}
    defaults = {action.dest: action.default for action in typed}
    for group in {group for name in kinds for group in _groups(name)} - kinds.keys():
        if group in settings and settings[group] is None:
            raise ConfigError(f"{place}{group} is null; expected settings. Leave it out for their defaults.")
    for setting, kind in kinds.items():
        if setting not in settings:
            continue
        name, value = f"{place}{setting}", settings[setting]
        if value is None and defaults[setting] is not None and not _takes_none(kind):
            raise ConfigError(
                f"{name} is null; expected {_plain_name(kind)}. Leave it out for the default, {defaults[setting]!r}."
            )
        several = value if isinstance(value, list) else [value]
        for number, one in enumerate(several):
            _refuse_inside(kind, one, f"{name}[{number}]" if one is not value else name)


def _groups(name: str) -> list[str]:
    """`a` and `a.b` of `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _takes_none(kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType, Literal, Annotated):
        return any(map(_takes_none, get_args(kind)))
    return kind in (None, NoneType, Any, object)


def _plain_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _refuse_inside(kind: Any, value: Any, name: str) -> None:
    """Look into what a class of ours is made from: one that is named, or the dataclass that the type asks for."""
    if not isinstance(value, Namespace):
        return
    if "class_path" in value:
        takes, value, name = locate(value.class_path), value.get("init_args"), f"{name}.init_args"
    else:
        takes = next((alternative for alternative in (kind, *get_args(kind)) if is_dataclass(alternative)), None)
    if not isinstance(takes, type) or value is None or takes.__module__.partition(".")[0] not in OURS:
        return
    inner = ArgumentParser()
    inner.add_class_arguments(takes)
    refuse_nulls(inner, value, f"{name}.")
