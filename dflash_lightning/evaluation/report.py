"""The report of an evaluation: what all its texts say of a drafter."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from statistics import mean, median
from typing import Any

from dflash_lightning.decoding.tau import pooled_tau, ratio_interval, tau_interval
from dflash_lightning.evaluation.prompt_results import PromptResult


def summarize(
    results: Sequence[PromptResult], block_size: int, baseline_tokens_per_second: float | None = None
) -> dict[str, Any]:
    """The report of an evaluation; see docs/metrics.md for each key.

    Args:
        results: of all texts; those of one conversation one after the other.
        baseline_tokens_per_second: the fastest plain decoding known for this target on this machine; default: the plain
            runs of the same prompts.
    """
    prompts = [list(texts) for _, texts in groupby(results, key=lambda result: result.prompt.id)]
    # Turns of a conversation are no independent samples: whole conversations are drawn for the intervals.
    committed = [[n for text in texts for n in text.committed] for texts in prompts]
    taus = [[mean(text.committed) for text in texts if text.committed] for texts in prompts]
    lengths = Counter(n for rounds in committed for n in rounds)
    histogram = {str(n): lengths[n] for n in range(1, block_size + 1)}
    forced = Counter(n for result in results for n in result.accepted_teacher_forced)
    low, high = tau_interval(committed)
    mean_low, mean_high = ratio_interval([sum(values) for values in taus], [len(values) for values in taus])
    seconds = sum(result.seconds for result in results)
    plain_seconds = sum(result.plain_seconds for result in results)
    speed = sum(len(result.token_ids) for result in results) / seconds
    plain_speed = sum(len(result.plain_token_ids) for result in results) / plain_seconds
    baseline = max(plain_speed, baseline_tokens_per_second or 0.0)
    families = sorted({result.prompt.family for result in results if result.prompt.family is not None})
    return {
        "tau": pooled_tau(committed),
        "tau_low": low,
        "tau_high": high,
        "tau_mean": mean(values) if (values := [tau for texts in taus for tau in texts]) else None,
        "tau_mean_low": mean_low,
        "tau_mean_high": mean_high,
        "teacher_forced_tau": mean(forced.elements()) if forced else None,
        "rounds": lengths.total(),
        "prompts": len(prompts),
        "texts": len(results),
        "by_family": {
            family: pooled_tau(r.committed for r in results if r.prompt.family == family) for family in families
        },
        "tokens_per_second": speed,
        "baseline_tokens_per_second": baseline,
        "speedup": speed / baseline,
        "seconds_to_first_token": median(result.prefill_seconds for result in results),
        "plain_seconds_to_first_token": median(result.plain_prefill_seconds for result in results),
        "histogram": histogram,
        "teacher_forced_histogram": {n: forced[int(n)] for n in histogram},
        **acceptance_by_slot(histogram.values()),
        "lossless": lossless_counts(prompts),
        "mask_token_prompts": sum(any(text.mask_tokens for text in texts) for texts in prompts),
    }


def acceptance_by_slot(histogram: Iterable[int]) -> dict[str, list[float | None]]:
    """Shares of the rounds in which slot 1, 2, ... was accepted: of all rounds, and of those that got to the slot.

    Args:
        histogram: [B] rounds that committed 1, 2, ... tokens.
    """
    counts = list(histogram)
    reached = [sum(counts[k:]) for k in range(len(counts))]  # rounds that committed more than k tokens
    return {
        "acceptance_by_slot": [n / reached[0] if reached[0] else None for n in reached[1:]],
        "conditional_acceptance_by_slot": [n / before if before else None for before, n in pairwise(reached)],
    }


def lossless_counts(prompts: Sequence[Sequence[PromptResult]]) -> dict[str, int] | None:
    """How many prompts were answered as by plain greedy decoding, or parted from it at ties only, in all their turns.

    None if the texts are sampled: two draws of one distribution needn't be equal.
    """
    if any(text.identical is None for texts in prompts for text in texts):
        return None
    identical = sum(all(text.identical for text in texts) for texts in prompts)
    ties = sum(all(text.identical or text.tie for text in texts) for texts in prompts) - identical
    return {
        "prompts": len(prompts),
        "identical": identical,
        "ties": ties,
        "differing": len(prompts) - identical - ties,
    }
