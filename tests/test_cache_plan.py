"""`cache plan` against what the capture then takes, and the refusal of what can't fit."""

import json
from dataclasses import replace

import pytest
from capture_helpers import capture_arguments, random_texts, write_texts

from dflash_lightning.cache import FeatureCache, describe
from dflash_lightning.cache.storage import STORAGES
from dflash_lightning.cache.store import LocalFolder
from dflash_lightning.cli import run
from dflash_lightning.errors import CacheError, ConfigError


@pytest.fixture
def data(tmp_path, llama_folder):
    return write_texts(tmp_path / "data", llama_folder, random_texts(60))


def plan_arguments(*arguments) -> list[str]:
    """The arguments of `cache plan` for a capture."""
    command, *rest = capture_arguments(*arguments)
    assert command == "capture"
    return ["cache", "plan", *rest]


@pytest.mark.parametrize("storage", ["bfloat16", "2bit"])
def test_a_plan_says_what_the_capture_takes(data, llama_folder, tmp_path, capsys, storage):
    cache = tmp_path / "cache"
    sizes = ("--batch-tokens", "700", "--shard-tokens", "2000")
    arguments = (llama_folder, data, cache, *sizes, "--storage", storage, "--compression", "none")
    run([*plan_arguments(*arguments), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert not cache.exists()
    run(plan_arguments(*arguments))
    shown = capsys.readouterr().out
    assert all(name in shown for name in STORAGES)
    run(capture_arguments(*arguments))
    taken = describe(cache)
    assert (told["samples"], told["tokens"]) == (taken["samples"], taken["tokens"])
    assert told["storages"][storage]["bytes_per_token"] == pytest.approx(taken["bytes_per_token"], rel=0.3)
    assert told["storages"][storage]["bytes"] == round(told["storages"][storage]["bytes_per_token"] * told["tokens"])
    per_token = [told["storages"][name]["bytes_per_token"] for name in STORAGES]
    assert per_token == sorted(per_token, reverse=True)
    assert told["seconds"] == pytest.approx(told["tokens"] / told["tokens_per_second"])
    assert told["free_bytes"] > 0
    assert all(column["fits"] for column in told["storages"].values())


def test_a_capture_that_cannot_fit_does_not_start(data, llama_folder, tmp_path, capsys, monkeypatch):
    cache = tmp_path / "cache"
    arguments = (llama_folder, data, cache, "--compression", "none")
    tokens = sum(len(sample.input_ids) for sample in random_texts(60))
    needed = tokens * 2 * 3 * 32  # bfloat16, three layers of the tiny target
    with monkeypatch.context() as full:
        full.setattr(LocalFolder, "free_bytes", lambda _: needed - 1)
        with pytest.raises(CacheError, match=rf"{tokens:,} tokens need {needed:,} bytes .* {needed - 1:,} bytes are"):
            run(capture_arguments(*arguments))
        assert not cache.exists()
        run(capture_arguments(*arguments[:2], tmp_path / "packed", "--storage", "8bit"))  # as the message advises
        capsys.readouterr()
        run([*plan_arguments(*arguments), "--json"])
        assert not json.loads(capsys.readouterr().out)["storages"]["bfloat16"]["fits"]
        # Well compressed it may fit, so it may be tried.
        run(capture_arguments(llama_folder, data, tmp_path / "other"))
        full.setattr(LocalFolder, "free_bytes", lambda _: needed)
        run(capture_arguments(*arguments))
    monkeypatch.setattr(LocalFolder, "free_bytes", lambda _: 0)
    run(capture_arguments(*arguments))  # nothing is left to write
    assert len(FeatureCache(cache)) == 60


def test_a_plan_bears_samples_that_a_capture_would_quarantine(llama_folder, tmp_path, capsys):
    samples = random_texts(6)
    samples[2] = replace(samples[2], response_start=len(samples[2].input_ids) - 1)  # no place for a block
    data = write_texts(tmp_path / "data", llama_folder, samples)
    run([*plan_arguments(llama_folder, data, tmp_path / "cache"), "--json"])
    assert json.loads(capsys.readouterr().out)["samples"] == 6


def test_a_plan_for_tensor_parallelism_is_refused(data, llama_folder, tmp_path):
    arguments = plan_arguments(llama_folder, data, tmp_path / "cache", "--tensor-parallel-size", "2")
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, and a plan is made by one process"):
        run(arguments)
