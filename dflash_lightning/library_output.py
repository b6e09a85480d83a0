"""What libraries print: on stderr, in whole lines above a live bar, and without what nobody could act on."""

import logging
import re
import sys
import warnings
from pathlib import Path
from typing import TextIO

from dflash_lightning.missing import OURS

LOGGERS = ("lightning.pytorch", "lightning.fabric", "DeepSpeed")
# Of a library about itself: what it sets up as it always does, what it lacks and we don't use, advertisements.
CHATTER = re.compile(
    r"Setting accelerator to CPU|initializing deepspeed distributed|Enabling DeepSpeed BF16|^TPU available|litlogger"
)


class _OnStderr(logging.StreamHandler):
    """Prints on what is stderr at that moment, which a live bar replaces to stay in one piece."""

    def __init__(self):
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        return super().filter(record) and not CHATTER.search(str(record.msg))


_ON_STDERR = _OnStderr()


def tame_libraries() -> None:
    """Let loggers of libraries print on stderr, and warnings in a line without their source code.

    A library that is imported later gives its logger a handler of its own; that goes at the logger's next message, or
    when this is called again.
    """
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.addFilter(_mind_handlers)
        _take_terminal(logger)
    warnings.formatwarning = format_warning


def _mind_handlers(record: logging.LogRecord) -> bool:
    """Lets every message pass: a logger asks its filters before its handlers."""
    _take_terminal(logging.getLogger(record.name))
    return True


def _take_terminal(logger: logging.Logger) -> None:
    """Put our handler in the place of those that print on the terminal; a user's file stays."""
    terminal = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    kept = [handler for handler in logger.handlers if getattr(handler, "stream", None) not in terminal]
    logger.handlers = [*kept, _ON_STDERR]


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Ours as a sentence; those of others with their place, without the line of code. As `warnings.formatwarning`."""
    del line
    root = Path(__file__).parent.parent
    if any(Path(filename).is_relative_to(root / package) for package in OURS):
        return f"warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"
