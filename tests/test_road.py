"""The whole road on a tiny target, through the commands: prepare, capture, fit, evaluate, export, generate."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from fit_helpers import PATIENCE, checkpoints, fit_config, wait_for
from helpers import load_tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_lightning.cache import FeatureCache
from dflash_lightning.cache.packing import unpack
from dflash_lightning.cli import run
from dflash_lightning.errors import CacheError, ConfigError, DataError, ExportError, TargetError
from dflash_lightning.training.checkpoints import read_training_checkpoint

PROMPTS = [{"id": f"p{i}", "family": "ab"[i % 2], "prompt": f"say {i * 7} please"} for i in range(24)]
VALIDATION_KEYS = {
    *("tau", "tau_low", "tau_high", "target", "drafter", "teacher_forced_tau", "rounds", "prompts", "by_family"),
    *("tokens_per_second", "baseline_tokens_per_second", "speedup", "histogram", "lossless"),
    *("tau_mean", "tau_mean_low", "tau_mean_high", "texts", "mask_token_prompts", "prompt_set", "settings"),
    *("acceptance_by_slot", "conditional_acceptance_by_slot", "teacher_forced_histogram"),
    *("seconds_to_first_token", "plain_seconds_to_first_token"),
}


def write_jsonl(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def road_config(target: Path, cache: Path, prompts: Path, folder: Path) -> dict:
    """A run with all callbacks."""
    decoding = {"prompts": str(prompts), "limit": 4, "max_new_tokens": 12}
    callbacks = [
        {"class_path": "callbacks.DecodedAcceptance", "init_args": decoding},
        {"class_path": "callbacks.Throughput"},
        checkpoints(folder, "best", monitor="decode/tau", mode="max"),
        checkpoints(folder, "last"),
        {"class_path": "callbacks.ExportDrafter", "init_args": {"dirpath": str(folder / "at_end")}},
    ]
    return fit_config(target, cache, folder, callbacks)


CAPTURE = ["--target-layer-ids", "[1, 3]", "--batch-tokens", "200", "--shard-tokens", "300", "--num-threads", "1"]


def capture_arguments(data: Path, target: Path, cache: Path) -> list[str]:
    return ["capture", "--target", str(target), "--data", str(data), "--cache", str(cache), *CAPTURE]


@pytest.fixture(scope="module")
def road(tmp_path_factory, llama_folder):
    """A folder with data, cache and a trained drafter, and what `evaluate` printed."""
    folder = tmp_path_factory.mktemp("road")
    prompts = write_jsonl(folder / "prompts.jsonl", PROMPTS)
    run(
        ["prepare", "--target", str(llama_folder), "--input", str(prompts), "--output", str(folder / "data")]
        + ["--max-new-tokens", "24", "--dtype", "float32"]
    )
    run(capture_arguments(folder / "data", llama_folder, folder / "cache"))
    config = folder / "fit.yaml"
    config.write_text(yaml.safe_dump(road_config(llama_folder, folder / "cache", prompts, folder)))
    # A process of its own: DeepSpeed leaves its groups and its environment behind.
    subprocess.run([sys.executable, "-m", "dflash_lightning", "fit", "--config", str(config)], check=True)
    return folder


@pytest.mark.slow
def test_training_leaves_logs_reports_checkpoints_and_exports(road):
    events = EventAccumulator(str(road / "logs"))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert {
        *("decode/tau", "decode/tau_low", "decode/tau_high", "decode/teacher_forced_tau", "decode/speedup"),
        *("decode/identical", "decode/ties", "decode/differences", "train/loss", "train/accuracy_slot_3"),
        *("train/teacher_forced_tau", "val/loss", "perf/label_tokens_per_second", "perf/data_wait_share"),
        "perf/padding_share",
    } <= names
    reports = [json.loads(line) for line in (road / "logs" / "decoding.jsonl").read_text().splitlines()]
    assert [report["step"] for report in reports] == [0, 3, 6, 9, 12]
    # The logged points are the reports' figures, at Lightning's 0-based steps (the one before training is at 0).
    logged = {event.step: event.value for event in events.Scalars("decode/tau")}
    assert sorted(logged) == [0, 2, 5, 8, 11]
    np.testing.assert_allclose([logged[step] for step in sorted(logged)], [r["tau"] for r in reports], rtol=1e-6)
    assert all(r["lossless"]["identical"] + r["lossless"]["ties"] == 4 for r in reports)
    assert {path.name for path in (road / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert read_training_checkpoint(road / "checkpoints" / "last.ckpt").step == 12
    assert {path.name for path in (road / "at_end").iterdir()} == {"zlab", "transformers"}
    assert f"{reports[-1]['tau']:.2f} (step 12" in (road / "logs" / "report.html").read_text()


@pytest.mark.slow
def test_evaluate_writes_the_promised_keys_and_is_lossless_in_float32(road, llama_folder, capsys):
    report_file = road / "out" / "report.json"
    run(
        ["evaluate", "--target", str(llama_folder), "--drafter", str(road / "checkpoints" / "best.ckpt")]
        + ["--prompts", str(road / "prompts.jsonl"), "--limit", "6", "--max-new-tokens", "16", "--dtype", "float32"]
        + ["--json", str(report_file)]
    )
    report = json.loads(report_file.read_text())
    assert set(report) == VALIDATION_KEYS
    assert report["lossless"] == {"prompts": 6, "identical": 6, "ties": 0, "differing": 0}
    assert report["tau_low"] <= report["tau"] <= report["tau_high"]
    assert set(report["by_family"]) == {"a", "b"}
    assert sum(report["histogram"].values()) == report["rounds"]
    committed = sum(int(length) * count for length, count in report["histogram"].items())
    assert report["tau"] == pytest.approx(committed / report["rounds"])
    assert "6 equal to plain greedy, 0 part at a tie, 0 differ" in capsys.readouterr().out


@pytest.mark.slow
def test_export_and_generate_from_the_exported_folder(road, llama_folder, capsys):
    output = road / "export"
    export = ["export", "--checkpoint", str(road / "checkpoints" / "best.ckpt"), "--output", str(output)]
    run([*export, "--format", "zlab,transformers"])
    with pytest.raises(ExportError, match="empty"):
        run(export)
    run(
        ["generate", "--target", str(llama_folder), "--drafter", str(output / "zlab"), "--prompt", "say 7"]
        + ["--max-new-tokens", "9", "--dtype", "float32"]
    )
    assert "text equal to plain greedy" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_training_goes_on_from_its_last_checkpoint(road, tmp_path):
    """Killed after its first checkpoint, continued to the end: the reports go on, nothing starts anew."""
    config = yaml.safe_load((road / "fit.yaml").read_text())
    text = json.dumps(config).replace(str(road), str(tmp_path)).replace(str(tmp_path / "cache"), str(road / "cache"))
    text = text.replace(str(tmp_path / "prompts.jsonl"), str(road / "prompts.jsonl"))
    config_file = tmp_path / "fit.yaml"
    config_file.write_text(text)
    fit = [sys.executable, "-m", "dflash_lightning", "fit", "--config", str(config_file)]
    process = subprocess.Popen(fit)
    reports_file, last = tmp_path / "logs" / "decoding.jsonl", tmp_path / "checkpoints" / "last.ckpt"
    wait_for(last.exists)
    process.kill()
    process.wait()
    subprocess.run([*fit, "--resume", "auto"], check=True)
    reports = [json.loads(line) for line in reports_file.read_text().splitlines()]
    steps = [report["step"] for report in reports]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, 12)


@pytest.mark.slow
def test_two_ranks_decode_their_share_of_the_prompts(road, llama_folder, tmp_path):
    config = road_config(llama_folder, road / "cache", road / "prompts.jsonl", tmp_path)
    config["trainer"] |= {"devices": 2, "max_steps": 4, "val_check_interval": 2, "precision": "32-true"}
    config["data"]["batch_tokens"] = 180
    file = tmp_path / "fit.yaml"
    file.write_text(yaml.safe_dump(config))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launch, "-m", "dflash_lightning", "fit", "--config", str(file)], check=True, timeout=PATIENCE)
    reports = [json.loads(line) for line in (tmp_path / "logs" / "decoding.jsonl").read_text().splitlines()]
    assert [report["step"] for report in reports] == [0, 2, 4]
    lossless = {"prompts": 4, "identical": 4, "ties": 0, "differing": 0}
    assert all(report["lossless"] == lossless for report in reports)
    assert len(list((tmp_path / "logs").glob("events.*"))) == 1, "only rank 0 writes"


@pytest.mark.slow
def test_settings_refused_in_a_constructor_and_an_empty_validation_split_are_one_message(road, llama_folder, tmp_path):
    file = tmp_path / "fit.yaml"
    file.write_text(yaml.safe_dump(road_config(llama_folder, road / "cache", road / "prompts.jsonl", tmp_path)))
    fit = [sys.executable, "-m", "dflash_lightning", "fit", "--config", str(file)]
    for wrong, message in (
        (["--model.drafter.block_size", "65"], "block_size is 65"),
        (["--model.optimizer.lr", "-1"], "lr is -1.0"),
        (["--data.validation_fraction", "0"], "there is no validation batch"),
    ):
        found = subprocess.run([*fit, *wrong], capture_output=True, text=True, check=False)
        assert found.returncode == 2, found.stderr
        assert message in found.stderr
        assert "Traceback" not in found.stderr


@pytest.mark.slow
def test_cached_features_are_hidden_states_of_single_unpadded_forwards(road, llama_folder):
    target = load_tiny(llama_folder, torch.bfloat16)
    cache = FeatureCache(road / "cache")
    for index in (0, 11, 23):
        sample = cache.read(index)
        with torch.no_grad():
            states = target(torch.from_numpy(sample.input_ids).long()[None], output_hidden_states=True).hidden_states
        expected = torch.cat([states[2][0], states[4][0]], dim=-1)
        # The default storage has 4 bits a value, whose error is a tenth of the channels' spread.
        error = (unpack(sample.features) - expected).float().norm() / (expected - expected.mean(dim=0)).float().norm()
        assert 0.05 < error < 0.15


@pytest.mark.slow
def test_a_cache_of_another_target_or_other_layers_is_refused(road, qwen3_folder, llama_folder, tmp_path):
    config = road_config(llama_folder, road / "cache", road / "prompts.jsonl", tmp_path)
    config["model"]["drafter"]["target_layer_ids"] = [1, 2]
    file = tmp_path / "fit.yaml"
    file.write_text(yaml.safe_dump(config))
    fit = [sys.executable, "-m", "dflash_lightning", "fit", "--config", str(file)]
    found = subprocess.run(fit, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "target_layer_ids" in found.stderr
    assert "Traceback" not in found.stderr
    with pytest.raises(DataError, match="prepared with target"):
        run(capture_arguments(road / "data", qwen3_folder, tmp_path / "c"))
    with pytest.raises(CacheError, match="target_layer_ids"):
        run([*capture_arguments(road / "data", llama_folder, road / "cache"), "--target-layer-ids", "[0, 3]"])
    assert FeatureCache(road / "cache").complete
    with pytest.raises(ExportError, match="drafter"):
        run(
            ["evaluate", "--target", str(qwen3_folder), "--drafter", str(tmp_path), "--prompts"]
            + [str(road / "prompts.jsonl")]
        )


def test_nan_features_stop_a_capture_with_the_samples_id(road, llama_folder, tmp_path, monkeypatch):
    from dflash_lightning.capture import command as capture_module

    original = capture_module.compute_features

    def spoiled(*args):
        features = original(*args).clone()
        features[0, 0, 0] = float("nan")
        return features

    monkeypatch.setattr(capture_module, "compute_features", spoiled)
    with pytest.raises(CacheError, match=r"sample 'p\d+': .*NaN"):
        run(capture_arguments(road / "data", llama_folder, tmp_path / "c"))


def test_bad_settings_are_one_clear_message(llama_folder, tmp_path):
    capture = capture_arguments(tmp_path, llama_folder, tmp_path / "c")
    with pytest.raises(ConfigError, match="batch_tokens is 0"):
        run([*capture, "--batch-tokens", "0"])
    with pytest.raises(ConfigError, match="num_threads is 0"):
        run([*capture, "--num-threads", "0"])
    with pytest.raises(ConfigError, match="last layer"):
        run([*capture, "--target-layer-ids", "[1, 5]"])
    with pytest.raises(TargetError):
        run(capture_arguments(tmp_path, tmp_path, tmp_path / "c"))
    with pytest.raises(DataError, match="holds no prepared data"):
        run(capture)
    with pytest.raises(CacheError, match="is not a feature cache"):
        run(["cache", "info", str(tmp_path)])
