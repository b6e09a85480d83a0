"""Streams a feature cache into training: batches of whole samples with freshly drawn anchors."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from datamodules.loader import FeatureLoader, MicroBatchDataset, ResumableLoader
from datamodules.plan import EpochPlanner, SampleSizes
from datamodules.sampler import StepSampler, ValidationSampler
from dflash_lightning.cache import FeatureCache, ObjectStoreSettings, StagingSettings, open_store
from dflash_lightning.errors import ConfigError
from dflash_lightning.wording import counted


def in_validation_split(id_hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Which samples are held back. Decided by the hash of the id, so that none moves as the cache grows.

    Args:
        id_hashes: [n] uint64, `FeatureCache.id_hashes`.
        fraction: share to hold back, 0 to below 1.
    """
    return id_hashes < np.uint64(fraction * 2**64)


class FeatureCacheDataModule(L.LightningDataModule):
    """Training and validation batches from one feature cache.

    Samples are split by a hash of their id. Anchors are drawn anew each epoch in training and stay fixed in validation.

    A micro-batch is measured in tokens, not in samples: lengths differ, and memory, time and the number of labels
    follow the tokens. An optimizer step takes (ranks x ``accumulate_grad_batches``) micro-batches; while that product
    and ``batch_tokens`` stay the same, every step is the same on any number of ranks and workers.
    """

    def __init__(
        self,
        cache: str,
        batch_tokens: int = 16384,
        num_anchors: int = 512,
        validation_fraction: float = 0.05,
        num_workers: int = 0,
        shard_window: int | None = None,
        seed: int = 0,
        object_store: ObjectStoreSettings = ObjectStoreSettings(),  # noqa: B008
        staging: StagingSettings = StagingSettings(),  # noqa: B008
    ):
        """
        Args:
            cache: folder or URL of a complete feature cache.
            batch_tokens: most tokens in a micro-batch of one rank: context tokens and block slots (anchors x block
                size), padding included.
            num_anchors: blocks drawn from each sample, at most.
            validation_fraction: share of samples held back for the validation loss.
            num_workers: processes that read ahead, 2 batches each; 0 reads in the training process.
            shard_window: draw training samples from so many shards at a time, for a cache that is larger than what the
                machine keeps at hand; all shards where it isn't given.
            seed: of sample order and anchors.
            object_store: how to reach a cache that is a URL.
            staging: where this machine keeps copies of the shards of a remote cache.
        """
        super().__init__()
        limits = {
            **{"batch_tokens": (batch_tokens, 1), "num_anchors": (num_anchors, 1), "shard_window": (shard_window, 1)},
            **{"num_workers": (num_workers, 0), "seed": (seed, 0)},
        }
        for name, (value, least) in limits.items():
            if value is not None and value < least:
                raise ConfigError(f"data.{name} is {value}; expected at least {least}.")
        if not 0 <= validation_fraction < 1:
            raise ConfigError(f"data.validation_fraction is {validation_fraction}; expected 0 to below 1.")
        self.store, self.staging = open_store(cache, object_store), staging
        self.batch_tokens, self.num_anchors = batch_tokens, num_anchors
        self.validation_fraction, self.num_workers, self.seed = validation_fraction, num_workers, seed
        self.shard_window = shard_window

    def setup(self, stage: str | None = None) -> None:  # noqa: ARG002
        """Open the cache and refuse one that the module's target and drafter don't fit."""
        if self.trainer.world_size > 1 and self.trainer._accelerator_connector.use_distributed_sampler:
            raise ConfigError(
                "trainer.use_distributed_sampler is true, so that Lightning would put its own sampler in the place of "
                "ours; set it to false."
            )
        self.cache = FeatureCache(self.store, staging=self.staging)
        drafter = self.trainer.lightning_module.drafter_config
        self.cache.check_compatible(
            self.trainer.lightning_module.target_identity, drafter.target_layer_ids, drafter.hidden_size
        )
        longest = int(self.cache.anchor_candidates.max(initial=0)) + 1
        if longest == 1:
            raise ConfigError(
                f"{self.store.location}: no token of its {counted(len(self.cache), 'sample')} is supervised, so that "
                "there is nothing to learn. `cache info` says why samples were left out. Prepare prompts whose answers "
                "aren't empty, and capture them."
            )
        if longest < drafter.block_size:
            raise ConfigError(
                f"block_size is {drafter.block_size}, and the longest answer in the cache has "
                f"{counted(longest, 'token')}: slots {longest} to {drafter.block_size - 1} would never be trained. "
                "Lower block_size, or capture longer answers."
            )
        held_back = in_validation_split(self.cache.id_hashes, self.validation_fraction)
        self.training_samples, self.validation_samples = np.flatnonzero(~held_back), np.flatnonzero(held_back)

    def sample_ids(self, indices: Sequence[int]) -> list[str]:
        """The ids of samples by their number, as a batch carries it."""
        return [self.cache.sample_ids[index] for index in indices]

    def _loader(self, loader: type[FeatureLoader], sampler: StepSampler | ValidationSampler) -> FeatureLoader:
        workers: dict[str, Any] = {}
        if self.num_workers:
            workers = {"multiprocessing_context": "forkserver", "persistent_workers": True}
        return loader(
            MicroBatchDataset(self.cache.reader, num_anchors=self.num_anchors, seed=self.seed),
            batch_size=None,
            sampler=sampler,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            # Of its own, though nothing draws from it: from the process's, every start of an epoch would take a number.
            generator=torch.Generator(),
            **workers,
        )

    def _sizes(self, samples: np.ndarray) -> SampleSizes:
        return SampleSizes(
            samples=samples,
            lengths=self.cache.lengths[samples],
            anchors=np.minimum(self.cache.anchor_candidates[samples], self.num_anchors),
            shards=self.cache.shards[samples],
            block_size=self.trainer.lightning_module.drafter_config.block_size,
        )

    def train_dataloader(self) -> ResumableLoader:
        planner = EpochPlanner(
            self._sizes(self.training_samples),
            batch_tokens=self.batch_tokens,
            batches_per_step=self.trainer.world_size * self.trainer.accumulate_grad_batches,
            seed=self.seed,
            shard_window=self.shard_window,
        )
        sampler = StepSampler(
            planner, self.cache.locate, rank=self.trainer.global_rank, world_size=self.trainer.world_size
        )
        loader = self._loader(ResumableLoader, sampler)
        loader.progress = self.trainer.fit_loop.epoch_loop.batch_progress
        return loader

    def val_dataloader(self) -> FeatureLoader | list[Tensor]:
        if len(self.validation_samples) == 0:
            return []
        sampler = ValidationSampler(
            self._sizes(self.validation_samples),
            self.cache.locate,
            batch_tokens=self.batch_tokens,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )
        return self._loader(FeatureLoader, sampler)
