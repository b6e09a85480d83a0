"""Which samples make up which micro-batch: decided by (seed, epoch) and the index alone."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from dflash_lightning.errors import ConfigError


class MicroBatch(NamedTuple):
    """What one rank computes in one accumulation step."""

    samples: tuple[int, ...]
    """Indices into the feature cache."""
    epoch: int | None
    """Keys the anchors; None in validation, where they never change."""
    anchors_in_step: int
    """Valid anchors of the whole optimizer step, over all ranks and accumulation steps."""


class StepSampler(Sampler[MicroBatch]):
    """Shuffles samples into optimizer steps and deals each step's micro-batches over ranks and accumulation steps.

    The order depends on (seed, epoch) alone, so that it is the same for any world size with the same global batch.
    Every rank gets the same number of batches, a multiple of the accumulation steps: the tail that fills no step is
    left out of this epoch. Valid anchors of a step are known from the index, so that no rank has to ask the others.
    """

    def __init__(
        self,
        samples: np.ndarray,
        anchors: np.ndarray,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
        seed: int = 0,
    ):
        """
        Args:
            samples: [n] indices into the feature cache.
            anchors: [n] valid anchors of each: min(anchors a sample, candidates).
            batch_size: samples in a micro-batch of one rank.
            rank, world_size, accumulation: how a step is cut.
            seed: of the order.

        Raises:
            ConfigError: fewer samples than one optimizer step needs.
        """
        self.samples, self.anchors = samples, anchors
        self.batch_size, self.rank, self.world_size, self.accumulation = batch_size, rank, world_size, accumulation
        self.seed, self.epoch, self.start = seed, 0, 0
        self.num_steps = len(samples) // self.samples_per_step
        if self.num_steps == 0:
            raise ConfigError(
                f"the training split holds {len(samples)} samples, but one optimizer step takes "
                f"{self.samples_per_step} ({batch_size} samples x {world_size} ranks x {accumulation} accumulation "
                "steps). Lower batch_size or accumulate_grad_batches, or capture more samples."
            )

    @property
    def samples_per_step(self) -> int:
        return self.batch_size * self.world_size * self.accumulation

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning at the start of each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_steps * self.accumulation

    def __iter__(self) -> Iterator[MicroBatch]:
        """Micro-batches of this rank from ``start`` on. A resume sets ``start``; it holds for one epoch only."""
        # Taken with the first batch: a loader with workers calls iter() twice before it asks for one.
        start, self.start = self.start, 0
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.samples))
        for index in range(start, len(self)):
            step, micro = divmod(index, self.accumulation)
            members = order[step * self.samples_per_step : (step + 1) * self.samples_per_step]
            first = (micro * self.world_size + self.rank) * self.batch_size
            yield MicroBatch(
                samples=tuple(self.samples[members[first : first + self.batch_size]].tolist()),
                epoch=self.epoch,
                anchors_in_step=int(self.anchors[members].sum()),
            )


class ValidationSampler(Sampler[MicroBatch]):
    """Every sample once, in order; ranks take turns.

    Every rank gets the same number of batches, since ranks may meet in collectives in each. What is missing in the last
    round is filled with micro-batches of no anchor, which count for nothing.
    """

    def __init__(
        self, samples: np.ndarray, anchors: np.ndarray, *, batch_size: int, rank: int = 0, world_size: int = 1
    ):
        starts = range(0, len(samples), batch_size)
        batches = [
            MicroBatch(tuple(samples[i : i + batch_size].tolist()), None, int(anchors[i : i + batch_size].sum()))
            for i in starts
        ]
        batches += [MicroBatch(batches[0].samples[:1], None, 0)] * (-len(batches) % world_size)
        self.batches = batches[rank::world_size]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.batches)
