"""A checkpoint before a scheduler takes the machines away."""

import signal
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from dflash_lightning.errors import ConfigError

TRY_AGAIN = 75
"""Exit code of a run that was told to stop and saved itself: EX_TEMPFAIL of sysexits.h. `--resume auto` goes on."""


class SaveOnSignal(Checkpoint):  # so that Lightning calls it last, when the step is told to all other callbacks
    """On SIGUSR1, saves a checkpoint after the current optimizer step and ends the run with exit code 75.

    All ranks stop after the same step, whichever of them the signal reached first: they ask each other once a step. The
    checkpoint goes where the ModelCheckpoint that monitors nothing saves, under the name that it would give: with a
    fixed `filename` (`last`) it takes the place of the newest one.

    Lightning has a handler of its own under SLURM. It saves in the middle of whatever each rank is doing, and a
    later start that is given no checkpoint goes on from its, unasked. This callback takes its place.
    """

    def __init__(self) -> None:
        self._asked = False

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        self._asked = True

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        # Before Lightning registers its own, which it doesn't do where there is one already.
        self._before = signal.signal(signal.SIGUSR1, self._ask)
        _newest(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        signal.signal(signal.SIGUSR1, self._before)

    def on_train_batch_end(
        self, trainer: L.Trainer, _module: L.LightningModule, _outputs: Any, _batch: Any, batch_index: int
    ) -> None:
        if (batch_index + 1) % trainer.accumulate_grad_batches:
            return
        if trainer.strategy.reduce_boolean_decision(self._asked, all=False):
            path = _newest(trainer)
            trainer.save_checkpoint(path)
            rank_zero_info(f"SIGUSR1: saved step {trainer.global_step} to {path}; go on with --resume auto.")
            raise SystemExit(TRY_AGAIN)


def _newest(trainer: L.Trainer) -> Path:
    """Where the run keeps its newest checkpoint.

    Raises:
        ConfigError: there is no ModelCheckpoint with a folder of its own that monitors nothing.
    """
    for saver in trainer.checkpoint_callbacks:
        if isinstance(saver, ModelCheckpoint) and saver.monitor is None and saver.dirpath is not None:
            state = {"epoch": trainer.current_epoch, "step": trainer.global_step}
            return Path(saver.format_checkpoint_name(state))
    raise ConfigError(
        "SaveOnSignal replaces the newest checkpoint, but no ModelCheckpoint keeps it: add one with a dirpath and "
        "without monitor to trainer.callbacks."
    )
