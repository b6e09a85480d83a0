"""The LightningModule: one drafter in training, its frozen tables, its optimizer and its metrics."""

import math
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.functional import embedding
from torch.optim.lr_scheduler import LambdaLR

from dflash_lightning import __version__
from dflash_lightning.blocks import Blocks, build_blocks, positions_in_document
from dflash_lightning.cache.packing import PackedFeatures, unpack
from dflash_lightning.checkpoints import CHECKPOINT_KEY
from dflash_lightning.config import DrafterSettings
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import ConfigError
from dflash_lightning.target import load_tables, target_identity
from dflash_lightning.training.exact_resume import ExactResume
from dflash_lightning.training.gathering import load_weights
from dflash_lightning.training.initial_drafter import choose_drafter
from dflash_lightning.training.losses import LossSettings, SlotResults, score_slots, weighted_loss
from dflash_lightning.training.metrics import BlockMetrics
from dflash_lightning.training.optimizers import OptimizerSettings, make_optimizer
from dflash_lightning.training.step_guard import StepGuard, spoil_gradients_of_nonfinite
from dflash_lightning.training.trainer_checks import check_steps_are_whole, check_trainer
from dflash_lightning.visibility import attention_mask


class ContextBatch(TypedDict):
    """A micro-batch as the data module hands it out: R rows, S tokens, N anchors.

    Integers but for the features: DeepSpeed casts every float tensor of a batch to the training precision.
    """

    features: Tensor
    """[R, S, K*H] bfloat16 context features, or [R, S, bytes] uint8 packed rows of them."""
    channels: NotRequired[Tensor]
    """[R, 2, K*H] mean and size of each row's channels, with packed features only: the bits of float32 as int32."""
    input_ids: Tensor
    """[R, S]"""
    loss_mask: Tensor
    """[R, S] 1 on response tokens."""
    document_ids: Tensor
    """[R, S] -1 on padding."""
    anchors: Tensor
    """[R, N] row indices, padded with 0."""
    valid: Tensor
    """[R, N] False on padding."""
    samples: Tensor
    """[R] which samples the rows are, as the data module numbers them (`sample_ids` names them)."""
    anchors_in_step: Tensor
    """[] valid anchors of the whole optimizer step, over all ranks and accumulation steps."""


def context_features(batch: ContextBatch) -> Tensor:
    """Context features [R, S, K*H] of a batch, unpacked where it lies."""
    if "channels" in batch:
        return unpack(PackedFeatures(batch["features"], batch["channels"].view(torch.float32)))
    return batch["features"]


def score_batch(
    drafter: Drafter, batch: ContextBatch, embedding_table: Tensor, head: Tensor
) -> tuple[SlotResults, Blocks]:
    """The training forward: lay the blocks, run the drafter, score its slots. Computes in the tables' dtype.

    Args:
        embedding_table, head: [V, H] the target's, frozen.
    """
    blocks = build_blocks(
        input_ids=batch["input_ids"],
        loss_mask=batch["loss_mask"],
        document_ids=batch["document_ids"],
        anchors=batch["anchors"],
        valid=batch["valid"],
        block_size=drafter.config.block_size,
        mask_token_id=drafter.config.mask_token_id,
    )
    context = drafter.context_key_values(
        context_features(batch).to(embedding_table.dtype), positions_in_document(batch["document_ids"])
    )
    hidden = drafter(
        embedding(blocks.input_ids.flatten(1), embedding_table),
        blocks.positions.flatten(1),
        context,
        attention_mask(blocks.layout),
    )
    return score_slots(hidden, head, blocks), blocks


class DFlashModule(L.LightningModule):
    """Trains a drafter for a frozen target on cached context features."""

    def __init__(
        self,
        target: str,
        drafter: DrafterSettings | None = None,
        loss: LossSettings | None = None,
        optimizer: OptimizerSettings | None = None,
        max_skipped_steps: int = 10,
        activation_checkpointing: bool = False,
        start_from: Path | None = None,
    ):
        """
        Args:
            target: folder, hub name or .gguf file of the target that wrote the features.
            drafter: shape of the drafter. Default: the shape of the one to start from, else that of `DrafterSettings`.
            loss: weighting of the slots.
            optimizer: learning rate and schedule.
            max_skipped_steps: optimizer steps that may be left out because their loss or gradient isn't finite; one
                more stops the run.
            activation_checkpointing: compute the layers' activations again in the backward instead of keeping them.
                Saves memory for a third more of the layers' time; the gradient is the same bit for bit.
            start_from: a drafter whose weights training begins with (fine-tuning): a released or exported folder, or
                a training checkpoint, which is a pickle: only give one that you trust. The optimizer starts anew. To
                go on with an interrupted run there is --resume.

        Raises:
            ConfigError, TargetError, ExportError: where target, settings and the drafter to start from don't fit.
        """
        super().__init__()
        self.target_name = target
        self.loss_settings = loss or LossSettings()
        self.optimizer_settings = optimizer or OptimizerSettings()
        self.activation_checkpointing = activation_checkpointing
        self.step_guard = StepGuard(max_skipped_steps)
        self.start_from = start_from
        self.drafter_config, self._initial_weights = choose_drafter(target, drafter, start_from)
        self.target_identity = target_identity(target)
        self.train_metrics = BlockMetrics(self.drafter_config.block_size)
        self.val_metrics = BlockMetrics(self.drafter_config.block_size)
        # Outside the module tree: never in the optimizer, never in a checkpoint, never sharded.
        self._frozen: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        # Here rather than in __init__, so that ZeRO-3 can shard the weights as they are made.
        if not hasattr(self, "drafter"):
            self.drafter = Drafter(self.drafter_config)
            self.drafter.activation_checkpointing = self.activation_checkpointing
            if self._initial_weights is not None:
                load_weights(self.drafter, self._initial_weights)
                self._initial_weights = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the drafter computes in, and the frozen tables are kept in."""
        return torch.bfloat16 if "bf16" in str(self.trainer.precision) else torch.float32

    def setup(self, stage: str) -> None:  # noqa: ARG002
        check_trainer(self.trainer)
        self.optimizer_settings.check_trainer(self.trainer)

    def on_fit_start(self) -> None:
        table, head = load_tables(self.target_name, dtype=self.compute_dtype)
        self._frozen = {"embedding": table.to(self.device)}
        self._frozen["head"] = self._frozen["embedding"] if head is table else head.to(self.device)

    def on_train_start(self) -> None:
        check_steps_are_whole(self.trainer)
        self._keep_to_settings(self.lr_schedulers())

    def _keep_to_settings(self, schedule: LambdaLR) -> None:
        """After a resume, take the learning rates of this run's settings rather than the checkpoint's."""
        if schedule.base_lrs == self._peaks:
            return
        rank_zero_info(f"peak learning rate: {schedule.base_lrs} in the checkpoint, {self._peaks} from here on")
        schedule.base_lrs = self._peaks
        factor = self.optimizer_settings.scale(schedule.last_epoch, self.trainer.max_steps)
        for group, peak in zip(schedule.optimizer.param_groups, self._peaks, strict=True):
            group["initial_lr"], group["lr"] = peak, peak * factor

    def _score(self, batch: ContextBatch) -> tuple[SlotResults, Blocks]:
        return score_batch(self.drafter, batch, self._frozen["embedding"], self._frozen["head"])

    def training_step(self, batch: ContextBatch, _batch_index: int) -> dict[str, Tensor]:
        results, blocks = self._score(batch)
        loss = weighted_loss(results, self.loss_settings)
        self.train_metrics.update(results, loss)
        # Gradients are averaged over ranks and accumulation steps; the objective is a mean over the step's anchors.
        cuts = self.trainer.world_size * self.trainer.accumulate_grad_batches
        return {
            "loss": spoil_gradients_of_nonfinite(loss * (cuts / batch["anchors_in_step"].clamp(min=1))),
            "num_labels": blocks.supervised.sum().detach(),
            "entropy": results.entropy.detach().sum(),
        }

    def on_train_batch_end(self, _outputs: Any, _batch: ContextBatch, batch_index: int) -> None:
        step = self.trainer.global_step
        ends_step = (batch_index + 1) % self.trainer.accumulate_grad_batches == 0
        if ends_step and step % self.trainer.log_every_n_steps == 0:
            self._log_metrics(self.train_metrics, "train")
            self.log_dict(dict(zip(self._rate_names, self._rates, strict=True)))

    def validation_step(self, batch: ContextBatch, _batch_index: int) -> None:
        results, _ = self._score(batch)
        self.val_metrics.update(results, weighted_loss(results, self.loss_settings))

    def on_validation_epoch_end(self) -> None:
        self._log_metrics(self.val_metrics, "val")

    def _log_metrics(self, metrics: BlockMetrics, prefix: str) -> None:
        # compute() sums the counts over all ranks: one number, not one rank's. sync_dist only tells Lightning so.
        values = {f"{prefix}/{name}": value for name, value in metrics.compute().items()}
        self.log_dict(values, sync_dist=prefix == "val")
        metrics.reset()

    def configure_callbacks(self) -> list[Callback]:
        return [self.step_guard, ExactResume()]

    def lr_scheduler_step(self, scheduler: LambdaLR, metric: None) -> None:
        """Leave the learning rate where it is after a step that was left out."""
        self._rates = scheduler.get_last_lr()  # of the step that has just been taken
        if math.isfinite(self.step_guard.gradient_norm(self.trainer)):
            super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> dict[str, Any]:
        max_steps = self.trainer.max_steps
        if max_steps < 1:
            raise ConfigError(f"trainer.max_steps is {max_steps}; the learning rate schedule needs a positive number.")
        settings = self.optimizer_settings
        optimizer = make_optimizer(self.drafter, settings)
        schedule = LambdaLR(optimizer, lambda step: settings.scale(step, max_steps))
        self._peaks = list(schedule.base_lrs)
        muon = ["train/learning_rate_muon"] if settings.muon else []
        self._rate_names = [*muon, "train/learning_rate"]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def making(self) -> dict[str, Any]:
        """What this run makes, and of what: what an export needs besides the weights, and a resume compares."""
        return {
            "drafter": self.drafter_config.to_dict(),
            "target": vars(self.target_identity),
            "target_path": self.target_name,
            "muon": self.optimizer_settings.muon is not None,
            "start_from": self.start_from and str(self.start_from),
            "code_version": __version__,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[CHECKPOINT_KEY] = self.making()
