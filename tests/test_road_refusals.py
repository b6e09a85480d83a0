"""What stops each stage of the road, and its message."""

from pathlib import Path

import pytest
import yaml
from fit_helpers import checkpoints, fit_config
from prepare_helpers import write_rows
from road_helpers import PROMPTS

from dflash_lightning.cache import FeatureCache
from dflash_lightning.capture import command as capture_module
from dflash_lightning.cli import run
from dflash_lightning.errors import CacheError, ConfigError, DataError, DFlashError, ExportError, TargetError

CAPTURE = ["--target-layer-ids", "[1, 3]", "--batch-tokens", "200", "--shard-tokens", "300", "--num-threads", "1"]


def capture_arguments(data: Path, target: Path, cache: Path) -> list[str]:
    return ["capture", "--target", str(target), "--data", str(data), "--cache", str(cache), *CAPTURE]


@pytest.fixture(scope="module")
def road(tmp_path_factory, llama_folder) -> Path:
    """A folder with prompts, data and a cache."""
    folder = tmp_path_factory.mktemp("road")
    prompts = write_rows(folder / "prompts.jsonl", PROMPTS)
    run(
        ["prepare", "--target", str(llama_folder), "--input", str(prompts), "--output", str(folder / "data")]
        + ["--max-new-tokens", "24", "--dtype", "float32"]
    )
    run(capture_arguments(folder / "data", llama_folder, folder / "cache"))
    return folder


@pytest.fixture
def fit(road, llama_folder, tmp_path) -> list[str]:
    """A training that decodes too."""
    decoding = {"prompts": str(road / "prompts.jsonl"), "limit": 4, "max_new_tokens": 12}
    callbacks = [{"class_path": "callbacks.DecodedAcceptance", "init_args": decoding}, checkpoints(tmp_path, "last")]
    file = tmp_path / "fit.yaml"
    file.write_text(yaml.safe_dump(fit_config(llama_folder, road / "cache", tmp_path, callbacks)))
    return ["fit", "--config", str(file)]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--model.drafter.block_size", "65"], "block_size is 65"),
        (["--data.validation_fraction", "0"], "no sample is held back"),
    ],
)
def test_a_training_refuses(fit, settings, message):
    with pytest.raises(DFlashError, match=message):
        run([*fit, *settings])


def test_a_cache_of_another_target_or_other_layers_is_refused(road, qwen3_folder, llama_folder, tmp_path):
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
    with pytest.raises(TargetError):
        run(capture_arguments(tmp_path, tmp_path, tmp_path / "c"))
    with pytest.raises(DataError, match="holds no prepared data"):
        run(capture)
    with pytest.raises(CacheError, match="is not a feature cache"):
        run(["cache", "info", str(tmp_path)])
