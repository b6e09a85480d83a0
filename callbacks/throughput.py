"""How fast training goes, and how much of it is waiting for data."""

import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback


class Throughput(Callback):
    """Logs label tokens/s over all ranks, seconds a step, and the share of step time spent waiting for data.

    Validation isn't counted. ``perf/label_tokens`` and ``perf/training_seconds`` are totals since the first step; after
    a resume they go on from the last log line before the checkpoint.
    """

    def __init__(self) -> None:
        self.label_tokens, self.training_seconds = 0, 0.0
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        return {"label_tokens": self.label_tokens, "training_seconds": self.training_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.label_tokens, self.training_seconds = state_dict["label_tokens"], state_dict["training_seconds"]

    def _reset(self) -> None:
        self._labels, self._seconds, self._waited, self._steps = 0, 0.0, 0.0, 0

    def on_train_start(self, *_: Any) -> None:
        self._last_end = time.perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        self._last_end = time.perf_counter()

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: dict, _batch: Any, batch_index: int
    ) -> None:
        self._labels += int(outputs["num_labels"])
        now = time.perf_counter()
        self._waited += self._start - self._last_end
        self._seconds += now - self._last_end
        self._last_end = now
        if (batch_index + 1) % trainer.accumulate_grad_batches:
            return
        self._steps += 1
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(trainer, pl_module)

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        labels = int(trainer.strategy.reduce(torch.tensor(self._labels, device=pl_module.device), reduce_op="sum"))
        self.label_tokens += labels
        self.training_seconds += self._seconds
        pl_module.log_dict(
            {
                "perf/label_tokens_per_second": labels / self._seconds,
                "perf/step_seconds": self._seconds / self._steps,
                "perf/data_wait_share": self._waited / self._seconds,
                "perf/label_tokens": float(self.label_tokens),
                "perf/training_seconds": self.training_seconds,
            }
        )
        self._reset()
