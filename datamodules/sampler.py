"""Who computes which micro-batch, and when."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Sampler

from datamodules.plan import EpochPlanner, SampleSizes, check_budget, cut
from dflash_lightning.cache import SampleLocation

Locate = Callable[[int], SampleLocation]


class MicroBatch(NamedTuple):
    """What one rank computes in one accumulation step: all that a data worker needs to know."""

    indices: tuple[int, ...]
    """Its samples, as the feature cache numbers them."""
    samples: tuple[SampleLocation, ...]
    """Where they lie in it."""
    epoch: int | None
    """Keys the anchors; None in validation, where they never change."""
    anchors_in_step: int
    """Valid anchors of the whole optimizer step, over all ranks and accumulation steps."""


class StepSampler(Sampler[MicroBatch]):
    """Deals the planned micro-batches of each optimizer step over ranks and accumulation steps.

    Rank r of W computes the micro-batches r, r + W, r + 2W, ... of the epoch's plan, so that a step is the same however
    its micro-batches are dealt. Every rank gets the same number, a multiple of the accumulation steps. Valid anchors of
    a step are known from the index, so that no rank has to ask the others.
    """

    def __init__(self, planner: EpochPlanner, locate: Locate, *, rank: int = 0, world_size: int = 1):
        self.planner, self.locate, self.rank, self.world_size = planner, locate, rank, world_size
        self.epoch, self.start = 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning at the start of each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.planner.num_batches // self.world_size

    def __iter__(self) -> Iterator[MicroBatch]:
        """Micro-batches of this rank from ``start`` on. A resume sets ``start``; it holds for one epoch only."""
        # Taken with the first batch: a loader with workers calls iter() twice before it asks for one.
        start, self.start = self.start, 0
        sizes, batches = self.planner.sizes, self.planner.batches(self.epoch)
        left_out = len(sizes.samples) - sum(map(len, batches))
        if left_out:
            rank_zero_info(f"epoch {self.epoch}: {left_out} of {len(sizes.samples)} samples fit in no step, left out")
        anchors = np.array([sizes.anchors[batch].sum() for batch in batches])
        anchors_in_step = anchors.reshape(-1, self.planner.batches_per_step).sum(axis=1)
        for number in range(start * self.world_size + self.rank, len(batches), self.world_size):
            indices = tuple(sizes.samples[batches[number]].tolist())
            yield MicroBatch(
                indices,
                tuple(map(self.locate, indices)),
                epoch=self.epoch,
                anchors_in_step=int(anchors_in_step[number // self.planner.batches_per_step]),
            )


class ValidationSampler(Sampler[MicroBatch]):
    """Every sample once, shortest first, in micro-batches of the same token budget; ranks take turns.

    Every rank gets the same number of batches, since ranks may meet in collectives in each. What is missing in the last
    round is filled with micro-batches of no anchor, which count for nothing.
    """

    def __init__(self, sizes: SampleSizes, locate: Locate, *, batch_tokens: int, rank: int = 0, world_size: int = 1):
        self.sizes, self.locate, self.rank, self.world_size = sizes, locate, rank, world_size
        check_budget(sizes, batch_tokens)
        self._batches = cut(sizes, np.argsort(sizes.lengths, kind="stable"), batch_tokens)

    def __len__(self) -> int:
        return -(-len(self._batches) // self.world_size)

    def __iter__(self) -> Iterator[MicroBatch]:
        for number in range(self.rank, len(self) * self.world_size, self.world_size):
            if number < len(self._batches):
                batch = self._batches[number]
                samples, anchors = self.sizes.samples[batch].tolist(), int(self.sizes.anchors[batch].sum())
            else:
                samples, anchors = self.sizes.samples[self._batches[0][:1]].tolist(), 0
            yield MicroBatch(tuple(samples), tuple(map(self.locate, samples)), None, anchors)
