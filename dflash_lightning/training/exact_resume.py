"""What makes a resumed training the uninterrupted one, besides what Lightning, DeepSpeed and the loader restore."""

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loops.progress import _ProcessedTracker as ProcessedTracker
from torch import distributed

from dflash_lightning.errors import CheckpointError


def random_state() -> dict[str, Any]:
    """The state of this process's random number generators: torch's, its GPU's, numpy's and Python's own."""
    algorithm, key, *position = np.random.get_state()
    # Lists, because torch reads arrays of numpy only from files that it is told to trust.
    numpy = (algorithm, key.tolist(), *position)
    state = {"torch": torch.get_rng_state(), "numpy": numpy, "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Make the generators go on where `random_state` found them."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def shift_counts(counts: ProcessedTracker, by: int) -> None:
    """Let Lightning have counted ``by`` more batches."""
    for name in ("ready", "started", "processed", "completed"):
        setattr(counts, name, getattr(counts, name) + by)


class ExactResume(Callback):
    """Keeps the random state of every rank in each checkpoint, and lets none be saved inside an optimizer step.

    A checkpoint inside a step would lack the gradient of the micro-batches before it. A rank that a checkpoint knows
    nothing of, since fewer ranks wrote it, keeps its seed.
    """

    def __init__(self) -> None:
        self._restored: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        # DeepSpeed keeps rank 0's state for all, so it holds everybody's.
        mine = random_state()
        states = [mine]
        if distributed.is_initialized():
            states *= distributed.get_world_size()
            distributed.all_gather_object(states, mine)
        return {"random_states": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict["random_states"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        # Here, as what is set up before draws, too.
        if trainer.global_rank < len(self._restored):
            restore_random_state(self._restored[trainer.global_rank])
        # Of one rank, which has other micro-batches a step on another number of ranks; val_check_interval goes by it.
        total = trainer.fit_loop.epoch_loop.batch_progress.total
        shift_counts(total, trainer.global_step * trainer.accumulate_grad_batches - total.ready)
        _make_up_for_validation(trainer)
        for saver in trainer.checkpoint_callbacks:
            # Else every_n_train_steps would save once more after the first micro-batch, inside the next step.
            if isinstance(saver, ModelCheckpoint):
                saver._last_global_step_saved = trainer.global_step

    def on_save_checkpoint(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,  # noqa: ARG002
        checkpoint: dict[str, Any],  # noqa: ARG002
    ) -> None:
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if done % trainer.accumulate_grad_batches:
            raise CheckpointError(
                f"a checkpoint was asked for after {done % trainer.accumulate_grad_batches} of "
                f"{trainer.accumulate_grad_batches} micro-batches of an optimizer step, where it couldn't be resumed "
                "exactly. Let ModelCheckpoint save at validations or with every_n_train_steps, not with "
                "train_time_interval."
            )


def _make_up_for_validation(trainer: L.Trainer) -> None:
    """Validate now if the checkpoint was saved between a step and its validation, which Lightning then leaves out."""
    loop = trainer.fit_loop.epoch_loop
    if loop.restarted_on_train_batch_end and loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
        trainer.validating = True
        loop.val_loop.restarting = False
        loop.val_loop.run()
        trainer.training = True
