"""Progress on stderr: a live bar with rate and time left on a terminal, a line now and then in a log."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dflash_lightning.distributed import launched_place

SECONDS_BETWEEN_LINES = 20.0
# The live bar that is shown now; there can be only one.
_BAR: ContextVar[Progress | None] = ContextVar("_BAR", default=None)


def say(result: str) -> None:
    """Print a result line on stdout; progress and errors go to stderr."""
    Console().print(result, highlight=False, markup=False, soft_wrap=True)


def inform(message: str) -> None:
    """Print a line about the work on stderr."""
    Console(stderr=True).print(message, highlight=False, markup=False, soft_wrap=True)


class Tracker:
    """What a stage that is under way reports to.

    Args:
        total: Steps that the stage will have taken.
        description: The stage, as it is shown.
        unit: What `advance`'s `done` counts, for the rate ("tokens", "rows").
        start: Steps that an earlier run of it took.
        bar: The live bar; None prints lines.
        silent: Show nothing.
    """

    def __init__(
        self,
        total: int,
        description: str,
        unit: str,
        *,
        start: int = 0,
        bar: Progress | None = None,
        silent: bool = False,
    ):
        self.total, self.description, self.unit, self._bar = total, description, unit, bar
        self.steps, self.done = start, 0
        self._first_step, self._silent = start, silent
        self._start = self._last_line = time.monotonic()
        self._task = bar.add_task(description, total=total, completed=start, rate="") if bar else None

    def vanish(self) -> None:
        """Take the stage's line off the live bar."""
        if self._bar:
            self._bar.remove_task(self._task)

    @property
    def rate(self) -> float:
        """Units done a second, since the start."""
        return self.done / max(time.monotonic() - self._start, 1e-9)

    def advance(self, steps: int = 1, done: int | None = None, note: str = "") -> None:
        """Report steps that are finished, how many units they were (default: one a step), and what else to show."""
        self.steps += steps
        self.done += steps if done is None else done
        decimals = 0 if self.rate >= 10 else 1 if self.rate >= 1 else 2
        rate = f"{self.rate:,.{decimals}f} {self.unit}/s"
        if self._bar:
            self._bar.update(self._task, completed=self.steps, rate=f"{rate}{note}")
        if self._bar or self._silent:
            return
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES or self.steps >= self.total:
            self._last_line = now
            left = (now - self._start) / max(self.steps - self._first_step, 1) * (self.total - self.steps)
            line = f"{self.description}: {self.steps}/{self.total}, {rate}, {left:.0f} s left{note}"
            print(line, file=sys.stderr, flush=True)  # noqa: T201


@contextmanager
def track(total: int, description: str, unit: str = "rows", start: int = 0) -> Iterator[Tracker]:
    """Show the progress of a stage while the block runs; it reports through `Tracker.advance`.

    Standard output stays free for results. Of several processes the first shows its own part, and no other anything. A
    stage inside another one has its bar below the other's, for as long as it takes.
    """
    console, outer = Console(stderr=True), _BAR.get()
    if launched_place().rank > 0:
        yield Tracker(total, description, unit, start=start, silent=True)
        return
    if outer is not None:
        inner = Tracker(total, description, unit, start=start, bar=outer)
        yield inner
        inner.vanish()
        return
    if not console.is_terminal:
        yield Tracker(total, description, unit, start=start)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        token = _BAR.set(bar)
        try:
            yield Tracker(total, description, unit, start=start, bar=bar)
        finally:
            _BAR.reset(token)
