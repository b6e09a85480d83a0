"""The command line: typed functions become commands, with help from their docstrings and YAML by ``--config``."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from typing import Any

import docstring_parser
from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings
from rich.console import Console
from rich.text import Text

from dflash_lightning import __version__
from dflash_lightning.errors import DFlashError
from dflash_lightning.library_output import tame_libraries
from dflash_lightning.missing import missing_package
from dflash_lightning.nulls import refuse_nulls
from dflash_lightning.usage import refuse_training_configuration, usage_errors
from dflash_lightning.writable import advised

# The settings' dataclasses say below each field what it is.
set_parsing_settings(docstring_parse_attribute_docstrings=True)

# Command -> where its function is, and what it does. A command imports only what it needs.
COMMANDS = {
    "prepare": ("dflash_lightning.prepare.command:prepare", "prompts -> the target's own answers, as tokens"),
    "capture": ("dflash_lightning.capture.command:capture", "answers -> context features in a cache"),
    "fit": ("dflash_lightning.training.fit:fit", "train a drafter on a cache (LightningCLI)"),
    "report": ("dflash_lightning.report:report", "a training -> one page: figures, curves, texts, settings"),
    "evaluate": (
        "dflash_lightning.evaluation.command:evaluate",
        "decode prompts for real: acceptance length, speed, losslessness",
    ),
    "generate": ("dflash_lightning.decoding.generate:generate", "answer a prompt, or chat, accepted spans in colour"),
    "export": ("dflash_lightning.export:export", "checkpoint -> folders that servers load"),
    "doctor": ("dflash_lightning.doctor:doctor", "whether packages, machine and the parts of a run would do"),
    "cache plan": ("dflash_lightning.capture.plan:plan", "what a capture would take, before anything is written"),
    "cache info": ("dflash_lightning.cache.commands:info", "what a cache holds"),
    "cache bench": (
        "dflash_lightning.cache.bench_command:bench",
        "how fast a cache is read, beside memmap and torch files",
    ),
    "cache verify": ("dflash_lightning.cache.commands:verify", "compare every object of a cache with its checksum"),
}
DEBUG = "--debug"
POSITIONAL = ("cache bench", "cache info", "cache verify", "report")


def load_command(name: str) -> Callable[..., Any]:
    """The function behind a command."""
    module, function = COMMANDS[name][0].split(":")
    return getattr(import_module(module), function)


def command_parser(name: str) -> ArgumentParser:
    """The parser of one command."""
    return function_parser(load_command(name), f"dflash-lightning {name}", positional=name in POSITIONAL)


def function_parser(function: Callable[..., Any], program: str, *, positional: bool = False) -> ArgumentParser:
    """A parser made from a function's signature and docstring; a plain bool becomes a switch.

    Args:
        positional: required settings are given by position, and there is no YAML file.
    """
    parser = ArgumentParser(prog=program, description=function.__doc__.split("Args:")[0], exit_on_error=False)
    if not positional:
        parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of these settings.")
    switches = [name for name, setting in signature(function).parameters.items() if setting.annotation is bool]
    parser.add_function_arguments(function, as_group=False, as_positional=positional, skip=set(switches))
    described = {setting.arg_name: setting.description for setting in docstring_parser.parse(function.__doc__).params}
    for name in switches:  # jsonargparse would want a value: --repair true
        parser.add_argument(f"--{name}", action="store_true", help=described[name])
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
    usage.add_argument(DEBUG, action="store_true", help="show where in the code an error was raised")
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
    command = load_command(name)
    tame_libraries()
    if name == "fit":
        command(rest)
    else:
        command(**parsed_settings(command_parser(name), rest))


def parsed_settings(parser: ArgumentParser, arguments: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments for the function that ``parser`` was made from; others are refused with a ConfigError."""
    refuse_training_configuration(parser.prog, arguments)
    with usage_errors(parser.prog):
        parsed = parser.parse_args(arguments)
        refuse_nulls(parser, parsed)
        settings = parser.instantiate(parsed).as_dict()
    settings.pop("config", None)
    return settings


@contextmanager
def one_message(debug: bool = False) -> Iterator[None]:
    """A user's mistake ends with one message and exit code 2; without a traceback, unless for ``debug``."""
    try:
        yield
    except (DFlashError, OSError, ImportError) as error:
        message = _message(error)
        if debug or message is None:
            raise
        Console(stderr=True).print(Text("error: ", style="bold red") + Text(message), soft_wrap=True)
        sys.exit(2)


def _message(error: Exception) -> str | None:
    """What to tell a user; None of an error that is ours."""
    if isinstance(error, DFlashError):
        return str(error)
    return advised(error) if isinstance(error, OSError) else missing_package(error)


def main() -> None:
    """Entry point of the console script and of ``python -m dflash_lightning``."""
    arguments = sys.argv[1:]
    with one_message(debug=DEBUG in arguments):
        run([word for word in arguments if word != DEBUG])
