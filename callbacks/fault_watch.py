"""Looks for signs of faults while training, and tells of each once."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn

from callbacks.acceptance import DecodingObserver
from callbacks.tensorboard_pages import logged_step, tensorboard_writers
from datamodules import FeatureCacheDataModule
from dflash_lightning.evaluation.prompt_results import PromptResult
from dflash_lightning.training.fault_signs import (
    FaultSign,
    constant_features,
    decoding_below_validation,
    decoding_loses,
    later_slot_above_earlier,
    low_first_loss,
    mask_token_in_data,
    nothing_accepted,
    odd_supervision,
)
from dflash_lightning.training.module import ContextBatch, DFlashModule, context_features


class WatchForFaults(DecodingObserver):
    """Tells of each sign of a fault once: a warning in the log, and ``warnings/<name>`` as text in TensorBoard.

    It works on rank 0 alone, with the data that rank 0 sees, and computes next to nothing: the features of the first
    batch, a comparison of token ids in each, and figures that are logged anyway.
    """

    def __init__(self) -> None:
        self._told: list[str] = []
        self._silent_decodings = 0
        self._mask_tokens: torch.Tensor | int = 0
        self._saw_features = self._saw_loss = False

    def state_dict(self) -> dict[str, Any]:
        return {"told": self._told, "silent_decodings": self._silent_decodings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._told, self._silent_decodings = state_dict["told"], state_dict["silent_decodings"]

    def _tell(self, trainer: L.Trainer, sign: FaultSign | None) -> None:
        if sign is None or sign.name in self._told:
            return
        self._told.append(sign.name)
        rank_zero_warn(f"{sign} (docs/monitoring.md, {sign.name})")
        for writer in tensorboard_writers(trainer):
            text = f"{sign.seen}\n\n**Likely cause:** {sign.cause}\n\n**To check:** {sign.check}"
            writer.add_text(f"warnings/{sign.name}", text, logged_step(trainer))

    def on_train_start(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:
        if trainer.is_global_zero:
            data: FeatureCacheDataModule = trainer.datamodule
            samples = data.training_samples
            self._tell(trainer, odd_supervision(data.cache.lengths[samples], data.cache.anchor_candidates[samples]))
            # A drafter that exists already may predict labels from the start.
            self._saw_loss = trainer.global_step > 0 or pl_module.start_from is not None

    def on_train_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: DFlashModule,
        batch: ContextBatch,
        batch_index: int,  # noqa: ARG002
    ) -> None:
        if not trainer.is_global_zero:
            return
        tokens = batch["document_ids"] >= 0
        self._mask_tokens += (tokens & (batch["input_ids"] == pl_module.drafter_config.mask_token_id)).sum()
        if not self._saw_features:
            self._saw_features = True
            for features, present in zip(context_features(batch), tokens, strict=True):
                self._tell(trainer, constant_features(features[present], pl_module.drafter_config.target_layer_ids))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: DFlashModule, outputs: Any, _batch: Any, batch_index: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        if not self._saw_loss:
            self._saw_loss = trainer.global_step > 0
            labels = int(outputs["num_labels"])
            if labels:
                self._saw_loss = True
                cross_entropy = float(outputs["entropy"]) / labels
                self._tell(trainer, low_first_loss(cross_entropy, pl_module.drafter_config.vocab_size))
        if (batch_index + 1) % trainer.accumulate_grad_batches == 0 and (
            trainer.global_step % trainer.log_every_n_steps == 0
        ):
            self._tell(trainer, mask_token_in_data(int(self._mask_tokens), pl_module.drafter_config.mask_token_id))

    def on_decoded(self, trainer: L.Trainer, report: dict[str, Any], _results: Sequence[PromptResult]) -> None:
        if not trainer.is_global_zero or report["tau"] is None or report["teacher_forced_tau"] is None:
            return
        self._tell(trainer, decoding_loses(report["tau"], report["teacher_forced_tau"]))
        if trainer.global_step > 0:
            self._silent_decodings = self._silent_decodings + 1 if report["tau"] == 1 else 0
            self._tell(trainer, nothing_accepted(self._silent_decodings, trainer.global_step))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:
        # Lightning calls the module's own hook, which resets the counts, after those of the callbacks.
        if trainer.is_global_zero and not trainer.sanity_checking:
            metrics = pl_module.val_metrics
            self._tell(trainer, later_slot_above_earlier(metrics.correct, metrics.supervised))

    def on_validation_end(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:  # noqa: ARG002
        metrics = trainer.callback_metrics
        if trainer.is_global_zero and "decode/tau" in metrics and not trainer.sanity_checking:
            tau, expected = float(metrics["decode/tau"]), float(metrics["val/teacher_forced_tau"])
            self._tell(trainer, decoding_below_validation(tau, expected))
