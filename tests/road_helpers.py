"""A folder in which the pages' commands run as they stand: what they name is there, small."""

import os
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import yaml
from fit_helpers import forget_launcher
from page_commands import ROOT, command_line
from prepare_helpers import write_rows

from dflash_lightning.cli import main

PROMPTS = [{"id": f"p{i}", "family": "ab"[i % 2], "prompt": f"say {i * 7} please"} for i in range(24)]
GSM8K = [{"question": f"How many are {i} and {i}?", "answer": f"#### {2 * i}"} for i in range(2)]
# Names on the pages -> what stands there: links, so that the commands themselves stay as they are.
LINKS = {
    "run.yaml": "conf/train_qwen3_8b.yaml",
    "CACHE": "runs/qwen3-8b/cache",
    "DATA": "runs/qwen3-8b/data",
    "DIR": "runs/qwen3-8b/export/zlab",
    "DRAFTER": "runs/qwen3-8b/export/zlab",
    "RUN": "runs/qwen3-8b",
    "TARGET": "Qwen/Qwen3-8B",
    "runs/NAME/checkpoints": "runs/qwen3-8b/checkpoints",
    "runs/quickstart/target": "Qwen/Qwen3-8B",
    "runs/quickstart/cache": "runs/qwen3-8b/cache",
    "runs/quickstart/data/train": "runs/qwen3-8b/data",
    "runs/quickstart/export": "runs/qwen3-8b/export",
    "runs/quickstart/logs": "runs/qwen3-8b/logs",
    "runs/quickstart/heldout.jsonl": "heldout.jsonl",
}
# The hub is out of reach: the set's file instead of its name.
CHANGES = {"gsm8k": ["gsm8k=gsm8k.jsonl"]}
# Sizes of commands, turned down by what is added to them.
SMALL = {
    "prepare": ["--max-new-tokens", "24"],
    "evaluate": ["--max-new-tokens", "8", "--dtype", "float32"],
    "generate": ["--max-new-tokens", "9", "--dtype", "float32"],
    "export": ["--max-new-tokens", "8"],
}
# What conf/train_qwen3_8b.yaml has other values for, on one CPU. An optimizer step has 2 micro-batches.
SMALL_TRAINING = {
    "data": {"batch_tokens": 600, "num_anchors": 8, "validation_fraction": 0.2, "num_workers": 0},
    "trainer": {
        **{"accelerator": "cpu", "devices": 1, "max_steps": 4, "accumulate_grad_batches": 2, "val_check_interval": 4},
        **{"log_every_n_steps": 2, "enable_progress_bar": False, "enable_model_summary": False},
    },
}
SMALL_DECODING = {"limit": 2, "max_new_tokens": 8, "max_time_share": 1.0}


def small_training() -> dict:
    """conf/train_qwen3_8b.yaml, turned down."""
    config = yaml.safe_load((ROOT / "conf" / "train_qwen3_8b.yaml").read_text())
    for name, values in SMALL_TRAINING.items():
        config[name] |= values
    [decoding] = [c for c in config["trainer"]["callbacks"] if c["class_path"] == "callbacks.DecodedAcceptance"]
    decoding["init_args"] |= SMALL_DECODING
    return config


def make_workspace(folder: Path, target: Path) -> Path:
    """The folder with everything that a user has before the first command."""
    for name, there in (("Qwen/Qwen3-8B", target), ("benchmarks", ROOT / "benchmarks"), *LINKS.items()):
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder / there)
    write_rows(folder / "prompts.jsonl", PROMPTS)
    write_rows(folder / "heldout.jsonl", PROMPTS[:4])
    write_rows(folder / "gsm8k.jsonl", GSM8K)
    (folder / "conf").mkdir()
    (folder / "conf" / "train_qwen3_8b.yaml").write_text(yaml.safe_dump(small_training()))
    return folder


@contextmanager
def typed(*lines: str) -> Iterator[None]:
    """What the user types."""
    with patch.object(sys, "stdin", StringIO("".join(f"{line}\n" for line in lines))):
        yield


def run_command(command: str, folder: Path, *more: str) -> str:
    """Run one of our commands there, in this process; what it said."""
    words = [*command_line(command, CHANGES)[1:], *more]
    words += SMALL.get(words[0], [])
    said = StringIO()
    # tests/test_doctor.py starts the two processes.
    no_ranks = patch("dflash_lightning.doctor.ranks.check_ranks", lambda: ())
    with (
        chdir(folder),
        patch.object(sys, "argv", ["dflash-lightning", *words]),
        patch.dict(os.environ, COLUMNS="200"),
        redirect_stdout(said),
        redirect_stderr(said),
        typed("Why?"),
        no_ranks if words[0] == "doctor" else nullcontext(),
    ):
        try:
            main()
        finally:
            forget_launcher()
    return said.getvalue()
