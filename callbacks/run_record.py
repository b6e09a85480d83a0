"""What a run was started with, beside its logs: command, code, packages, machine."""

import json
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from dflash_lightning import __version__

RECORD_FILE = "starts.jsonl"
PACKAGES = ("torch", "lightning", "deepspeed", "transformers", "zarr", "tensorboard")


class RunRecord(Callback):
    """Adds a line to ``starts.jsonl`` in the log folder whenever `fit` starts: time, first step, `run_facts`."""

    def __init__(self, first_step: int):
        """
        Args:
            first_step: optimizer steps behind the checkpoint that the run goes on from; 0 for a new one.
        """
        self.first_step = first_step

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        # Asked on every rank: Lightning broadcasts it from the first.
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            started = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "first_step": self.first_step}
            with (folder / RECORD_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(started | run_facts(trainer)) + "\n")


def run_facts(trainer: L.Trainer) -> dict[str, Any]:
    """The command, the state of the code, and what it runs on."""
    return {
        "command": typed_command(sys.argv),
        "working folder": str(Path.cwd()),
        "git commit of the working folder": git_state(Path.cwd()),
        "git commit of dflash_lightning": git_state(Path(__file__).parent),
        "dflash_lightning": __version__,
        "Python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "machine": platform.platform(),
        "device": str(trainer.strategy.root_device),
        "ranks": trainer.world_size,
        "nodes": trainer.num_nodes,
    }


def typed_command(arguments: list[str]) -> str:
    """The command line as one would type it; ``arguments`` are a process's, its program first."""
    program = Path(arguments[0])
    typed = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return shlex.join([*typed, *arguments[1:]])


def git_state(folder: Path) -> str:
    """Commit of the repository that holds files of ``folder``, and whether it has changes."""
    git = ["git", "-C", str(folder)]
    try:
        tracked, commit, changes = (
            subprocess.run([*git, *what], capture_output=True, text=True, check=True).stdout.strip()
            for what in (["ls-files"], ["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "none"
    if not tracked:  # a package installed below somebody's repository
        return "none"
    return commit + (", with changes" if changes else "")
