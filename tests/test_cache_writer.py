"""Many writers, any failure: the finished cache is the same, and what can't be stored is refused by name."""

import errno
import multiprocessing
import os
import random
import time

import pytest
import torch
from cache_helpers import (
    SHARD_SAMPLES,
    capture,
    capture_killed_at,
    capture_slowly,
    faults_beside_index,
    make_manifest,
    make_sample,
    shard_samples,
    stored_files,
)
from zarr.storage import LocalStore

from dflash_lightning.cache import FeatureCache, TargetIdentity, create_or_join
from dflash_lightning.cache import writer as writer_module
from dflash_lightning.errors import CacheError

# Children come from a clean process that has imported torch and zarr already: they start in milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["dflash_lightning.cache"])


def start(function, *args):
    process = PROCESSES.Process(target=function, args=args)
    process.start()
    return process


def finish(*processes) -> list[int]:
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> dict[str, bytes]:
    """The files of an uninterrupted capture by one process."""
    folder = tmp_path_factory.mktemp("reference") / "cache"
    capture(folder)
    assert faults_beside_index(folder) == []
    return stored_files(folder)


@pytest.mark.parametrize("world", [2, 4])
def test_writers_at_once_make_the_same_bytes(tmp_path, reference, world):
    folder = tmp_path / "cache"
    assert finish(*(start(capture, folder, rank, world) for rank in range(world))) == [0] * world
    assert stored_files(folder) == reference
    assert faults_beside_index(folder) == []


def join_with(path, barrier, results, mode):
    manifest = make_manifest(generation={"mode": mode})
    barrier.wait()
    try:
        create_or_join(path, manifest)
        results.put((mode, None))
    except CacheError as error:
        results.put((mode, str(error)))


def test_of_different_manifests_one_wins_and_the_others_are_told(tmp_path):
    barrier, results = PROCESSES.Barrier(4), PROCESSES.Queue()
    processes = [start(join_with, tmp_path / "cache", barrier, results, mode) for mode in "aabb"]
    told = [results.get(timeout=60) for _ in processes]
    assert finish(*processes) == [0] * 4
    winner = next(mode for mode, error in told if error is None)
    assert sorted(mode for mode, error in told if error is None) == [winner] * 2
    (loser,) = {mode for mode, _ in told} - {winner}
    for mode, error in told:
        if mode == loser:
            assert f"generation.mode: cache has {winner}, this run has {loser}" in error
    assert sorted(file.name for file in (tmp_path / "cache").iterdir()) == [
        "manifest.copy.json",
        "manifest.json",
    ]


# Steps 0 to 3 create the manifest, 4 to 7 its copy, step 8 syncs the new folder `shards`; then each shard takes 7 while
# zarr writes, 31 to sync, and 6 to commit (47 to 52 in the first one: marker, its folder, rename, parent folder, rename
# of the marker, its folder).
@pytest.mark.parametrize("step", [0, 1, 2, 3, 4, 6, 7, 8, 9, 14, 24, 47, 48, 49, 50, 51, 52, 53, 96, 184])
def test_killed_at_any_step_then_resumed(tmp_path, reference, step):
    folder = tmp_path / "cache"
    assert finish(start(capture_killed_at, folder, step)) == [-9]
    if (folder / "manifest.json").exists():
        committed = len(list(folder.glob("shards/*/COMMITTED")))
        faults = [fault for fault in faults_beside_index(folder) if fault.shard is not None]
        assert len(faults) == len(SHARD_SAMPLES) - committed, "a committed shard isn't whole"
    capture(folder)
    assert stored_files(folder) == reference
    assert faults_beside_index(folder) == []


def test_killed_at_random_moments_with_changing_writer_counts(tmp_path, reference):
    folder = tmp_path / "cache"
    moments = random.Random(0)
    committed = set()

    def unfinished() -> set:
        return set(folder.glob("shards/.tmp-*"))

    for world in (1, 3, 2, 1, 4):
        left_before = unfinished()
        processes = [start(capture_slowly, folder, rank, world) for rank in range(world)]
        while unfinished() <= left_before and any(process.is_alive() for process in processes):
            time.sleep(0.002)
        time.sleep(moments.uniform(0.0, 0.25))
        for process in processes:
            process.kill()
        finish(*processes)
        now = {marker: marker.stat().st_mtime_ns for marker in folder.glob("shards/*/COMMITTED")}.items()
        assert committed <= now, "a committed shard was written again"
        committed = set(now)
    capture(folder)
    assert stored_files(folder) == reference
    assert faults_beside_index(folder) == []


def test_leftovers_of_the_own_shard_only_are_swept(tmp_path):
    writer = create_or_join(tmp_path, make_manifest())
    shards = tmp_path / "shards"
    mine = [shards / ".tmp-000001-0-77", shards / ".tmp-000001-3-1", shards / "000001"]
    others = [shards / ".tmp-000002-0-77", shards / "000003"]
    for leftover in mine + others:
        (leftover / "features").mkdir(parents=True)
    assert not writer.is_committed(1)
    assert writer.sweep(1) == [leftover.relative_to(tmp_path).as_posix() for leftover in mine]
    assert sorted(shards.iterdir()) == sorted(others)
    writer.write_shard(1, shard_samples(1))
    assert writer.is_committed(1)
    assert writer.sweep(1) == []
    with pytest.raises(
        CacheError, match=r"shards/000001 of .* being written by another process as well; run one capture"
    ):
        writer.write_shard(1, shard_samples(1))


@pytest.mark.parametrize("moment", ["removed", "emptied", "renamed"])
def test_a_second_writer_of_one_shard_is_noticed(tmp_path, monkeypatch, moment):
    """Another process sweeps, or finishes, the shard that this one is writing."""
    writer, rival = (create_or_join(tmp_path, make_manifest(), rank=rank) for rank in (0, 1))
    write_arrays = writer_module.write_arrays

    def interrupted(folder, *args, **kwargs):
        write_arrays(folder, *args, **kwargs)
        monkeypatch.setattr(writer_module, "write_arrays", write_arrays)
        if moment == "renamed":
            os.rename(folder, tmp_path / "aside")
            rival.write_shard(0, shard_samples(0))
            os.rename(tmp_path / "aside", folder)
        else:
            rival.sweep(0)
            if moment == "emptied":
                folder.mkdir()

    monkeypatch.setattr(writer_module, "write_arrays", interrupted)
    with pytest.raises(CacheError, match=r"shards/000000 of .* another process"):
        writer.write_shard(0, shard_samples(0))
    assert list((tmp_path / "shards").glob(".tmp-*")) == []
    assert writer.is_committed(0) == (moment == "renamed")


def test_each_differing_field_is_listed_with_both_values(tmp_path):
    create_or_join(tmp_path, make_manifest())
    other = make_manifest(
        target=TargetIdentity("big", "main", "x" * 64, "t" * 64, "c" * 64),
        target_layer_ids=(1, 4),
        hidden_size=32,
        generation={"mode": "sample", "thinking": False, "temperature": 0.7},
        capture={"dtype": "bfloat16", "device": "cuda", "num_threads": 1},
        dataset_sha256="e" * 64,
        max_length=100,
        source={},
        code_version="0.2.0",
        shard_samples=(5,) * 20,
    )
    with pytest.raises(CacheError) as caught:
        create_or_join(tmp_path, other)
    listed = [line.strip() for line in str(caught.value).splitlines()[1:-1]]
    assert listed == [
        "target.name: cache has tiny, this run has big",
        f"target.weights_sha256: cache has {'w' * 64}, this run has {'x' * 64}",
        "target_layer_ids: cache has [1, 4, 2], this run has [1, 4]",
        "hidden_size: cache has 24, this run has 32",
        "generation.mode: cache has greedy, this run has sample",
        "generation.max_new_tokens: cache has 64, this run has nothing",
        "capture.device: cache has cpu, this run has cuda",
        f"dataset_sha256: cache has {'d' * 64}, this run has {'e' * 64}",
        "max_length: cache has 512, this run has 100",
        "shard_samples: cache has 10 samples in 4 shards (3, 1, 4, 2), "
        "this run has 100 samples in 20 shards (5, 5, 5, 5, 5, 5, 5, 5, ...)",
        "generation.temperature: cache has nothing, this run has 0.7",
    ]


def test_where_things_came_from_is_free_to_change(tmp_path):
    """A renamed target, data that moved, a newer version: the same cache goes on, its manifest stays as it was."""
    create_or_join(tmp_path, make_manifest()).write_shard(0, shard_samples(0))
    before = (tmp_path / "manifest.json").read_bytes()
    target = TargetIdentity("renamed", "v2", "w" * 64, "t" * 64, "c" * 64)
    writer = create_or_join(tmp_path, make_manifest(target=target, source={}, code_version="0.2.0"))
    assert writer.is_committed(0)
    writer.write_shard(1, shard_samples(1))
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_a_folder_that_is_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CacheError, match=r"not empty and has no manifest\.json; found thesis\.tex"):
        create_or_join(tmp_path, make_manifest())
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shard_samples": ()}, "at least one sample"),
        ({"shard_samples": (2, 0)}, "no empty shard"),
        ({"target_layer_ids": ()}, "at least one layer"),
        ({"hidden_size": 0}, "positive hidden size"),
        ({"storage": "float8"}, "float8"),
    ],
)
def test_unusable_manifests_are_refused(changes, words):
    with pytest.raises(CacheError, match=words):
        make_manifest(**changes)


def test_the_planned_number_of_samples_is_required(tmp_path):
    writer = create_or_join(tmp_path, make_manifest())
    with pytest.raises(CacheError, match="shard 000000: 2 samples given, the manifest plans 3"):
        writer.write_shard(0, [make_sample(0), make_sample(1)])


def full_disk(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def full_store(*_args, **_kwargs):
    full_disk()


@pytest.mark.parametrize("when", ["zarr writes", "sync", "rename"])
def test_no_space_left(tmp_path, monkeypatch, when):
    writer = create_or_join(tmp_path, make_manifest())
    writer.write_shard(0, shard_samples(0))
    with monkeypatch.context() as patched:
        if when == "zarr writes":
            patched.setattr(LocalStore, "set", full_store)
        else:
            patched.setattr(os, {"sync": "fsync", "rename": "rename"}[when], full_disk)
        with pytest.raises(CacheError, match=r"no space left in .*: up to [\d,]+ bytes needed, [\d,]+ bytes free") as e:
            writer.write_shard(1, shard_samples(1))
    assert "committed so far are kept" in str(e.value)
    assert [entry.name for entry in (tmp_path / "shards").iterdir()] == ["000000"]
    capture(tmp_path)
    assert faults_beside_index(tmp_path) == []
    assert torch.equal(FeatureCache(tmp_path).read(3).features, make_sample(3).features)


def test_no_space_for_the_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(CacheError, match="no space left"):
        create_or_join(tmp_path / "cache", make_manifest())
    assert list((tmp_path / "cache").iterdir()) == []
