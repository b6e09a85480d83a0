"""Which samples share a micro-batch: a token budget, similar lengths, and an order from (seed, epoch) alone."""

import hashlib
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dflash_lightning.errors import ConfigError

# Raised with every change that makes other plans of the same samples and settings.
PLAN_VERSION = 1
# How many samples fit into a step is tried on so many steps.
TRIED_STEPS = 200
# Whether every sample finds room is tried on so many epochs.
TRIED_EPOCHS = 4
# So much more room than an average step needs: steps differ, and what doesn't fit into one goes to the next.
SPARE = 0.03


@dataclass(frozen=True)
class SampleSizes:
    """What the planner knows of n samples.

    Attributes:
        samples: [n] indices into the feature cache.
        lengths: [n] context tokens of each.
        anchors: [n] valid anchors of each: min(anchors a sample, candidates).
        shards: [n] the shard that holds each.
        block_size: slots that each anchor adds.
    """

    samples: np.ndarray
    lengths: np.ndarray
    anchors: np.ndarray
    shards: np.ndarray
    block_size: int

    @property
    def tokens(self) -> np.ndarray:
        """[n] tokens that a sample brings into the drafter: its context and the slots of its blocks."""
        return self.lengths + self.block_size * self.anchors


def check_budget(sizes: SampleSizes, batch_tokens: int) -> None:
    """Raise ConfigError if a sample alone exceeds the budget of a micro-batch."""
    heaviest = int(sizes.tokens.max())
    if heaviest > batch_tokens:
        raise ConfigError(
            f"data.batch_tokens is {batch_tokens:,}, but the largest sample alone takes {heaviest:,} tokens, block "
            "slots included. Raise batch_tokens, or lower num_anchors."
        )


def cut(sizes: SampleSizes, order: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Cut an order into micro-batches, each as long as the budget allows, padding included.

    A micro-batch of R rows takes R x (its longest context + block size x its most anchors) tokens.

    Args:
        order: positions in ``sizes``, those of similar length side by side; none exceeds the budget alone.
    """
    ends, rows, longest, most = [0], 0, 0, 0
    for position, (length, anchors) in enumerate(
        zip(sizes.lengths[order].tolist(), sizes.anchors[order].tolist(), strict=True)
    ):
        longest, most = max(longest, length), max(most, anchors)
        rows += 1
        if rows * (longest + sizes.block_size * most) > batch_tokens:
            ends.append(position)
            rows, longest, most = 1, length, anchors
    ends.append(len(order))
    return [order[start:end] for start, end in pairwise(ends)]


class EpochPlanner:
    """Plans the optimizer steps of an epoch for all ranks together, equally many in every epoch.

    Each step takes the same number of samples (one more or less) in shuffled order, or as many of them as fit; they are
    sorted by length and cut into its micro-batches. Nothing depends on ranks or workers.

    Samples are never sorted over several steps: that would pad less still, but each step would be a biased draw, as
    lengths go with kinds of texts; tried with one micro-batch a step, it cost acceptance length.

    Attributes:
        num_batches: micro-batches in every epoch.
    """

    def __init__(
        self,
        sizes: SampleSizes,
        *,
        batch_tokens: int,
        batches_per_step: int,
        seed: int = 0,
        shard_window: int | None = None,
    ):
        """
        Args:
            sizes: the samples to train on.
            batch_tokens: most tokens in a micro-batch, block slots and padding included.
            batches_per_step: micro-batches in an optimizer step: ranks x accumulation steps.
            seed: of the order.
            shard_window: draw from so many shards at a time, chosen anew each epoch; None draws from all.

        Raises:
            ConfigError: fewer samples than micro-batches in a step, or a sample larger than the budget.
        """
        if len(sizes.samples) < batches_per_step:
            raise ConfigError(
                f"the training split holds {len(sizes.samples)} samples, but one optimizer step takes "
                f"{batches_per_step} micro-batches (ranks x accumulation steps). Lower accumulate_grad_batches, or "
                "capture more samples."
            )
        check_budget(sizes, batch_tokens)
        self.sizes, self.batch_tokens, self.batches_per_step = sizes, batch_tokens, batches_per_step
        self.seed, self.shard_window = seed, shard_window
        self._most_in_step = batches_per_step * batch_tokens // int(sizes.tokens.min())
        self.num_steps = self._plan_steps()
        self.num_batches = self.num_steps * batches_per_step

    def identity(self) -> dict[str, int | str | None]:
        """Everything that the plan follows from. Equal identities make equal plans, whatever ranks and workers."""
        digest = hashlib.sha256(repr((self.sizes.block_size, len(self.sizes.samples))).encode())
        for column in (self.sizes.samples, self.sizes.lengths, self.sizes.anchors, self.sizes.shards):
            digest.update(column.astype(np.int64).tobytes())
        return {
            "plan version": PLAN_VERSION,
            "seed": self.seed,
            "batch_tokens": self.batch_tokens,
            "micro-batches in a step": self.batches_per_step,
            "shard_window": self.shard_window,
            "samples": digest.hexdigest(),
        }

    def batches(self, epoch: int) -> list[np.ndarray]:
        """Positions in ``sizes`` of each micro-batch of an epoch, step by step, the short samples of a step first.

        Every sample is in one of them, but for those that were still left when the last step was full.
        """
        return self._fill_steps(self.num_steps, epoch)

    def _fill_steps(self, num_steps: int, epoch: int) -> list[np.ndarray]:
        order, batches, taken = self._shuffled(epoch), [], 0
        for step in range(num_steps):
            due = (step + 1) * len(order) // num_steps
            members = self._fill_step(order[taken:due])
            batches += members
            taken += sum(map(len, members))
        return batches

    def _shuffled(self, epoch: int) -> np.ndarray:
        order = np.random.default_rng([self.seed, epoch, 0]).permutation(len(self.sizes.samples))
        if self.shard_window is None:
            return order
        shards, shard_of = np.unique(self.sizes.shards, return_inverse=True)
        turn = np.random.default_rng([self.seed, epoch, 1]).permutation(len(shards))
        return order[np.argsort(turn[shard_of[order]] // self.shard_window, kind="stable")]

    def _plan_steps(self) -> int:
        """Steps in an epoch: as few as hold every sample, or with spare room where they don't.

        Epochs of many steps aren't tried: that takes long, and rounding up to a whole step costs them little.
        """
        samples = len(self.sizes.samples)
        wanted, most = samples / self._samples_that_fit(), samples // self.batches_per_step
        fewest = min(math.ceil(wanted), most)
        if fewest <= TRIED_STEPS and all(
            sum(map(len, self._fill_steps(fewest, epoch))) == samples for epoch in range(TRIED_EPOCHS)
        ):
            return fewest
        return min(math.ceil(wanted * (1 + SPARE)), most)

    def _samples_that_fit(self) -> float:
        """Samples in a step that is as full as it can be, on average; what is left for the last one doesn't count."""
        order, taken, fitting = self._shuffled(0), 0, []
        while taken < len(order) and len(fitting) < TRIED_STEPS:
            fitting.append(sum(map(len, self._fill_step(order[taken : taken + self._most_in_step]))))
            taken += fitting[-1]
        full = fitting[:-1] if taken == len(order) else fitting
        return float(np.mean(full or fitting))

    def _fill_step(self, candidates: np.ndarray) -> list[np.ndarray]:
        """The micro-batches of a step of as many samples as fit, from the first one on."""
        fit, least, most = [], min(self.batches_per_step, len(candidates)), len(candidates)
        count = most
        while least <= most:
            members = candidates[:count]
            members = members[np.argsort(self.sizes.lengths[members], kind="stable")]
            batches = cut(self.sizes, members, self.batch_tokens)
            if len(batches) <= self.batches_per_step:
                fit, least = batches, count + 1
            else:
                most = count - 1
            count = (least + most) // 2
        return _halve_largest(fit, self.batches_per_step)


def _halve_largest(batches: list[np.ndarray], wanted: int) -> list[np.ndarray]:
    """Halve micro-batches, those of most rows first, until there are as many as wanted; their order stays."""
    parts = list(batches)
    while len(parts) < wanted:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        half = len(parts[largest]) // 2
        parts[largest : largest + 1] = [parts[largest][:half], parts[largest][half:]]
    return parts
