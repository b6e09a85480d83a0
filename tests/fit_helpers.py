"""Configurations of short `fit` commands on a tiny target."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import MASK_TOKEN_ID

# Seconds until something is taken to hang; a busy machine needs minutes for what takes seconds.
PATIENCE = 600
# What DeepSpeed leaves in the environment of a process that has trained.
LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "DS_ACCELERATOR")


def checkpoints(folder: Path, filename: str, **when: Any) -> dict[str, Any]:
    """A ModelCheckpoint that keeps one file of this name."""
    return {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {
            "dirpath": str(folder / "checkpoints"),
            "filename": filename,
            "enable_version_counter": False,
            "save_on_train_epoch_end": False,
            **when,
        },
    }


def fit_config(target: Path, cache: Path, folder: Path, callbacks: list[dict[str, Any]]) -> dict[str, Any]:
    """12 steps of a drafter of one layer, with a validation after each third; everything goes to `folder`."""
    return {
        "seed_everything": 0,
        "model": {
            "target": str(target),
            "drafter": {
                "num_layers": 1,
                "block_size": 4,
                "target_layer_ids": [1, 3],
                "mask_token_id": MASK_TOKEN_ID,
            },
            "optimizer": {"lr": 0.01},
        },
        "data": {"cache": str(cache), "batch_tokens": 360, "num_anchors": 8, "validation_fraction": 0.2},
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "strategy": {"class_path": "dflash_lightning.training.strategy.DFlashDeepSpeedStrategy"},
            "precision": "bf16-mixed",
            "max_steps": 12,
            "gradient_clip_val": 1.0,
            "val_check_interval": 3,  # an epoch has 5 batches: checkpoints fall into its middle
            "check_val_every_n_epoch": None,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 2,
            "use_distributed_sampler": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            "logger": {
                "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                "init_args": {"save_dir": str(folder), "name": "logs", "version": ""},
            },
            "callbacks": callbacks,
        },
    }


def wait_for(condition: Callable[[], bool]) -> None:
    """Look until it holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.002)


def identity(path: Path) -> int | None:
    """Changes when another file or folder takes the place of this one; None without it."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def forget_launcher() -> None:
    """Drop what DeepSpeed leaves in the environment of a process that has trained."""
    for name in LAUNCHER:
        os.environ.pop(name, None)
