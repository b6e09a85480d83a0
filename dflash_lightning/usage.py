"""What jsonargparse says of a wrong setting, told in a line or two."""

import re
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager

from dflash_lightning.errors import ConfigError, DFlashError

PLACE = re.compile(r'Parser key "([^"]+)": ?(.*)')
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
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", "\n".join(dict.fromkeys(reasons)))


def first_of_ours(error: BaseException) -> DFlashError | None:
    """Our own error behind one that another library made of it."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, DFlashError):
        link = link.__cause__ or link.__context__
    return link


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
