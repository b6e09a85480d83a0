"""How much of a run's wall time something else than training takes, and may take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class TimeBudget:
    """Counts the seconds spent since it was made, against all that have passed.

    Attributes:
        max_share: most that may be spent of the time that has passed, 0 to 1.
        last: seconds of the latest spending, a forecast of the next.
    """

    def __init__(self, max_share: float):
        self.max_share = max_share
        self.last = 0.0
        self._spent, self._start = 0.0, time.perf_counter()

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Count what is done inside."""
        start = time.perf_counter()
        yield
        self.last = time.perf_counter() - start
        self._spent += self.last

    @property
    def share(self) -> float:
        """Share of the time passed that was spent."""
        return self._spent / (time.perf_counter() - self._start)

    @property
    def share_after_another(self) -> float:
        """What the share would be after another spending like the latest."""
        passed = time.perf_counter() - self._start
        return (self._spent + self.last) / (passed + self.last)
