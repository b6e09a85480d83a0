"""What jsonargparse says of a wrong setting, told in a line or two."""

import re
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import yaml

from dflash_lightning.errors import ConfigError, DFlashError

PLACE = re.compile(r'Parser key "([^"]+)": ?(.*)')
FAILED_CLASS = re.compile(r"Problem with given class_path '([^']+)':\s*(.+)")
MACHINERY = re.compile(
    r"Does not validate|Subtypes:|Errors:|Given value|Problem with given class_path|Expected a .*NoneType"
)


def plain_words(message: str) -> str:
    """A message of jsonargparse as one line a reason, each with the full name of its setting.

    It nests the names of settings, and lists what each alternative of a type says, "nothing at all" included.
    """
    reasons, places = [], []
    for line in message.splitlines():
        words = line.strip().removeprefix("- ")
        indent = len(line) - len(line.lstrip())
        if place := PLACE.match(words):
            places = [*((depth, name) for depth, name in places if depth < indent), (indent, place[1])]
            words = place[2]
        if words and not MACHINERY.match(words):
            name = ".".join(name for _, name in places)
            reasons.append(f"{name}: {words}" if name else words)
    named = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", "\n".join(dict.fromkeys(reasons)))
    return re.sub(r"\ba (?=[aeiou])", "an ", named)


def first_of_ours(error: BaseException) -> DFlashError | None:
    """Our own error behind one that another library made of it."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, DFlashError):
        link = link.__cause__ or link.__context__
    return link


def class_that_fails(error: ValueError) -> ConfigError | None:
    """What a class that the configuration names says of being made, where jsonargparse lists all that it tried."""
    found = FAILED_CLASS.search(str(error))
    return found and ConfigError(f"{found[1]} can't be made: {found[2]}")


@contextmanager
def usage_errors(program: str) -> Iterator[None]:
    """A setting that isn't known, or isn't what its type asks for, becomes a ConfigError."""
    try:
        yield
    except ArgumentError as error:
        told = first_of_ours(error) or ConfigError(
            f"{plain_words(error.message)}\n`{program} --help` lists the settings."
        )
        raise told from error


def refuse_training_configuration(program: str, arguments: Sequence[str]) -> None:
    """Refuse the YAML file of a training where a command's own settings are expected.

    Raises:
        ConfigError: saying which option it belongs to.
    """
    for option, value in pairwise([*arguments, ""]):
        flag, equals, joined = option.partition("=")
        if flag == "--config" and _is_training(Path(joined if equals else value)):
            advice = "`dflash-lightning fit` takes it"
            if program.endswith(" doctor"):
                advice = f"give it as --training {joined if equals else value}"
            raise ConfigError(
                f"{joined if equals else value} is the configuration of a training (it has `trainer`), and --config of "
                f"`{program}` expects a file with that command's own settings: {advice}."
            )


def _is_training(file: Path) -> bool:
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False  # for the parser to refuse
    return isinstance(settings, dict) and isinstance(settings.get("trainer"), dict)
