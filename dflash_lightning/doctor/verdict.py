"""What a check says."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Verdict:
    """What was looked at, what was found, and what to do about it.

    Attributes:
        state: ok; doubtful: it may work, but slowly or not for long; fails: a run would end there.
        advice: empty where there is nothing to do.
    """

    subject: str
    state: Literal["ok", "doubtful", "fails"]
    found: str
    advice: str = ""
