"""DeepSpeed under Lightning, on CPU too, with the loss scaled once."""

import math
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed import distributed_c10d

from dflash_lightning.checkpoints import open_checkpoint, optimizer_shards
from dflash_lightning.distributed import is_of_lost_rank
from dflash_lightning.durable import sync_folder, sync_tree
from dflash_lightning.errors import CheckpointError, ConfigError
from dflash_lightning.training import universal
from dflash_lightning.training.resume import PARTIAL, REPLACED, take_back

DEFAULT_BUCKET_SIZE = 200_000_000
# ZeRO stages that write the same files.
LAYOUTS = {0: "whole", 1: "sharded optimizer", 2: "sharded optimizer", 3: "sharded weights"}


class DFlashDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy with six differences.

    - It runs on CPU (gloo), for tests and for machines without a GPU.
    - A micro-batch's loss is divided by the accumulation steps once. Lightning divides before DeepSpeed divides again,
      which leaves Adam almost unmoved but makes the reported gradient norm and the clipping wrong.
    - A rank that waits for a lost one gives up after `timeout_minutes`, in every group of processes.
    - A checkpoint gets its name when it is whole. DeepSpeed writes many files, one after the other, over older ones.
    - A checkpoint is loaded by any number of ranks, not only by as many as wrote it.
    - Its signature holds what a drafter needs, so that a saved configuration can be read.

    The drafter is small: ZeRO-2 shards gradients and optimizer state and keeps the weights whole, so that a
    validation can decode without gathering them.
    """

    def __init__(
        self,
        stage: Literal[0, 1, 2, 3] = 2,
        offload_optimizer: bool = False,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        timeout_minutes: float = 30.0,
    ):
        """
        Args:
            stage: ZeRO stage. 0: nothing sharded; 1: optimizer state; 2: gradients too; 3: weights too.
            offload_optimizer: keep optimizer state and its step on the host.
            bucket_size: elements a communication bucket holds.
            timeout_minutes: how long a rank waits for the others in a collective before it gives up.
        """
        if stage not in (0, 1, 2, 3):
            raise ConfigError(f"ZeRO stage is {stage}; expected 0, 1, 2 or 3.")
        for name, value in (("timeout_minutes", timeout_minutes), ("bucket_size", bucket_size)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} of the strategy is {value}; expected more than 0, and no infinity.")
        if stage == 0 and (offload_optimizer or bucket_size != DEFAULT_BUCKET_SIZE):
            raise ConfigError(
                "offload_optimizer and bucket_size have no effect at ZeRO stage 0, which shards nothing. Leave them "
                "out, or choose stage 1, 2 or 3."
            )
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            allgather_bucket_size=bucket_size,
            reduce_bucket_size=bucket_size,
            # Lightning's "auto" reads the loader's batch size, which a loader of planned batches doesn't have.
            logging_batch_size_per_gpu=1,
            timeout=timedelta(minutes=timeout_minutes),
        )
        self.stage = stage
        # On the host too, torch's fused AdamW will do: DeepSpeed's own is compiled with g++ on first use.
        self.config["zero_force_ds_cpu_optimizer"] = False

    @property
    def _on_cpu(self) -> bool:
        return isinstance(self.accelerator, CPUAccelerator)

    def setup_environment(self) -> None:
        if not self._on_cpu:
            super().setup_environment()
            return
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed.ops

        # An optional CPU collective that is compiled with g++ on first use, for minutes; gloo does without it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        if not self._on_cpu:
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        # DeepSpeed makes groups of its own and gives them torch's default timeout, not ours.
        for group in distributed_c10d._world.pg_map:
            distributed_c10d._set_pg_timeout(self._timeout, group)

    @property
    def root_device(self) -> torch.device:
        # DeepSpeed wants a device index.
        return torch.device("cpu", 0) if self._on_cpu else super().root_device

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write beside the final name and rename, so that a process killed meanwhile leaves the older checkpoint."""
        final = Path(self.broadcast(str(filepath)))
        partial, replaced = (final.with_name(final.name + suffix) for suffix in (PARTIAL, REPLACED))
        if self.is_global_zero:
            take_back(final)
            for leftover in (partial, replaced):
                shutil.rmtree(leftover, ignore_errors=True)
        self.barrier()
        try:
            super().save_checkpoint(checkpoint, partial, storage_options)
        except (OSError, RuntimeError) as error:  # torch's writer turns "no space left" into a RuntimeError
            if is_of_lost_rank(error):  # ranks meet while they save, and one of them ended
                raise
            free = shutil.disk_usage(final.parent).free
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"{final} can't be written ({error}); {free / 1e6:,.0f} MB were free. Older checkpoints are kept: make "
                "space and go on from the newest with --resume auto."
            ) from error
        self.barrier()
        if self.is_global_zero:
            sync_tree(partial)
            if final.exists():
                final.rename(replaced)
            partial.rename(final)
            sync_folder(final.parent)
            shutil.rmtree(replaced, ignore_errors=True)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of any number of ranks; take an older one back if a kill fell between the two renames.

        Raises:
            CheckpointError: it is incomplete, of another layout, or can't be cut anew.
        """
        path = Path(checkpoint_path)
        if self.is_global_zero:
            take_back(path)
        self.barrier()
        self._check_layout(path)
        written_by = len(optimizer_shards(path))
        if written_by in (0, self.world_size):  # none under stage 0, which shards nothing
            return super().load_checkpoint(path, weights_only)
        rank_zero_info(f"{path} was written by {written_by} ranks; cutting it anew for {self.world_size}")
        recut = path.with_name(path.name + universal.SUFFIX)
        self._on_first_rank(lambda: universal.write_universal(path, recut))
        self.deepspeed_engine._config.load_universal_checkpoint = True
        try:
            state = super().load_checkpoint(recut, weights_only)
        finally:
            self.deepspeed_engine._config.load_universal_checkpoint = False
        # Not where loading failed: the ranks don't fail together, and this one would wait for the others.
        self._on_first_rank(lambda: shutil.rmtree(recut))
        return state

    def _check_layout(self, path: Path) -> None:
        """Refuse a ZeRO stage whose files DeepSpeed would take for none at all, and start with an empty optimizer."""
        written = open_checkpoint(path)["ds_config"]["zero_optimization"]["stage"]
        running = self.deepspeed_engine.zero_optimization_stage()
        if LAYOUTS[written] != LAYOUTS[running]:
            raise CheckpointError(
                f"{path} was written under ZeRO stage {written}, whose files stage {running} can't read. Set the "
                f"strategy's stage to {written}."
            )

    def _on_first_rank(self, action: Callable[[], None]) -> None:
        """Let rank 0 act while the others wait; its CheckpointError is everybody's."""
        failure = None
        if self.is_global_zero:
            try:
                action()
            except CheckpointError as error:
                failure = error
        failure = self.broadcast(failure)
        if failure is not None:
            raise failure

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(closure_loss, *args, scale_wrt_gas=False, **kwargs)
