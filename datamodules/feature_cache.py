"""Streams a feature cache into training: batches of whole samples with freshly drawn anchors."""

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from datamodules.sampler import MicroBatch, StepSampler, ValidationSampler
from dflash_lightning.blocks import sample_anchors
from dflash_lightning.cache import FeatureCache, ObjectStoreSettings, Sample, open_store
from dflash_lightning.errors import ConfigError
from dflash_lightning.module import ContextBatch


def in_validation_split(sample_id: str, fraction: float) -> bool:
    """Whether a sample is held back. Decided by its id, so that it never moves as the cache grows."""
    key = int.from_bytes(hashlib.sha256(b"split:" + sample_id.encode()).digest()[:8], "little")
    return key < fraction * 2**64


def collate(
    samples: list[Sample], anchors: list[np.ndarray], *, num_anchors: int, anchors_in_step: int
) -> ContextBatch:
    """Pad R samples to the longest and their anchors to ``num_anchors``."""
    length = max(len(sample.input_ids) for sample in samples)
    shape = (len(samples), length)
    batch = ContextBatch(
        features=torch.zeros(*shape, samples[0].features.shape[1], dtype=torch.bfloat16),
        input_ids=torch.zeros(shape, dtype=torch.long),
        loss_mask=torch.zeros(shape, dtype=torch.long),
        document_ids=torch.full(shape, -1),
        anchors=torch.zeros(len(samples), num_anchors, dtype=torch.long),
        valid=torch.zeros(len(samples), num_anchors, dtype=torch.bool),
        anchors_in_step=torch.tensor(anchors_in_step),
    )
    for row, (sample, drawn) in enumerate(zip(samples, anchors, strict=True)):
        tokens = len(sample.input_ids)
        batch["features"][row, :tokens] = sample.features
        batch["input_ids"][row, :tokens] = torch.from_numpy(sample.input_ids)
        batch["loss_mask"][row, :tokens] = torch.from_numpy(sample.loss_mask)
        batch["document_ids"][row, :tokens] = 0
        batch["anchors"][row, : len(drawn)] = torch.from_numpy(drawn)
        batch["valid"][row, : len(drawn)] = True
    return batch


class MicroBatchDataset(Dataset[ContextBatch]):
    """Reads a planned micro-batch from the cache and draws its anchors."""

    def __init__(self, cache: FeatureCache, *, num_anchors: int, seed: int):
        self.cache, self.num_anchors, self.seed = cache, num_anchors, seed

    def __getitem__(self, plan: MicroBatch) -> ContextBatch:
        samples = [self.cache.read(index) for index in plan.samples]
        num_anchors = self.num_anchors if plan.anchors_in_step else 0
        draw = partial(sample_anchors, num_anchors=num_anchors, seed=self.seed, epoch=plan.epoch)
        anchors = [draw(sample.loss_mask, sample_id=sample.sample_id) for sample in samples]
        return collate(samples, anchors, num_anchors=self.num_anchors, anchors_in_step=plan.anchors_in_step)


class ResumableLoader(DataLoader):
    """A loader that knows how many batches of this epoch the trainer has taken, prefetched ones not counted.

    Lightning saves ``state_dict`` with every checkpoint and restores it before the first batch. The state says nothing
    of rank or world size, as DeepSpeed keeps rank 0's copy for all.
    """

    sampler: StepSampler
    _taken = 0

    def __iter__(self) -> Iterator[ContextBatch]:
        self._taken = self.sampler.start
        for batch in super().__iter__():
            self._taken += 1
            yield batch

    @property
    def _samples_per_batch(self) -> int:
        return self.sampler.batch_size * self.sampler.world_size

    def state_dict(self) -> dict[str, int]:
        return {"samples_taken": self._taken * self._samples_per_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.sampler.start = state["samples_taken"] // self._samples_per_batch % len(self.sampler)


class FeatureCacheDataModule(L.LightningDataModule):
    """Training and validation batches from one feature cache.

    Samples are split by a hash of their id. Anchors are drawn anew each epoch in training and stay fixed in validation.
    """

    def __init__(
        self,
        cache: str,
        batch_size: int = 8,
        num_anchors: int = 512,
        validation_fraction: float = 0.05,
        num_workers: int = 0,
        seed: int = 0,
        object_store: ObjectStoreSettings | None = None,
    ):
        """
        Args:
            cache: folder or URL of a complete feature cache.
            batch_size: samples in a micro-batch of one rank.
            num_anchors: blocks drawn from each sample, at most.
            validation_fraction: share of samples held back for the validation loss.
            num_workers: processes that read ahead; 0 reads in the training process.
            seed: of sample order and anchors.
            object_store: how to reach a cache that is a URL.
        """
        super().__init__()
        for name, value in (("batch_size", batch_size), ("num_anchors", num_anchors)):
            if value < 1:
                raise ConfigError(f"data.{name} is {value}; expected at least 1.")
        if not 0 <= validation_fraction < 1:
            raise ConfigError(f"data.validation_fraction is {validation_fraction}; expected 0 to below 1.")
        self.store = open_store(cache, object_store)
        self.batch_size, self.num_anchors = batch_size, num_anchors
        self.validation_fraction, self.num_workers, self.seed = validation_fraction, num_workers, seed

    def setup(self, stage: str | None = None) -> None:  # noqa: ARG002
        """Open the cache and refuse one that the module's target and drafter don't fit."""
        if self.trainer.world_size > 1 and self.trainer._accelerator_connector.use_distributed_sampler:
            raise ConfigError(
                "trainer.use_distributed_sampler is true, so that Lightning would put its own sampler in the place of "
                "ours; set it to false."
            )
        self.cache = FeatureCache(self.store)
        module = self.trainer.lightning_module
        self.cache.check_compatible(
            module.target_identity, module.drafter_config.target_layer_ids, module.drafter_config.hidden_size
        )
        held_back = np.array([in_validation_split(i, self.validation_fraction) for i in self.cache.sample_ids])
        self.training_samples, self.validation_samples = np.flatnonzero(~held_back), np.flatnonzero(held_back)

    def _loader(self, loader: type[DataLoader], sampler: StepSampler | ValidationSampler) -> DataLoader:
        workers: dict[str, Any] = {}
        if self.num_workers:
            workers = {"multiprocessing_context": "forkserver", "persistent_workers": True}
        return loader(
            MicroBatchDataset(self.cache, num_anchors=self.num_anchors, seed=self.seed),
            batch_size=None,
            sampler=sampler,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            **workers,
        )

    def _anchors(self, samples: np.ndarray) -> np.ndarray:
        return np.minimum(self.cache.anchor_candidates[samples], self.num_anchors)

    def train_dataloader(self) -> ResumableLoader:
        sampler = StepSampler(
            self.training_samples,
            self._anchors(self.training_samples),
            batch_size=self.batch_size,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            accumulation=self.trainer.accumulate_grad_batches,
            seed=self.seed,
        )
        return self._loader(ResumableLoader, sampler)

    def val_dataloader(self) -> DataLoader | list[Tensor]:
        if len(self.validation_samples) == 0:
            return []
        sampler = ValidationSampler(
            self.validation_samples,
            self._anchors(self.validation_samples),
            batch_size=self.batch_size,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )
        return self._loader(DataLoader, sampler)
