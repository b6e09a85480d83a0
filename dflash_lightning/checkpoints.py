"""Read a training checkpoint in one process on the CPU, whatever number of processes wrote it.

Checkpoints are pickles: reading one runs whatever code it holds. Only read checkpoints that you trust.
"""

import contextlib
import io
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_lightning.cache import TargetIdentity
from dflash_lightning.config import DrafterConfig
from dflash_lightning.errors import CheckpointError

# Lightning's names: the folder of DeepSpeed's shards inside `X.ckpt`, and the file that DeepSpeed writes last.
SHARDS, LATEST = "checkpoint", "latest"
MODEL_FILES, OPTIMIZER_FILES = "*_model_states.pt", "*_optim_states.pt"
WEIGHTS_PREFIX = "drafter."
# Where `DFlashModule` puts what an export needs besides the weights.
CHECKPOINT_KEY = "dflash"
# What torch and DeepSpeed raise for files that are cut short, missing, or not theirs.
UNREADABLE = (
    *(OSError, ValueError, LookupError, RuntimeError, EOFError, pickle.UnpicklingError),
    *(ImportError, AttributeError),  # pickled by a package that isn't here
)


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A drafter in training, gathered into one place.

    Attributes:
        path: the checkpoint that was read.
        config: the drafter's configuration.
        state_dict: the drafter's weights, float32 on the CPU, named as in `Drafter`.
        target: identity of the target it was trained for.
        target_path: how the training run called that target (folder, hub name or `.gguf` file).
        step: optimizer steps taken.
        start_from: the drafter whose weights training began with, as the run called it; None: random weights.
        code_version: version of `dflash_lightning` that trained it.
    """

    path: Path
    config: DrafterConfig
    state_dict: dict[str, Tensor]
    target: TargetIdentity
    target_path: str
    step: int
    start_from: str | None
    code_version: str


def is_training_checkpoint(path: str | Path) -> bool:
    """Whether ``path`` looks like a training checkpoint, complete or not: a file, or a folder of DeepSpeed shards."""
    path = Path(path)
    return path.is_file() or (path / LATEST).exists() or (path / SHARDS).is_dir()


def read_training_checkpoint(path: str | Path) -> TrainingCheckpoint:
    """Read a checkpoint that `fit` wrote: a folder of DeepSpeed (any ZeRO stage), or a plain Lightning file.

    The sharded float32 master weights are put together by DeepSpeed's own code. ZeRO stage 0 has none: what is read
    then are the weights that the model computed with.

    Args:
        path: `X.ckpt`, as written by Lightning's `ModelCheckpoint`. A pickle: only read what you trust.

    Raises:
        CheckpointError: the path doesn't exist, the checkpoint is incomplete or damaged (the message says what is
            missing), or it was not written by this package.
    """
    path = Path(path)
    state = open_checkpoint(path)
    if not path.is_dir():
        weights = state.get("state_dict", {})
    elif optimizer_shards(path):
        weights = _gather(path)
    else:
        weights = state["module"]
    return _assemble(path, state, weights)


def open_checkpoint(path: Path) -> dict[str, Any]:
    """What Lightning saved in a checkpoint, after a check that all its files are there and none is cut short.

    Tensors stay in their file until they are used, so that this takes no time and no memory.

    Raises:
        CheckpointError: there is no checkpoint, it is incomplete (the message says what is missing), or it is of
            another package.
    """
    if not path.exists():
        raise CheckpointError(f"There is no checkpoint at {path}; expected a `.ckpt` folder or file that `fit` wrote.")
    state = _load_folder(path) if path.is_dir() else _load(path, path)
    if CHECKPOINT_KEY not in state or "global_step" not in state:
        raise CheckpointError(
            f"{path} is a checkpoint of something else: it has no {CHECKPOINT_KEY!r} entry, which "
            "`dflash-lightning fit` writes. Give a checkpoint of a drafter."
        )
    return state


def optimizer_shards(path: Path) -> list[Path]:
    """The files that hold each rank's part of the optimizer's state; none under ZeRO stage 0."""
    return sorted((path / SHARDS).glob(OPTIMIZER_FILES))


def _assemble(path: Path, state: dict[str, Any], weights: dict[str, Tensor]) -> TrainingCheckpoint:
    ours = state[CHECKPOINT_KEY]
    return TrainingCheckpoint(
        path=path,
        config=DrafterConfig.from_dict(ours["drafter"]),
        state_dict={
            name.removeprefix(WEIGHTS_PREFIX): tensor.float()
            for name, tensor in weights.items()
            if name.startswith(WEIGHTS_PREFIX)
        },
        target=TargetIdentity(**ours["target"]),
        target_path=ours["target_path"],
        step=state["global_step"],
        start_from=ours.get("start_from"),
        code_version=ours["code_version"],
    )


def _load_folder(path: Path) -> dict[str, Any]:
    """Lightning's state in a checkpoint of DeepSpeed, after a check that every file is there and whole."""
    shards = path / SHARDS
    models, optimizers = sorted(shards.glob(MODEL_FILES)), optimizer_shards(path)
    missing = [
        what
        for what, found in (
            (f"`{SHARDS}/{MODEL_FILES}` (weights)", models),
            (f"`{LATEST}` (which is written last)", (path / LATEST).is_file()),
        )
        if not found
    ]
    if missing:
        raise _incomplete(path, f"it has no {' and no '.join(missing)}")
    state = _load(models[0], path)
    ranks = state["dp_world_size"]
    # Under stage 3 each rank has its own file of weights. Under stage 0 the optimizer's state lies beside the weights.
    expected_models = ranks if models[0].name.startswith("zero_pp_rank_") else 1
    expected_optimizers = ranks if optimizers or state.get("optimizer") is None else 0
    for pattern, files, expected in (
        (MODEL_FILES, models, expected_models),
        (OPTIMIZER_FILES, optimizers, expected_optimizers),
    ):
        if len(files) != expected:
            raise _incomplete(path, f"{len(files)} of {expected} `{SHARDS}/{pattern}` are there")
        for file in files:
            if not zipfile.is_zipfile(file):
                raise _incomplete(path, f"`{SHARDS}/{file.name}` is cut short")
    return state


def _gather(path: Path) -> dict[str, Tensor]:
    """Full float32 weights from all shards."""
    # Here, because DeepSpeed takes seconds to import.
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    chatter = io.StringIO()
    try:
        with contextlib.redirect_stdout(chatter), contextlib.redirect_stderr(chatter):
            return get_fp32_state_dict_from_zero_checkpoint(str(path), tag=SHARDS)
    except UNREADABLE as error:
        raise _damaged(path, error) from error


def _load(file: Path, path: Path) -> dict[str, Any]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    except UNREADABLE as error:
        raise _damaged(path, error) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}; expected a Lightning checkpoint.")
    return state


def _incomplete(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is no complete checkpoint: {reason}. Expected a `.ckpt` folder that `fit` finished writing; take an "
        "earlier checkpoint if this one was interrupted, or copy the whole folder."
    )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} can't be read as a checkpoint: {' '.join(str(error).split())}. It is damaged, incomplete or of "
        "another kind; take an earlier checkpoint."
    )
