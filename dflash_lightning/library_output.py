"""What libraries print: on stderr, in whole lines above a live bar, and without what nobody could act on."""

import logging
import re
import sys
import warnings
from pathlib import Path

from dflash_lightning.missing import OURS

LOGGERS = ("lightning.pytorch", "lightning.fabric", "DeepSpeed")
# Of a library about itself: what it sets up as it always does, what it lacks and we don't use, advertisements.
CHATTER = re.compile(
    r"Setting accelerator to CPU|initializing deepspeed distributed|Enabling DeepSpeed BF16|^TPU available|litlogger"
)


class _OnStderr(logging.Handler):
    """Prints on what is stderr at that moment, which a live bar replaces to stay in one piece."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)  # noqa: T201


_ON_STDERR = _OnStderr()
_ON_STDERR.addFilter(lambda record: not CHATTER.search(record.getMessage()))


def tame_libraries() -> None:
    """Let loggers of libraries print on stderr, and warnings in a line without their source code."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.addFilter(_replace_handlers) if name == "DeepSpeed" else _replace_handlers_of(logger)
    warnings.formatwarning = format_warning


def _replace_handlers_of(logger: logging.Logger) -> None:
    logger.handlers = [_ON_STDERR]


def _replace_handlers(record: logging.LogRecord) -> bool:
    """DeepSpeed takes seconds to import, so that it may be later that it gives its logger a handler on stdout."""
    _replace_handlers_of(logging.getLogger(record.name))
    return True


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Ours as a sentence; those of others with their place, without the line of code. As `warnings.formatwarning`."""
    del line
    root = Path(__file__).parent.parent
    if any(Path(filename).is_relative_to(root / package) for package in OURS):
        return f"warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"
