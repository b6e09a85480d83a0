"""Optimizer steps whose loss or gradient isn't finite: left out on all ranks together, counted, and named."""

import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from dflash_lightning.errors import ConfigError, TrainingError


def spoil_gradients_of_nonfinite(loss: Tensor) -> Tensor:
    """A finite ``loss``, bit for bit; one that isn't becomes NaN, and so does each of its gradients.

    A loss can be infinite while its gradients are finite. After this only gradients have to be looked at, which the
    ranks sum anyway: what one rank has seen reaches all of them without another collective.
    """
    return loss * (1 + 0 * loss.detach())


class StepGuard(Callback):
    """Leaves out every optimizer step whose gradient, summed over all ranks, isn't finite; stops after too many.

    All ranks see the same summed gradient, so that they decide alike. Such a step changes neither weights nor moments,
    and the learning rate stays where it is; ``trainer.global_step`` counts it, as its batches are used up. Logged are
    ``train/grad_norm`` (of the latest step, before clipping; with Muon of its update) and ``train/skipped_steps`` (so
    far, over resumes too).

    Attributes:
        skipped_steps: steps left out so far.
    """

    def __init__(self, max_skipped_steps: int):
        """
        Args:
            max_skipped_steps: the run stops at the first step beyond so many.

        Raises:
            ConfigError: the number is negative.
        """
        if max_skipped_steps < 0:
            raise ConfigError(f"max_skipped_steps is {max_skipped_steps}; expected 0 or more.")
        self.max_skipped_steps, self.skipped_steps = max_skipped_steps, 0
        self._gradient_norm = torch.tensor(0.0)
        self._micro_batches: list[tuple[Tensor, Tensor]] = []  # of the step at hand: sample indices [R] and loss []

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped_steps = state_dict["skipped_steps"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        if isinstance(trainer.strategy, DeepSpeedStrategy) and not _deepspeed_looks(trainer):
            trainer.optimizers[0].register_step_pre_hook(self._drop_nonfinite)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        # Under DeepSpeed this is called for every micro-batch, not only for the last one of a step.
        if _deepspeed_looks(trainer) or trainer.fit_loop._should_accumulate():
            return
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        self._gradient_norm = get_total_norm(gradients)
        if not isinstance(trainer.strategy, DeepSpeedStrategy):  # which clips first, and can't clip nothing
            self._drop_nonfinite(trainer.optimizers[0])

    def _drop_nonfinite(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer passes over a parameter without gradient: its weight, moments and count of steps stay."""
        if not self._gradient_norm.isfinite():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def gradient_norm(self, trainer: L.Trainer) -> float:
        """Norm of the latest step's gradient before clipping, over all ranks; not finite if the step was left out."""
        if _deepspeed_looks(trainer):
            return float(trainer.model.get_global_grad_norm())
        return float(self._gradient_norm)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: dict[str, Tensor], batch_index: int
    ) -> None:
        self._micro_batches.append((batch["samples"], outputs["loss"].detach()))
        if (batch_index + 1) % trainer.accumulate_grad_batches:
            return
        norm = self.gradient_norm(trainer)
        if not math.isfinite(norm):
            self._count(trainer)
        self._micro_batches.clear()
        if trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict({"train/grad_norm": norm, "train/skipped_steps": float(self.skipped_steps)})

    def _count(self, trainer: L.Trainer) -> None:
        self.skipped_steps += 1
        mine = [(samples.tolist(), bool(loss.isfinite())) for samples, loss in self._micro_batches]
        gathered = [mine]
        if trainer.world_size > 1:
            gathered = [None] * trainer.world_size
            torch.distributed.all_gather_object(gathered, mine)
        micro_batches = [micro_batch for part in gathered for micro_batch in part]
        suspects = [samples for samples, finite in micro_batches if not finite]
        cause = "loss" if suspects else "gradient"
        indices = sorted({i for samples in suspects or [samples for samples, _ in micro_batches] for i in samples})
        ids = ", ".join(map(repr, trainer.datamodule.sample_ids(indices)))
        what = f"optimizer step {trainer.global_step} was left out: its {cause} isn't finite. Samples: {ids}."
        rank_zero_warn(f"{what} Left out so far: {self.skipped_steps}.")
        if self.skipped_steps > self.max_skipped_steps:
            raise TrainingError(
                f"{what} That makes {self.skipped_steps}, and max_skipped_steps is {self.max_skipped_steps}. If it is "
                "always the same samples, look at their features (`dflash-lightning cache verify`). If it is all kinds "
                "of them, training diverged: resume from an earlier checkpoint with a lower learning rate."
            )


def _deepspeed_looks(trainer: L.Trainer) -> bool:
    """Whether the optimizer is one of DeepSpeed's, which leave such steps out themselves: all but ZeRO 0 in float32."""
    return hasattr(trainer.optimizers[0], "overflow")
