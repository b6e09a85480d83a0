"""A `fit` of two ranks that is killed again and again ends as one that was left alone, bit for bit."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_client import command_server, kill, meeting_place
from fit_helpers import PATIENCE, checkpoints, fit_config, identity
from resume_helpers import write_random_cache

from dflash_lightning.checkpoints import SHARDS, open_checkpoint
from dflash_lightning.errors import CheckpointError

STEPS, KILLS = 14, 10


@pytest.fixture(scope="module")
def server():
    return command_server()


@pytest.fixture(scope="module")
def cache(llama_folder, tmp_path_factory) -> Path:
    return write_random_cache(tmp_path_factory.mktemp("cache") / "cache", llama_folder, 20)


def command(folder: Path, target: Path, cache: Path) -> list[str]:
    """A checkpoint after each step, and the best by validation loss: epochs of 5 steps, a validation every 3."""
    savers = [
        checkpoints(folder, "step={step}", monitor="val/loss", auto_insert_metric_name=False),
        checkpoints(folder, "last", every_n_train_steps=1),
    ]
    config = fit_config(target, cache, folder, savers)
    config["data"] |= {"batch_tokens": 110, "num_anchors": 4, "validation_fraction": 0.1}
    config["trainer"] |= {"devices": 2, "max_steps": STEPS, "accumulate_grad_batches": 2, "val_check_interval": 6}
    config["trainer"]["logger"] = False
    folder.mkdir()
    (folder / "fit.yaml").write_text(yaml.safe_dump(config))
    return ["fit", "--config", str(folder / "fit.yaml"), "--resume", "auto"]


# Names the run's folder, or is the score of the latest best checkpoint again, which Lightning doesn't restore.
NOT_COMPARED = {
    "dirpath",
    "best_model_path",
    "kth_best_model_path",
    "last_model_path",
    "best_k_models",
    "current_score",
}


def content(checkpoint: Path) -> dict[str, Any]:
    """All that the files of a checkpoint hold: weights, optimizer, schedule, loader, random states, callbacks; but for
    Lightning's counts of epochs begun and batches completed, which are others after a restart and mean nothing here."""
    held = {file.name: torch.load(file, weights_only=False) for file in (checkpoint / SHARDS).iterdir()}
    for state in held.values():
        if "loops" in state:
            state["loops"] = state["loops"]["fit_loop"]["state_dict"]  # of the loader
        for name, callback in state.get("callbacks", {}).items():
            state["callbacks"][name] = {key: value for key, value in callback.items() if key not in NOT_COMPARED}
    return held


def assert_equal(found: Any, expected: Any, where: str) -> None:
    """The same values all the way down, tensors bit for bit."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_equal(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_equal(*pair, f"{where}/{index}")
    elif hasattr(expected, "__dict__"):
        assert_equal(vars(found), vars(expected), where)
    else:
        assert found == expected, where


def step_of(checkpoint: Path) -> int:
    """The step of a complete checkpoint; 0 without one, as while one takes the place of the other."""
    try:
        return open_checkpoint(checkpoint)["global_step"]
    except CheckpointError:
        return 0


def wait_for_a_moment(last: Path, draw: random.Random) -> None:
    """Until a drawn number of checkpoints was saved or another one is half-written, and a drawn time longer."""
    moment, wanted, partial = draw.choice(["start", "saved", "half"]), draw.choice([1, 2]), Path(f"{last}.partial")
    before, saved, deadline = identity(last), 0, time.monotonic() + PATIENCE
    while moment != "start" and not (saved >= wanted and (moment == "saved" or partial.exists())):
        assert time.monotonic() < deadline
        now = identity(last)
        saved += now not in (before, None)
        before = now or before
        time.sleep(0.001)
    time.sleep(draw.uniform(0.0, {"start": 2.0, "saved": 0.2, "half": 0.02}[moment]))


@pytest.mark.slow
def test_killed_at_10_random_moments(server, llama_folder, cache, tmp_path):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    processes = server.launch(command(alone, llama_folder, cache), 2, **meeting_place())
    assert server.wait(processes) == [0, 0]
    fit, last = command(killed, llama_folder, cache), killed / "checkpoints" / "last.ckpt"
    draw, newest, half_written = random.Random(4), 0, 0
    for number in range(KILLS):
        processes = server.launch(fit, 2, **meeting_place())
        wait_for_a_moment(last, draw)
        kill(processes)
        assert server.wait(processes) == [-signal.SIGKILL] * 2, f"kill {number}: a process had ended before"
        half_written += any(path.suffix == ".partial" for path in last.parent.glob("*"))
        now = max(step_of(path) for path in (last, Path(f"{last}.replaced")))
        assert now >= newest, "a saved step was lost"
        newest = now
    assert half_written
    assert 0 < newest < STEPS
    assert server.wait(server.launch(fit, 2, **meeting_place())) == [0, 0]
    assert step_of(last) == STEPS
    assert_equal(content(last), content(alone / "checkpoints" / last.name), last.name)
    # Also a validation that a kill came before was made up for.
    # Which one is the best by a hair depends on how the CPU computes bfloat16.
    [best] = {path.name for path in (alone / "checkpoints").iterdir()} - {last.name}
    assert_equal(content(last.with_name(best)), content(alone / "checkpoints" / best), best)
