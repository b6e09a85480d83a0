"""Writes docs/reference.md, every setting of every command, from the code itself: `make docs`."""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

from jsonargparse import SUPPRESS, ArgumentParser

import callbacks
from datamodules import FeatureCacheDataModule
from dflash_lightning.cli import COMMANDS, POSITIONAL, command_parser
from dflash_lightning.config import DrafterSettings
from dflash_lightning.training.losses import LossSettings
from dflash_lightning.training.module import DFlashModule
from dflash_lightning.training.optimizers import MuonSettings, OptimizerSettings
from dflash_lightning.training.strategy import DFlashDeepSpeedStrategy

PAGE = Path(__file__).with_name("reference.md")
HEAD = """\
# Reference: every setting of every command

Made from the code by `make docs`. On the command line a setting is `--name VALUE`; in a file for `--config` it is
`name: VALUE`, with underscores. Settings without a default have to be given.
"""
FIT = """
`fit --config FILE` is Lightning's own command line around the classes below. `trainer` takes every
setting of Lightning's `Trainer`. `--print_config` prints the whole configuration.

| setting | default | what |
|---|---|---|
| `resume` | null | A checkpoint to go on from, or `auto`: see [resume.md](resume.md). |
"""
CLASSES = {
    "model": DFlashModule,
    "model.drafter": DrafterSettings,
    "model.loss": LossSettings,
    "model.optimizer": OptimizerSettings,
    "model.optimizer.muon": MuonSettings,
    "data": FeatureCacheDataModule,
    f"trainer.strategy, as `class_path: {DFlashDeepSpeedStrategy.__module__}.DFlashDeepSpeedStrategy`": (
        DFlashDeepSpeedStrategy
    ),
    **{f"trainer.callbacks, as `class_path: callbacks.{name}`": getattr(callbacks, name) for name in callbacks.__all__},
}


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_commands()])


def _commands() -> Iterator[str]:
    for name, (_, summary) in COMMANDS.items():
        yield f"## `dflash-lightning {name}`\n"
        if name == "fit":
            yield f"{summary[0].upper()}{summary[1:]}.{FIT}"
            for title, kind in CLASSES.items():
                yield f"### {title}\n\n{_summary(kind)}\n\n{_table(_class_parser(kind))}"
            continue
        parser = command_parser(name)
        yield f"{_dedented(parser.description)}\n\n{_table(parser, positional=name in POSITIONAL)}"


def _dedented(docstring: str) -> str:
    first, _, rest = docstring.partition("\n")
    return f"{first}\n{textwrap.dedent(rest)}".strip()


def _summary(kind: type) -> str:
    """The first paragraph of a class's docstring."""
    return " ".join((kind.__doc__ or "").strip().split("\n\n")[0].split())


def _class_parser(kind: type) -> ArgumentParser:
    parser = ArgumentParser()
    parser.add_class_arguments(kind, as_group=False)
    return parser


def _table(parser: ArgumentParser, *, positional: bool = False) -> str:
    rows = []
    for action in parser._actions:
        if action.dest in ("help", "config", "print_config") or (action.default == SUPPRESS and not action.required):
            continue
        required = action.required or (positional and not action.option_strings)
        default = "" if required else f"`{_shown(action.default)}`"
        rows.append(f"| `{action.dest}` | {default} | {_told(action.help)} |")
    return "\n".join(["| setting | default | what |", "|---|---|---|", *rows]) + "\n" if rows else "No settings.\n"


def _shown(default: object) -> str:
    return str(default) if isinstance(default, str | Path) else json.dumps(default)


def _told(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
