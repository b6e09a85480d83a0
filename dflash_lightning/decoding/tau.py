"""The acceptance length of many texts, and how well it is known.

``tau`` is tokens committed by verify rounds / verify rounds. It counts the bonus token and not what a stop token or the
length limit cut off (1 to block size).
"""

from collections.abc import Iterable, Sequence

import numpy as np

BOOTSTRAP_DRAWS = 2000


def pooled_tau(committed: Iterable[Sequence[int]]) -> float | None:
    """Tokens committed / rounds over several prompts; None without any round."""
    lengths = [n for rounds in committed for n in rounds]
    return sum(lengths) / len(lengths) if lengths else None


def tau_interval(committed: Sequence[Sequence[int]], seed: int = 0) -> tuple[float | None, float | None]:
    """95 % bootstrap interval of the pooled tau, prompts drawn with replacement."""
    return ratio_interval([sum(rounds) for rounds in committed], [len(rounds) for rounds in committed], seed)


def tau_difference_interval(
    committed: Sequence[Sequence[int]], other: Sequence[Sequence[int]], seed: int = 0
) -> tuple[float | None, float | None]:
    """95 % bootstrap interval of the first pooled tau less the other, the same prompts drawn for both."""
    taus = (_drawn_ratios(list(map(sum, rounds)), list(map(len, rounds)), seed) for rounds in (committed, other))
    return _middle(np.subtract(*taus))


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0
) -> tuple[float | None, float | None]:
    """95 % bootstrap interval of sum / sum, pairs drawn with replacement; None where all denominators are 0."""
    return _middle(_drawn_ratios(numerators, denominators, seed))


def _drawn_ratios(numerators: Sequence[float], denominators: Sequence[float], seed: int) -> np.ndarray:
    """[draws] sum / sum of each draw; NaN where it drew denominators of 0 only."""
    draws = np.random.default_rng(seed).integers(len(numerators), size=(BOOTSTRAP_DRAWS, len(numerators)))
    above, below = (np.array(values, dtype=float)[draws].sum(axis=1) for values in (numerators, denominators))
    return np.divide(above, below, out=np.full(BOOTSTRAP_DRAWS, np.nan), where=below > 0)


def _middle(ratios: np.ndarray) -> tuple[float | None, float | None]:
    """The bounds of the middle 95 % of those that are known; None if none is."""
    known = ratios[~np.isnan(ratios)]
    if len(known) == 0:
        return None, None
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)
