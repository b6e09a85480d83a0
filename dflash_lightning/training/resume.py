"""Where a training goes on: the newest complete checkpoint among the folders that it saves to."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy

from dflash_lightning.checkpoints import CHECKPOINT_KEY, open_checkpoint
from dflash_lightning.errors import CheckpointError, ConfigError

# What follows the name of a checkpoint that is being written, and of the older one while the new one takes its place.
PARTIAL, REPLACED = ".partial", ".replaced"
AUTO = "auto"


class Start(NamedTuple):
    """Where a training starts.

    Attributes:
        checkpoint: the checkpoint to go on from; None to start anew.
        step: how many optimizer steps it has behind it.
        message: what to tell the user about it; empty where there is nothing to tell.
    """

    checkpoint: Path | None
    step: int
    message: str


def take_back(checkpoint: Path) -> None:
    """Give an older checkpoint its name again if a kill fell between the two renames that replace it."""
    replaced = checkpoint.with_name(checkpoint.name + REPLACED)
    if replaced.exists() and not checkpoint.exists():
        replaced.rename(checkpoint)


def choose_start(resume: str | None, trainer: L.Trainer) -> Start:
    """Where to start, from what lies in the checkpoint folders; nothing is written, so that ranks may do it each.

    Args:
        resume: the path of a checkpoint, or `auto`: the newest complete one among the folders that the trainer's
            ModelCheckpoint callbacks write to, or a new start where there is none. None: a new start.
        trainer: the trainer that is to go on.

    Raises:
        CheckpointError: the given checkpoint doesn't exist or isn't complete, or the chosen one is of another kind of
            strategy.
        ConfigError: `auto`, and a ModelCheckpoint has no fixed folder.
    """
    if resume is None:
        return _new_start(trainer, "")
    if not resume:
        raise ConfigError("--resume is empty; expected auto or the path of a checkpoint.")
    if resume != AUTO:
        path = Path(resume)
        step = _open(path)["global_step"]
        _check_kind(path, trainer)
        return Start(path, step, f"resume: {path}, step {step}")
    folders = _checkpoint_folders(trainer)
    complete, incomplete = _search(folders)
    passed_over = f"; passed over as incomplete: {', '.join(path.name for path in incomplete)}" if incomplete else ""
    if not complete:
        return _new_start(trainer, f"resume: no checkpoint in {', '.join(map(str, folders))}, a new start{passed_over}")
    newest = max(complete, key=lambda path: (complete[path], str(path)))
    _check_kind(newest, trainer)
    return Start(newest, complete[newest], f"resume: {newest}, step {complete[newest]}{passed_over}")


def _new_start(trainer: L.Trainer, message: str) -> Start:
    """Refuses a folder in which Lightning under SLURM would find a checkpoint of its own, and load it unasked."""
    if found := sorted(Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt")):
        raise CheckpointError(
            f"the training would start anew, but under SLURM Lightning would load {found[-1]}, which it saved at an "
            f"earlier signal. Go on from it with --resume {found[-1]}, or remove it."
        )
    return Start(None, 0, message)


def _checkpoint_folders(trainer: L.Trainer) -> list[Path]:
    folders = [saver.dirpath for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
    if not folders or None in folders:
        raise ConfigError(
            "--resume auto looks into the folders that ModelCheckpoint callbacks write to, but "
            + ("one of them has no dirpath; give it one." if folders else "there is no such callback; add one.")
        )
    return sorted({Path(folder) for folder in folders})


def _search(folders: Iterable[Path]) -> tuple[dict[Path, int], list[Path]]:
    """Steps of the complete checkpoints, and the incomplete ones."""
    complete, incomplete = {}, []
    for folder in folders:
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        for name in sorted({name.removesuffix(REPLACED) for name in names}):
            path = folder / name
            if name.endswith(PARTIAL):
                incomplete.append(path)
            elif path.suffix == ModelCheckpoint.FILE_EXTENSION:
                try:
                    complete[path] = _open(path)["global_step"]
                except CheckpointError:
                    incomplete.append(path)
    return complete, incomplete


def _place(path: Path) -> Path:
    """Where a checkpoint lies, also where only a kill kept it from having its name."""
    replaced = path.with_name(path.name + REPLACED)
    return replaced if replaced.exists() and not path.exists() else path


def _open(path: Path) -> dict:
    return open_checkpoint(_place(path))


def _check_kind(path: Path, trainer: L.Trainer) -> None:
    """Refuse a checkpoint of DeepSpeed, a folder, without DeepSpeed, and the other way round."""
    sharded, name = _place(path).is_dir(), type(trainer.strategy).__name__
    if sharded != isinstance(trainer.strategy, DeepSpeedStrategy):
        raise CheckpointError(
            f"{path} was written {'under' if sharded else 'without'} DeepSpeed, and trainer.strategy is {name}, which "
            "can't read it. Go on with the strategy that it was written under."
        )


def check_same_run(path: Path, making: dict[str, Any], trainer: L.Trainer) -> None:
    """Refuse to go on from the checkpoint of a run that trains another drafter, or the same one in another way.

    Args:
        making: of this run, see `DFlashModule.making`.

    Raises:
        CheckpointError: listing every field that differs, with both values.
    """
    state = _open(path)
    there, here = (
        {**run["drafter"], "muon": run["muon"], "weights of the target": run["target"]["weights_sha256"]}
        for run in (state[CHECKPOINT_KEY], making)
    )
    if "ds_config" in state:
        there["precision"] = "bf16-mixed" if state["ds_config"].get("bf16", {}).get("enabled") else "32-true"
        here["precision"] = str(trainer.precision)
    differing = [name for name in here if here[name] != there.get(name)]
    if differing:
        lines = "".join(f"\n  {name}: checkpoint {there.get(name)}, this run {here[name]}" for name in differing)
        raise CheckpointError(
            f"{path} is of a run that differs from this one:{lines}\nGo on with its settings, or start anew in another "
            "folder."
        )


class OneStart(Callback):
    """Refuses a training in which one rank would start elsewhere than the others."""

    def __init__(self, start: Start):
        """
        Args:
            start: what this rank found.
        """
        self.start = start

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        first = trainer.strategy.broadcast(self.start)
        if self.start[:2] != first[:2]:
            raise CheckpointError(
                f"rank {trainer.global_rank} would start from {_named(self.start)}, rank 0 from {_named(first)}. All "
                "ranks must see the same checkpoint folders: put them on a file system that all nodes share."
            )


def _named(start: Start) -> str:
    return f"{start.checkpoint}, step {start.step}" if start.checkpoint else "the beginning"
