"""The command line: typed functions become subcommands, with help from their docstrings and YAML by ``--config``."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings
from rich.console import Console

from dflash_lightning import __version__
from dflash_lightning.errors import DFlashError

DESCRIPTION = """\
Train drafters that make a large language model answer several times faster.

The road: prepare -> capture -> fit -> evaluate -> export -> generate."""


def _commands() -> dict[str, Callable[..., Any]]:
    # Imported here, so that `--version` and a mistyped command don't wait for torch and transformers.
    from dflash_lightning.cache_commands import info, verify
    from dflash_lightning.capture import capture
    from dflash_lightning.evaluate import evaluate, generate
    from dflash_lightning.export import export
    from dflash_lightning.prepare import prepare

    return {
        "prepare": prepare,
        "capture": capture,
        "evaluate": evaluate,
        "generate": generate,
        "export": export,
        "cache info": info,
        "cache verify": verify,
    }


def _function_parser(name: str, function: Callable[..., Any], **options: Any) -> ArgumentParser:
    parser = ArgumentParser(prog=f"dflash-lightning {name}", description=function.__doc__.split("\n\n")[0], **options)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of these settings.")
    parser.add_function_arguments(function, as_group=False, as_positional=False)
    return parser


def build_parser() -> ArgumentParser:
    """The parser of all commands but ``fit``, which is Lightning's."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog="dflash-lightning", description=DESCRIPTION, version=__version__)
    commands = parser.add_subcommands(dest="command", metavar="COMMAND")
    functions = _commands()
    summaries = {name: function.__doc__.split("\n\n")[0] for name, function in functions.items()}
    for name in ("prepare", "capture"):
        commands.add_subcommand(name, _function_parser(name, functions[name]), help=summaries[name])
    commands.add_subcommand(
        "fit", ArgumentParser(), help="Train a drafter on a feature cache (LightningCLI; see `fit --help`)."
    )
    for name in ("evaluate", "generate", "export"):
        commands.add_subcommand(name, _function_parser(name, functions[name]), help=summaries[name])
    cache = ArgumentParser(prog="dflash-lightning cache", description="Look at a feature cache.")
    cache_commands = cache.add_subcommands(dest="cache_command", metavar="COMMAND")
    for name in ("info", "verify"):
        full = f"cache {name}"
        cache_parser = ArgumentParser(prog=f"dflash-lightning {full}", description=summaries[full])
        cache_parser.add_function_arguments(functions[full], as_group=False, as_positional=True)
        cache_commands.add_subcommand(name, cache_parser, help=summaries[full])
    commands.add_subcommand("cache", cache, help="Look at a feature cache: `cache info`, `cache verify`.")
    return parser


def run(arguments: Sequence[str]) -> None:
    """Run one command. Errors of the user are raised as ``DFlashError``."""
    if arguments and arguments[0] == "fit":
        from dflash_lightning.fit import fit

        fit(arguments[1:])
        return
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    name = parsed.command
    values = parsed[name]
    if name == "cache":
        name = f"cache {values.cache_command}"
        values = values[values.cache_command]
    values = parser.instantiate_classes(parsed)[parsed.command] if parsed.command != "cache" else values
    settings = {key: value for key, value in values.as_dict().items() if key not in ("config", "__default_config__")}
    _commands()[name](**settings)


def main() -> None:
    """Entry point: a user's mistake ends with one message and exit code 2, without a traceback."""
    try:
        run(sys.argv[1:])
    except DFlashError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
