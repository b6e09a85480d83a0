"""DeepSpeed under Lightning, on CPU too, with the loss scaled once."""

import os
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor

from dflash_lightning.errors import ConfigError


class DFlashDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy with three differences.

    - It runs on CPU (gloo), for tests and for machines without a GPU.
    - A micro-batch's loss is divided by the accumulation steps once. Lightning divides before DeepSpeed divides again,
      which leaves Adam almost unmoved but makes the reported gradient norm and the clipping wrong.
    - Its signature holds what a drafter needs, so that a saved configuration can be read.

    The drafter is small: ZeRO-2 shards gradients and optimizer state and keeps the weights whole, so that a
    validation can decode without gathering them.
    """

    def __init__(
        self,
        stage: Literal[0, 1, 2, 3] = 2,
        offload_optimizer: bool = False,
        bucket_size: int = 200_000_000,
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
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            allgather_bucket_size=bucket_size,
            reduce_bucket_size=bucket_size,
            # Lightning's "auto" reads the loader's batch size, which a loader of planned batches doesn't have.
            logging_batch_size_per_gpu=1,
            timeout=timedelta(minutes=timeout_minutes),
        )

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

    @property
    def root_device(self) -> torch.device:
        # DeepSpeed wants a device index.
        return torch.device("cpu", 0) if self._on_cpu else super().root_device

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(closure_loss, *args, scale_wrt_gas=False, **kwargs)
