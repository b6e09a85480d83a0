"""The whole road, as README and docs tell it: their commands run as they stand, on a tiny target of Qwen3's type."""

import json
import re
import shutil
import signal
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import torch
import yaml
from browser import tensorboard
from command_client import command_server, kill, meeting_place
from fit_helpers import PATIENCE, wait_for
from helpers import load_tiny
from page_commands import command_line, commands_run_by
from road_helpers import make_workspace, run_command, small_training
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_lightning.cache import FeatureCache
from dflash_lightning.cache.packing import unpack
from dflash_lightning.checkpoints import read_training_checkpoint
from dflash_lightning.training.resume import take_back

VALIDATION_KEYS = {
    *("tau", "tau_low", "tau_high", "target", "drafter", "teacher_forced_tau", "rounds", "prompts", "by_family"),
    *("tokens_per_second", "baseline_tokens_per_second", "speedup", "histogram", "lossless"),
    *("tau_mean", "tau_mean_low", "tau_mean_high", "texts", "mask_token_prompts", "prompt_set", "settings"),
    *("acceptance_by_slot", "conditional_acceptance_by_slot", "teacher_forced_histogram"),
    *("seconds_to_first_token", "plain_seconds_to_first_token"),
}
COMMANDS = commands_run_by(__file__)
RUN = Path("runs/qwen3-8b")
ONE_STEP = ("--trainer.max_steps", "1")

pytestmark = pytest.mark.slow


class Road:
    """A folder in which commands run once each, and what they said."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.said: dict[str, str] = {}

    def said_by(self, start: str) -> str:
        """What this command of the pages said, or the first that begins so; it is run now if it wasn't before."""
        command = start if start in COMMANDS else next(command for command in COMMANDS if command.startswith(start))
        if command not in self.said:
            self.said[command] = self._run(command)
        return self.said[command]

    def _run(self, command: str) -> str:
        if command.startswith("tensorboard "):
            return names_in_tensorboard(self.folder / command_line(command)[-1])
        if "start_from" not in command:
            return run_command(command, self.folder)
        # A run of its own, for which the cache and the drafter are there.
        other = make_workspace(self.folder / "another-run", (self.folder / "TARGET").resolve())
        (other / RUN).mkdir()
        (other / RUN / "cache").symlink_to(self.folder / RUN / "cache")
        (other / "DRAFTER").unlink()
        (other / "DRAFTER").symlink_to(self.folder / "DRAFTER")
        return run_command(command, other, *ONE_STEP)


def names_in_tensorboard(logs: Path) -> str:
    """What a running TensorBoard has to show of these logs."""
    names: set[str] = set()
    with tensorboard(logs) as address:

        def shows_tau() -> bool:
            with urlopen(f"{address}data/plugin/scalars/tags", timeout=PATIENCE) as answer:
                names.update(*json.load(answer).values())
            return "decode/tau" in names

        wait_for(shows_tau)  # while it reads, it answers with what it has
    return " ".join(sorted(names))


@pytest.fixture(scope="module")
def road(_one_group, like_qwen3_8b, tmp_path_factory) -> Road:
    """The first three commands were run: there are data, a cache and a trained drafter."""
    road = Road(make_workspace(tmp_path_factory.mktemp("road"), like_qwen3_8b))
    for command in ("prepare", "capture", "fit"):
        road.said_by(f"dflash-lightning {command}")
    return road


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_pages_runs(road, command):
    assert road.said_by(command).strip()


def test_training_leaves_logs_reports_checkpoints_and_exports(road):
    run = road.folder / RUN
    events = EventAccumulator(str(run / "logs"))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert {
        *("decode/tau", "decode/tau_low", "decode/tau_high", "decode/teacher_forced_tau", "decode/speedup"),
        *("decode/identical", "decode/ties", "decode/differences", "train/loss", "train/accuracy_slot_3"),
        *("train/teacher_forced_tau", "val/loss", "perf/label_tokens_per_second", "perf/data_wait_share"),
        "perf/padding_share",
    } <= names
    assert "decode/tau" in road.said_by("tensorboard ")
    reports = [json.loads(line) for line in (run / "logs" / "decoding.jsonl").read_text().splitlines()]
    assert [report["step"] for report in reports] == [0, 2, 4]
    # The logged points are the reports' figures, at Lightning's 0-based steps (the one before training is at 0).
    logged = {event.step: event.value for event in events.Scalars("decode/tau")}
    assert sorted(logged) == [0, 1, 3]
    np.testing.assert_allclose([logged[step] for step in sorted(logged)], [r["tau"] for r in reports], rtol=1e-6)
    assert all(r["lossless"]["identical"] + r["lossless"]["ties"] == 2 for r in reports)
    last, best = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert last == "last.ckpt"
    assert re.fullmatch(r"step=\d+-tau=\d\.\d\d\.ckpt", best)
    assert read_training_checkpoint(run / "checkpoints" / "last.ckpt").step == 4
    assert {path.name for path in (run / "export").iterdir()} == {"zlab", "transformers"}
    assert f"{reports[-1]['tau']:.2f} (step 4" in (run / "logs" / "report.html").read_text()


def test_evaluate_writes_the_promised_keys_and_is_lossless_in_float32(road):
    said = road.said_by("dflash-lightning evaluate")
    report = json.loads((road.folder / RUN / "gsm8k.json").read_text())
    assert set(report) == VALIDATION_KEYS
    assert report["lossless"] == {"prompts": 2, "identical": 2, "ties": 0, "differing": 0}
    assert "2 equal to plain greedy, 0 part at a tie, 0 differ" in said
    assert report["tau_low"] <= report["tau"] <= report["tau_high"]
    assert sum(report["histogram"].values()) == report["rounds"]
    committed = sum(int(length) * count for length, count in report["histogram"].items())
    assert report["tau"] == pytest.approx(committed / report["rounds"])


def test_a_chat_and_exports_give_the_targets_own_text(road):
    assert "text equal to plain greedy" in road.said_by("dflash-lightning generate")
    for command in (command for command in COMMANDS if command.startswith("dflash-lightning export")):
        assert "gave the target's plain greedy text for 3 of 3 prompts" in road.said_by(command)
    assert {path.name for path in (road.folder / "OUTPUT").iterdir()} == {"transformers", "speculators"}


def test_nothing_of_the_run_is_doubtful(road):
    said = road.said_by("dflash-lightning doctor --training conf")
    for part in ("training", "training data", "checkpoints", "held-out prompts"):
        assert re.search(rf"^ok +{part} ", said, flags=re.MULTILINE), said


def test_cached_features_are_hidden_states_of_single_unpadded_forwards(road, like_qwen3_8b):
    target = load_tiny(like_qwen3_8b, torch.bfloat16)
    cache = FeatureCache(road.folder / RUN / "cache")
    for index in (0, 11, 23):
        sample = cache.read(index)
        with torch.no_grad():
            states = target(torch.from_numpy(sample.input_ids).long()[None], output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer + 1][0] for layer in (1, 3, 5, 7, 9)], dim=-1)
        # The default storage has 4 bits a value, whose error is a tenth of the channels' spread.
        error = (unpack(sample.features) - expected).float().norm() / (expected - expected.mean(dim=0)).float().norm()
        assert 0.05 < error < 0.15


@pytest.fixture
def another_run(road, tmp_path) -> Path:
    """Where a training can start on the road's cache."""
    (tmp_path / RUN).mkdir(parents=True)
    for name in (RUN / "cache", "Qwen", "heldout.jsonl"):
        (tmp_path / name).symlink_to(road.folder / name)
    shutil.copytree(road.folder / "conf", tmp_path / "conf")
    return tmp_path


def reports_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / RUN / "logs" / "decoding.jsonl").read_text().splitlines()]


def test_an_interrupted_training_goes_on_from_its_last_checkpoint(another_run):
    """Killed after its first checkpoint; the same command goes on to the end, and nothing starts anew."""
    [fit] = [command for command in COMMANDS if command.endswith("--resume auto")]
    config, last = small_training(), another_run / RUN / "checkpoints" / "last.ckpt"
    config["trainer"]["max_steps"] = 12  # the kill comes between steps 2 and 12
    (another_run / "conf" / "train_qwen3_8b.yaml").write_text(yaml.safe_dump(config))
    server, arguments = command_server(), command_line(fit)[1:]
    process = server.start(*arguments, folder=another_run)
    try:
        wait_for(last.exists)
    finally:
        kill([process])
    assert server.wait([process]) == [-signal.SIGKILL], "it ended before it could be killed"
    take_back(last)
    step, before = read_training_checkpoint(last).step, len(reports_of(another_run))
    assert 2 <= step < 12
    assert server.wait([server.start(*arguments, folder=another_run)]) == [0]
    steps = [report["step"] for report in reports_of(another_run)]
    assert (steps[0], steps[-1]) == (0, 12)
    assert step < min(steps[before:])


def test_two_ranks_decode_their_share_of_the_prompts(another_run):
    config = small_training()
    config["trainer"] |= {"devices": 2, "precision": "32-true"}
    file = another_run / "fit.yaml"
    file.write_text(yaml.safe_dump(config))
    server = command_server()
    ranks = server.launch(["fit", "--config", file], 2, folder=another_run, **meeting_place())
    assert server.wait(ranks) == [0, 0]
    reports = reports_of(another_run)
    assert [report["step"] for report in reports] == [0, 2, 4]
    lossless = {"prompts": 2, "identical": 2, "ties": 0, "differing": 0}
    assert all(report["lossless"] == lossless for report in reports)
    assert len(list((another_run / RUN / "logs").glob("events.*"))) == 1, "only rank 0 writes"
