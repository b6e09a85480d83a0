"""What a capture leaves out, what it refuses, and what a cache says of how it was made."""

import json
import os
from dataclasses import replace

import pytest
import torch
from cache_helpers import stored_files
from capture_helpers import capture_arguments, random_texts, write_texts

from dflash_lightning.cache import CacheManifest, FeatureCache, describe, open_store, verify
from dflash_lightning.capture import command as capture_module
from dflash_lightning.cli import run
from dflash_lightning.errors import CacheError, ConfigError

VOCAB = 272


@pytest.fixture
def spoilt(tmp_path, llama_folder, monkeypatch):
    """40 texts of which five can't be stored, each for another reason; and why."""
    samples = random_texts(40)
    samples[3] = replace(samples[3], input_ids=[*samples[3].input_ids[:-1], VOCAB])
    samples[4] = replace(samples[4], response_start=len(samples[4].input_ids) + 2)
    samples[11] = replace(samples[11], response_start=len(samples[11].input_ids) - 1)
    samples[12] = replace(samples[12], input_ids=[], response_start=0)
    marked = samples[20].input_ids[:2]
    compute = capture_module.compute_features

    def broken(target, input_ids, *rest):
        features = compute(target, input_ids, *rest).clone()
        for row, ids in enumerate(input_ids.tolist()):
            if ids[:2] == marked:
                features[row, 1, 40] = float("inf")
        return features

    monkeypatch.setattr(capture_module, "compute_features", broken)
    reasons = {
        "text-3": "1 token ids are outside the target's vocabulary of 272, first 272",
        "text-4": "lengths differ",
        "text-11": "no place for a training block",
        "text-12": "it has no tokens",
        "text-20": "1 features are NaN or infinite, first at token 1, layer 3",
    }
    return write_texts(tmp_path / "data", llama_folder, samples), reasons


def test_what_cannot_be_stored_is_left_out_counted_and_shown(spoilt, llama_folder, tmp_path, capsys):
    data, reasons = spoilt
    cache = tmp_path / "cache"
    run(capture_arguments(llama_folder, data, cache, "--max-quarantined", "0.125"))
    shown = capsys.readouterr().out
    assert "5 samples quarantined" in shown
    told = describe(cache)
    assert (told["samples_planned"], told["samples"], told["samples_quarantined"]) == (40, 35, 5)
    assert {sample["sample_id"] for sample in told["quarantined"]} == set(reasons)
    for sample in told["quarantined"]:
        assert sample["reason"].startswith(reasons[sample["sample_id"]])
        assert f"sample {sample['sample_id']!r}: {sample['reason']}" in shown
    run(["cache", "info", str(cache)])
    shown = capsys.readouterr().out
    assert all(name in shown for name in reasons)
    run(["cache", "info", str(cache), "--json"])
    assert json.loads(capsys.readouterr().out) == told
    assert verify(cache) == []
    expected = [f"text-{i}" for i in range(40) if f"text-{i}" not in reasons]
    assert list(FeatureCache(cache).sample_ids) == expected


def test_too_many_of_them_stop_the_capture_and_it_goes_on_when_more_are_allowed(spoilt, llama_folder, tmp_path):
    data, _ = spoilt
    cache = tmp_path / "cache"
    with pytest.raises(CacheError, match=r"of 40 planned samples can't be stored; max_quarantined allows 0\.05"):
        run(capture_arguments(llama_folder, data, cache, "--max-quarantined", "0.05"))
    stopped = describe(cache)
    assert 0 < stopped["shards_committed"] < stopped["shards_planned"]
    assert stopped["samples_quarantined"] <= 2
    kept = {path: path.stat().st_mtime_ns for path in cache.glob("shards/*/COMMITTED")}
    run(capture_arguments(llama_folder, data, cache, "--max-quarantined", "0.125"))
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in cache.glob("shards/*/COMMITTED")}.items()
    assert describe(cache)["samples"] == 35
    # The bound is no part of the cache's identity, but it is kept by every run.
    with pytest.raises(CacheError, match="5 of 40 planned samples"):
        run(capture_arguments(llama_folder, data, cache))
    with pytest.raises(ConfigError, match=r"max_quarantined is 1\.5"):
        run(capture_arguments(llama_folder, data, cache, "--max-quarantined", "1.5"))


@pytest.fixture
def texts(tmp_path, llama_folder):
    return write_texts(tmp_path / "data", llama_folder, random_texts(12))


def test_a_renamed_target_and_moved_data_go_on(texts, llama_folder, tmp_path):
    cache, moved, renamed = tmp_path / "cache", tmp_path / "elsewhere", tmp_path / "renamed"
    run(capture_arguments(llama_folder, texts, cache))
    before = stored_files(cache)
    os.rename(texts, moved)
    renamed.symlink_to(llama_folder)
    victim = next(cache.glob("shards/000001"))
    for file in sorted(victim.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    victim.rmdir()
    run(capture_arguments(renamed, moved, cache))
    assert stored_files(cache) == before
    assert verify(cache) == []


@pytest.mark.parametrize(
    ("setting", "value", "field"),
    [
        ("--num-threads", "2", "capture.num_threads: cache has 1, this run has 2"),
        ("--dtype", "float32", "capture.dtype: cache has bfloat16, this run has float32"),
        ("--batch-tokens", "64", "capture.batch_tokens: cache has 100, this run has 64"),
        ("--target-layer-ids", "[1, 3, 2]", "target_layer_ids: cache has [1, 3, 4], this run has [1, 3, 2]"),
        ("--limit", "5", "shard_samples: cache has 12 samples in"),
    ],
)
def test_settings_that_change_the_bits_are_refused(texts, llama_folder, tmp_path, setting, value, field):
    threads = torch.get_num_threads()
    run(capture_arguments(llama_folder, texts, tmp_path / "cache"))
    before = stored_files(tmp_path / "cache")
    with pytest.raises(CacheError) as caught:
        run(capture_arguments(llama_folder, texts, tmp_path / "cache", setting, value))
    torch.set_num_threads(threads)
    assert field in str(caught.value)
    assert stored_files(tmp_path / "cache") == before


def test_the_manifest_says_how_the_features_were_made(texts, llama_folder, tmp_path):
    torch.set_num_threads(2)  # as a launcher may have it
    run(capture_arguments(llama_folder, texts, tmp_path / "cache"))
    assert torch.get_num_threads() == 1
    manifest = CacheManifest.load(open_store(tmp_path / "cache"))
    assert manifest.generation == {"mode": "chat"}
    assert manifest.capture["device"] == "cpu"
    assert manifest.source == {"target": str(llama_folder), "data": str(texts)}
    assert manifest.max_length == max(len(sample.input_ids) for sample in random_texts(12))
