"""Which samples share a micro-batch: a token budget, similar lengths, and an order from (seed, epoch) alone."""

import hashlib
import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dflash_lightning.errors import ConfigError

# Samples are sorted by length within windows of so many micro-batches. Larger windows pad less; smaller ones mix more.
WINDOW_BATCHES = 32
# At least so many windows, so that the samples of a small data set meet others in every epoch.
MIN_WINDOWS = 8
# Orders of other epochs may need a few micro-batches more than the first one.
SPARE_BATCHES = 0.01


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


def cut(sizes: SampleSizes, order: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Cut an order into micro-batches, each as long as the budget allows, padding included.

    A micro-batch of R rows takes R x (its longest context + block size x its most anchors) tokens.

    Args:
        order: positions in ``sizes``, those of similar length side by side.

    Raises:
        ConfigError: a sample alone exceeds the budget.
    """
    heaviest = int(sizes.tokens.max())
    if heaviest > batch_tokens:
        raise ConfigError(
            f"data.batch_tokens is {batch_tokens:,}, but the largest sample alone takes {heaviest:,} tokens, block "
            "slots included. Raise batch_tokens, or lower num_anchors."
        )
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
    """Plans the micro-batches of an epoch for all ranks together, equally many in every epoch.

    Samples are shuffled, sorted by length within small windows, cut by the token budget, and the micro-batches
    shuffled again. So a micro-batch holds similar lengths, and neighbours differ. Nothing depends on ranks or workers.
    The number is a multiple of ``batches_per_step``: what is missing is made up by halving those of most rows.

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
        self.sizes, self.batch_tokens, self.batches_per_step = sizes, batch_tokens, batches_per_step
        self.seed, self.shard_window = seed, shard_window
        window = min(WINDOW_BATCHES * batch_tokens / sizes.tokens.mean(), len(sizes.samples) / MIN_WINDOWS)
        self._window = max(1, round(window))
        expected = len(self._cut(0)) * (1 + SPARE_BATCHES)
        most_steps = len(sizes.samples) // batches_per_step
        self.num_batches = min(most_steps, -int(-expected // batches_per_step)) * batches_per_step

    def identity(self) -> dict[str, int | str | None]:
        """Everything that the plan follows from. Equal identities make equal plans, whatever ranks and workers."""
        digest = hashlib.sha256(repr((self.sizes.block_size, len(self.sizes.samples))).encode())
        for column in (self.sizes.samples, self.sizes.lengths, self.sizes.anchors, self.sizes.shards):
            digest.update(column.astype(np.int64).tobytes())
        return {
            "seed": self.seed,
            "batch_tokens": self.batch_tokens,
            "micro-batches in a step": self.batches_per_step,
            "shard_window": self.shard_window,
            "samples": digest.hexdigest(),
        }

    def batches(self, epoch: int) -> list[np.ndarray]:
        """Positions in ``sizes`` of each micro-batch of an epoch, in the order of training.

        Every sample is in one of them, unless this epoch's order needed more than ``num_batches``: what comes after
        them is left out.
        """
        batches = self._cut(epoch)
        self._halve_largest(batches)
        generator = np.random.default_rng([self.seed, epoch, 1])
        order = generator.permutation(len(batches))
        windows = self._shard_windows(epoch)[[batch[0] for batch in batches]]
        order = order[np.argsort(windows[order], kind="stable")]
        return [batches[i] for i in order[: self.num_batches]]

    def _shard_windows(self, epoch: int) -> np.ndarray:
        """[n] the window of shards, by number, to which each sample belongs in this epoch."""
        if self.shard_window is None:
            return np.zeros(len(self.sizes.samples), dtype=np.int64)
        shards, shard_of = np.unique(self.sizes.shards, return_inverse=True)
        turn = np.random.default_rng([self.seed, epoch, 2]).permutation(len(shards))
        return turn[shard_of] // self.shard_window

    def _cut(self, epoch: int) -> list[np.ndarray]:
        order = np.random.default_rng([self.seed, epoch, 0]).permutation(len(self.sizes.samples))
        windows = self._shard_windows(epoch)[order]
        order = order[np.argsort(windows, kind="stable")]
        cuts = np.flatnonzero(np.diff(np.sort(windows))) + 1
        pieces = []
        for group in np.split(order, cuts):
            for start in range(0, len(group), self._window):
                piece = group[start : start + self._window]
                piece = piece[np.argsort(self.sizes.lengths[piece], kind="stable")]
                # Up and down in turn, so that a micro-batch across two windows holds similar lengths too.
                pieces.append(piece[::-1] if len(pieces) % 2 else piece)
        return cut(self.sizes, np.concatenate(pieces), self.batch_tokens)

    def _halve_largest(self, batches: list[np.ndarray]) -> None:
        missing = self.num_batches - len(batches)
        if missing <= 0:
            return
        largest = [(-len(batch), number) for number, batch in enumerate(batches)]
        heapq.heapify(largest)
        for _ in range(missing):
            _, number = heapq.heappop(largest)
            half = len(batches[number]) // 2
            batches.append(batches[number][half:])
            batches[number] = batches[number][:half]
            for part in (number, len(batches) - 1):
                heapq.heappush(largest, (-len(batches[part]), part))
