"""Batches of a feature cache: planned micro-batches read, padded, and handed over with a state that can be resumed."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loops.progress import _BatchProgress as BatchProgress
from torch.utils.data import DataLoader, Dataset

from datamodules.sampler import MicroBatch, StepSampler
from dflash_lightning.blocks import sample_anchors
from dflash_lightning.cache import Sample, SampleReader
from dflash_lightning.cache.packing import PackedFeatures
from dflash_lightning.errors import ConfigError, DFlashError
from dflash_lightning.training.exact_resume import shift_counts
from dflash_lightning.training.module import ContextBatch


def collate(
    samples: list[Sample], anchors: list[np.ndarray], *, indices: Sequence[int], anchors_in_step: int
) -> ContextBatch:
    """Pad R samples to the longest of them, and their anchors to the most that one has.

    Args:
        samples: R samples.
        anchors: the anchors of each.
        indices: the number of each, for the batch to carry.
        anchors_in_step: valid anchors of the whole optimizer step.
    """
    shape = (len(samples), max(len(sample.input_ids) for sample in samples))
    blocks = (len(samples), max(1, *map(len, anchors)))
    stored = [sample.features for sample in samples]
    packed = [features for features in stored if isinstance(features, PackedFeatures)]
    stored = [features.rows for features in packed] or stored
    batch = ContextBatch(
        features=stored[0].new_empty(*shape, stored[0].shape[1]),
        input_ids=torch.zeros(shape, dtype=torch.long),
        loss_mask=torch.zeros(shape, dtype=torch.long),
        document_ids=torch.full(shape, -1),
        anchors=torch.zeros(blocks, dtype=torch.long),
        valid=torch.zeros(blocks, dtype=torch.bool),
        samples=torch.tensor(indices),
        anchors_in_step=torch.tensor(anchors_in_step),
    )
    if packed:
        batch["channels"] = torch.stack([features.channels for features in packed]).view(torch.int32)
    for row, (sample, drawn) in enumerate(zip(samples, anchors, strict=True)):
        tokens = len(sample.input_ids)
        batch["features"][row, :tokens] = stored[row]
        batch["features"][row, tokens:] = 0
        batch["input_ids"][row, :tokens] = torch.from_numpy(sample.input_ids)
        batch["loss_mask"][row, :tokens] = torch.from_numpy(sample.loss_mask)
        batch["document_ids"][row, :tokens] = 0
        batch["anchors"][row, : len(drawn)] = torch.from_numpy(drawn)
        batch["valid"][row, : len(drawn)] = True
    return batch


@dataclass(frozen=True)
class Failed:
    """An error on its way from a worker to the training process: torch would put the worker's traceback into it."""

    error: Exception


class MicroBatchDataset(Dataset[ContextBatch | Failed]):
    """Reads a planned micro-batch from the cache and draws its anchors."""

    def __init__(self, reader: SampleReader, *, num_anchors: int, seed: int):
        self.reader, self.num_anchors, self.seed = reader, num_anchors, seed

    def __getitem__(self, plan: MicroBatch) -> ContextBatch | Failed:
        try:
            return self.read(plan)
        except (DFlashError, OSError) as error:
            return Failed(error)

    def read(self, plan: MicroBatch) -> ContextBatch:
        """The planned micro-batch. Raises CacheError, see `SampleReader`."""
        samples = [self.reader.read(location) for location in plan.samples]
        num_anchors = self.num_anchors if plan.anchors_in_step else 0
        draw = partial(sample_anchors, num_anchors=num_anchors, seed=self.seed, epoch=plan.epoch)
        anchors = [draw(sample.loss_mask, sample_id=sample.sample_id) for sample in samples]
        return collate(samples, anchors, indices=plan.indices, anchors_in_step=plan.anchors_in_step)


class FeatureLoader(DataLoader):
    """A loader that raises what its workers met."""

    def __iter__(self) -> Iterator[ContextBatch]:
        for batch in super().__iter__():
            if isinstance(batch, Failed):
                raise batch.error
            yield batch


class ResumableLoader(FeatureLoader):
    """A loader that knows how many batches of this epoch the trainer has taken, prefetched ones not counted.

    Lightning saves ``state_dict`` with every checkpoint and restores it before the first batch. The state says nothing
    of rank or world size, as DeepSpeed keeps rank 0's copy for all.

    Attributes:
        progress: the trainer's own count of this rank's batches, corrected when the world size changed in between.
        last_wait: seconds from asking for the latest batch until it was there.
    """

    sampler: StepSampler
    progress: BatchProgress
    last_wait = 0.0
    _taken = 0

    def __iter__(self) -> Iterator[ContextBatch]:
        self._taken = self.sampler.start
        asked = time.perf_counter()
        for batch in super().__iter__():
            self._taken += 1
            self.last_wait = time.perf_counter() - asked
            yield batch
            asked = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        planner = self.sampler.planner
        return {
            "micro_batches_taken": self._taken * self.sampler.world_size,
            "micro_batches_in_epoch": planner.num_batches,
            "plan": planner.identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the micro-batches of this epoch that all ranks together had taken.

        Raises:
            ConfigError: they were taken from another plan, or inside an optimizer step by another number of ranks.
        """
        taken = state["micro_batches_taken"]
        if taken == state["micro_batches_in_epoch"]:
            batches = len(self.sampler)
        else:
            self._check_same_plan(taken, state["plan"])
            batches = taken // self.sampler.world_size
        self._taken = batches  # also for a checkpoint that is saved before the next batch
        self.sampler.start = batches % len(self.sampler)
        shift_counts(self.progress.current, batches - self.progress.current.ready)

    def _check_same_plan(self, taken: int, made_for: dict[str, Any]) -> None:
        plan = self.sampler.planner.identity()
        if taken and made_for != plan:
            differences = [
                f"\n  {name}: checkpoint {made_for.get(name)}, this run {plan[name]}"
                for name in plan
                if made_for.get(name) != plan[name]
            ]
            raise ConfigError(
                "the checkpoint was saved in the middle of an epoch whose micro-batches were planned differently:"
                + "".join(differences)
                + "\nResume with the settings it was made with."
            )
        if taken % self.sampler.world_size:
            raise ConfigError(
                f"the checkpoint was saved after {taken} micro-batches, inside an optimizer step; it can't be resumed "
                f"on {self.sampler.world_size} ranks. Resume on as many ranks as it was made with."
            )
