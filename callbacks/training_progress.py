"""How far a training is, on stderr."""

import math
from contextlib import ExitStack
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar

from dflash_lightning.progress import Tracker, track

SHOWN = {"loss": "train/loss", "tau": "decode/tau"}


class TrainingProgress(ProgressBar):
    """Optimizer steps, their rate, the time that is left, latest loss and decoded tau; on rank 0.

    A live bar on a terminal, a plain line now and then in a log, as in all other commands. Lightning's own bar counts
    the batches of an epoch, and says nothing in a log until the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown = ExitStack()
        self._tracker: Tracker | None = None
        self._note = ""
        self._enabled = True

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._enabled and self._tracker is None:  # what is decoded before the first step says nothing of its rate
            stage = track(trainer.max_steps, "fit", "steps", start=trainer.global_step)
            self._tracker = self._shown.enter_context(stage)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._tracker is None or trainer.global_step == self._tracker.steps:
            return
        if trainer.global_step % trainer.log_every_n_steps == 0:  # a GPU is only waited for where it is anyway
            latest = {name: float(trainer.callback_metrics.get(metric, math.nan)) for name, metric in SHOWN.items()}
            self._note = "".join(f", {name} {value:.2f}" for name, value in latest.items() if math.isfinite(value))
        self._tracker.advance(trainer.global_step - self._tracker.steps, note=self._note)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        self._shown.close()
        self._tracker = None

    def on_exception(self, *_: Any) -> None:
        self._shown.close()
