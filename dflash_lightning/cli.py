"""The command line: typed functions become commands, with help from their docstrings and YAML by ``--config``."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser
from rich.console import Console

from dflash_lightning import __version__
from dflash_lightning.errors import DFlashError

# Command -> where its function is, and what it does. A command imports only what it needs.
COMMANDS = {
    "prepare": ("dflash_lightning.prepare:prepare", "prompts -> the target's own answers, as tokens"),
    "capture": ("dflash_lightning.capture:capture", "answers -> context features in a cache"),
    "fit": ("dflash_lightning.fit:fit", "train a drafter on a cache (LightningCLI)"),
    "evaluate": (
        "dflash_lightning.evaluate:evaluate",
        "decode prompts for real: acceptance length, speed, losslessness",
    ),
    "generate": ("dflash_lightning.generate:generate", "answer one prompt, accepted spans in colour"),
    "export": ("dflash_lightning.export:export", "checkpoint -> folders that servers load"),
    "cache info": ("dflash_lightning.cache_commands:info", "what a cache holds"),
    "cache verify": ("dflash_lightning.cache_commands:verify", "compare every object of a cache with its checksum"),
}
POSITIONAL = ("cache info", "cache verify")


def load_command(name: str) -> Callable[..., Any]:
    """The function behind a command."""
    module, function = COMMANDS[name][0].split(":")
    return getattr(import_module(module), function)


def command_parser(name: str) -> ArgumentParser:
    """The parser of one command, made from its function's signature and docstring."""
    function = load_command(name)
    parser = ArgumentParser(prog=f"dflash-lightning {name}", description=function.__doc__.split("Args:")[0])
    if name not in POSITIONAL:
        parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of these settings.")
    parser.add_function_arguments(function, as_group=False, as_positional=name in POSITIONAL)
    for action in parser._actions:
        _spell_with_hyphens(parser, action)
    return parser


def _spell_with_hyphens(parser: ArgumentParser, action: argparse.Action) -> None:
    """`--max-new-tokens` on the command line, `max_new_tokens` in YAML."""
    if action.dest != "print_config":
        action.option_strings = [flag.replace("_", "-") for flag in action.option_strings]
        parser._option_string_actions |= dict.fromkeys(action.option_strings, action)


def _usage() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    usage = argparse.ArgumentParser(
        prog="dflash-lightning",
        description="Train drafters that make a large language model answer several times faster.",
        epilog=f"commands, in the order of the road:\n{listed}\n\n`dflash-lightning COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usage.add_argument("--version", action="version", version=__version__)
    usage.add_argument("command", nargs="+", metavar="COMMAND")
    return usage


def run(arguments: Sequence[str]) -> None:
    """Run one command.

    Raises:
        DFlashError: a user's mistake.
    """
    name = next((n for n in COMMANDS if list(arguments[: len(n.split())]) == n.split()), None)
    if name is None:
        usage = _usage()
        words = usage.parse_args([word for word in arguments[:2] if word in ("-h", "--help", "--version")] or arguments)
        usage.error(f"no command {' '.join(words.command[:2])!r}; the commands are {', '.join(COMMANDS)}")
    rest = list(arguments[len(name.split()) :])
    if name == "fit":
        load_command(name)(rest)
        return
    parser = command_parser(name)
    settings = parser.instantiate(parser.parse_args(rest)).as_dict()
    settings.pop("config", None)
    load_command(name)(**settings)


def main() -> None:
    """Entry point: a user's mistake ends with one message and exit code 2, without a traceback."""
    try:
        run(sys.argv[1:])
    except DFlashError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
