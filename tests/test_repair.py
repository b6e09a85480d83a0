"""`cache verify --repair` rebuilds what is damaged, nothing else, and only from what the cache was made from."""

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cache_helpers import capture, stored_files
from capture_helpers import capture_arguments, random_texts, write_texts
from test_distributed import TORCHRUN

from dflash_lightning.cache import CacheManifest, FeatureCache, open_store, verify, write_index
from dflash_lightning.cache.shards import ShardMarker
from dflash_lightning.capture import repair
from dflash_lightning.cli import run
from dflash_lightning.errors import CacheError, ConfigError, DataError


@pytest.fixture(scope="module")
def made(tmp_path_factory, llama_folder):
    """A folder with the target, the data and a cache of 9 shards made from them."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(llama_folder, folder / "target")
    write_texts(folder / "data", folder / "target", random_texts(18))
    run(capture_arguments(folder / "target", folder / "data", folder / "cache", "--storage", "4bit"))
    return folder


@pytest.fixture
def cache(made, tmp_path) -> Path:
    return shutil.copytree(made / "cache", tmp_path / "cache")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[random.Random(file.name).randrange(len(data))] ^= 1
    file.write_bytes(data)


def marker_times(cache: Path) -> dict[str, int]:
    return {file.parent.name: file.stat().st_mtime_ns for file in cache.glob("shards/*/COMMITTED")}


def damage_everywhere(cache: Path) -> set[str]:
    """All kinds of damage; returns the broken shards."""
    flip(cache / "manifest.json")
    flip(cache / "index")
    flip(cache / "shards/000000/COMMITTED")
    (cache / "shards/000001/COMMITTED").unlink()
    flip(cache / "shards/000002/features/c/0/0")
    (cache / "shards/000003/input_ids/c/0").unlink()
    os.truncate(cache / "shards/000004/offsets/zarr.json", 5)
    shutil.rmtree(cache / "shards/000005")
    return {f"{shard:06d}" for shard in range(6)}


def test_everything_that_is_damaged_is_rebuilt_and_nothing_else(made, cache, capsys):
    before = marker_times(cache)
    broken = damage_everywhere(cache)
    run(["cache", "verify", str(cache), "--repair"])
    shown = capsys.readouterr().out
    assert "8 faults repaired; every object is there" in shown
    assert stored_files(cache) == stored_files(made / "cache")
    assert verify(cache) == []
    now = marker_times(cache)
    assert {shard for shard in now if now[shard] != before[shard]} == broken
    FeatureCache(cache).read(0)


def rewrite_manifest(cache: Path, **capture_settings) -> None:
    """Make it a cache of the same shards that another capture made."""
    store = open_store(cache)
    manifest = CacheManifest.load(store)
    changed = replace(manifest, capture=manifest.capture | capture_settings)
    for name in ("manifest.json", "manifest.copy.json"):
        store.replace(name, changed.dump())
    for shard in range(manifest.num_shards):
        marker = replace(ShardMarker.load(store, shard, manifest), identity_sha256=changed.identity_sha256)
        store.replace(f"shards/{shard:06d}/COMMITTED", marker.dump())
    write_index(store)


def test_a_repair_that_fails_midway_leaves_an_incomplete_cache(made, cache, monkeypatch):
    flip(cache / "shards/000002/features/c/0/0")

    def dies(*_):
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(repair, "write_missing_shards", dies)
        with pytest.raises(RuntimeError, match="killed"):
            run(["cache", "verify", str(cache), "--repair"])
    with pytest.raises(CacheError, match="8 of 9 shards are committed"):
        FeatureCache(cache)
    run(["cache", "verify", str(cache), "--repair"])
    assert stored_files(cache) == stored_files(made / "cache")


def test_a_missing_index_is_made_by_a_repair(made, cache, capsys):
    (cache / "index").unlink()
    with pytest.raises(CacheError, match=r": 1 fault\. Add --repair"):
        run(["cache", "verify", str(cache)])
    run(["cache", "verify", str(cache), "--repair"])
    assert "1 fault repaired" in capsys.readouterr().out
    assert stored_files(cache) == stored_files(made / "cache")


@pytest.fixture
def quarantining(tmp_path, llama_folder) -> Path:
    """A cache of which a sixth is quarantined."""
    samples = random_texts(18)
    for sample in samples[:3]:
        sample.input_ids[0] = 10**6
    data = write_texts(tmp_path / "data", llama_folder, samples)
    run(capture_arguments(llama_folder, data, tmp_path / "quarantining", "--max-quarantined", "0.5"))
    return tmp_path / "quarantining"


def test_what_is_quarantined_already_is_no_obstacle_to_a_repair(quarantining):
    before = stored_files(quarantining)
    flip(quarantining / "shards/000006/features/c/0/0")
    flip(quarantining / "shards/000000/zarr.json")
    run(["cache", "verify", str(quarantining), "--repair"])
    assert stored_files(quarantining) == before


def test_more_quarantined_samples_than_known_name_the_setting(quarantining):
    before = stored_files(quarantining)
    flip(quarantining / "shards/000000/COMMITTED")
    with pytest.raises(CacheError, match=r"allow more with --max-quarantined, and run the same command again"):
        run(["cache", "verify", str(quarantining), "--repair"])
    run(["cache", "verify", str(quarantining), "--repair", "--max-quarantined", "0.5"])
    assert stored_files(quarantining) == before


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (
            {"tensor_parallel_size": 2, "device": "cuda"},
            CacheError,
            r"captured by 2 processes .* torchrun with --tensor-parallel-size 2: shards/000002 shards/000005$",
        ),
        pytest.param(
            {"device": "cuda"},
            ConfigError,
            r"captured on cuda, and this machine has only cpu.* Run the repair on a machine with such a device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_one_process_here_cannot_rebuild_is_refused_before_anything_is_removed(cache, settings, error, words):
    rewrite_manifest(cache, **settings)
    for shard in (2, 5):
        flip(cache / f"shards/{shard:06d}/features/c/0/0")
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    with pytest.raises(error, match=words):
        run(["cache", "verify", str(cache), "--repair"])
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == files


def test_without_both_manifests_the_advice_is_no_circle(cache):
    flip(cache / "manifest.json")
    flip(cache / "manifest.copy.json")
    with pytest.raises(CacheError, match=r"both damaged or missing.* run the same capture command with a new folder"):
        run(["cache", "verify", str(cache), "--repair"])


def test_an_unfinished_capture_is_summed_up(cache, capsys):
    for shard in (1, 4, 5):
        shutil.rmtree(cache / f"shards/{shard:06d}")
    (cache / "index").unlink()
    with pytest.raises(CacheError, match=r": 3 of 9 shards aren't committed: run the same capture command again\.$"):
        run(["cache", "verify", str(cache)])
    told = capsys.readouterr()
    assert told.out == ""
    assert "verify: 9/9" in told.err


def test_verification_alone_changes_nothing_and_prints_one_json_object(cache, capsys):
    damage_everywhere(cache)
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    with pytest.raises(CacheError, match=r"6 faults, and 2 of 9 shards aren't committed\. .*add --repair"):
        run(["cache", "verify", str(cache), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [(fault["shard"], fault["object"]) for fault in told["faults"]] == [
        (None, "manifest.json"),
        (0, "COMMITTED"),
        (1, "COMMITTED"),
        (2, "features/c/0/0"),
        (3, "input_ids/c/0"),
        (4, "offsets/zarr.json"),
        (5, "COMMITTED"),
        (None, "index"),
    ]
    assert told["repaired"] == []
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == files
    run(["cache", "verify", str(cache), "--json", "--repair"])
    again = json.loads(capsys.readouterr().out)
    assert (again["faults"], again["repaired"]) == ([], told["faults"])


def test_a_target_and_data_that_moved_are_named(made, cache, tmp_path):
    flip(cache / "shards/000002/features/c/0/0")
    moved = shutil.copytree(made, tmp_path / "moved")
    os.rename(made / "data", made / "gone")
    try:
        with pytest.raises(DataError, match="holds no prepared data"):
            run(["cache", "verify", str(cache), "--repair"])
        assert len(verify(cache)) == 1
        places = ["--target", str(moved / "target"), "--data", str(moved / "data")]
        run(["cache", "verify", str(cache), "--repair", *places])
    finally:
        os.rename(made / "gone", made / "data")
    assert stored_files(cache) == stored_files(made / "cache")


def test_other_data_and_another_target_are_refused_before_anything_is_removed(made, cache, qwen3_folder, tmp_path):
    flip(cache / "shards/000002/features/c/0/0")
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    other = write_texts(tmp_path / "other", made / "target", random_texts(18, seed=4))
    repair = ["cache", "verify", str(cache), "--repair"]
    with pytest.raises(CacheError, match="dataset_sha256: cache has"):
        run([*repair, "--data", str(other)])
    with pytest.raises(DataError, match="was prepared with target"):
        run([*repair, "--target", str(qwen3_folder)])
    others = write_texts(tmp_path / "others", qwen3_folder, random_texts(18))
    with pytest.raises(CacheError, match=r"target\.weights_sha256: cache has"):
        run([*repair, "--target", str(qwen3_folder), "--data", str(others)])
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == files


def test_a_repair_is_done_by_one_process(cache, monkeypatch):
    flip(cache / "shards/000002/features/c/0/0")
    for name, value in {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="one process"):
        run(["cache", "verify", str(cache), "--repair"])
    assert len(verify(cache)) == 1


def test_a_cache_that_another_producer_wrote_cannot_be_rebuilt_by_capture(tmp_path):
    capture(tmp_path)
    write_index(tmp_path)
    flip(tmp_path / "shards/000002/features/c/0/0")
    with pytest.raises(CacheError, match="wasn't made by `capture`"):
        run(["cache", "verify", str(tmp_path), "--repair"])
    assert len(verify(tmp_path)) == 1
