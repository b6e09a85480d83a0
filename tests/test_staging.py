"""Copies of remote shards on this machine: within the limit, never removed while in use, whole or not there at all."""

import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cache_helpers import SHARD_SAMPLES, capture, make_manifest, make_sample
from faulty_server import FaultyProxy, faulty_s3

from dflash_lightning.cache import CacheStore, FeatureCache, ObjectStoreSettings, StagingSettings, open_store
from dflash_lightning.cache.locks import FileLock
from dflash_lightning.cache.shards import ShardMarker
from dflash_lightning.cache.staging import SUBFOLDER, StagingArea, copy_key
from dflash_lightning.errors import CacheError, ConfigError

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["dflash_lightning.cache"])


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyProxy]:
    with faulty_s3("features") as proxy:
        yield proxy


@pytest.fixture(scope="module")
def store(server) -> CacheStore:
    store = open_store("s3://features/cache", ObjectStoreSettings(endpoint=server.url, timeout=2.0))
    capture(store)
    return store


@pytest.fixture(scope="module")
def markers(store) -> list[ShardMarker]:
    return [ShardMarker.load(store, shard, make_manifest()) for shard in range(len(SHARD_SAMPLES))]


def area_of(folder: Path, max_bytes: int, patience: float = 0.0) -> StagingArea:
    return StagingArea(StagingSettings(folder=folder, max_gb=max_bytes / 1e9, patience=patience))


def use(area: StagingArea, store: CacheStore, marker: ShardMarker) -> None:
    with area.pinned(store, marker) as copy:
        assert {file.relative_to(copy).as_posix() for file in copy.rglob("*") if file.is_file()} == set(marker.objects)


def staged(area: StagingArea) -> set[str]:
    return {path.name for path in area.folder.iterdir() if path.is_dir()}


def stored_bytes(folder: Path) -> int:
    """Bytes of all files that are there; those that vanish meanwhile don't count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def test_a_shard_is_downloaded_once(store, server, markers, tmp_path):
    area = area_of(tmp_path / "staging", 10**9)
    server.requests.clear()
    for _ in range(3):
        use(area, store, markers[0])
    assert server.count("GET", "000000/features/c/0/0") == 1
    assert staged(area) == {copy_key(markers[0])}


def test_the_longest_unused_makes_room(store, markers, tmp_path):
    sizes = [marker.num_bytes for marker in markers]
    area = area_of(tmp_path, sizes[0] + sizes[1] + sizes[3])
    for shard in (0, 1, 3):
        use(area, store, markers[shard])
        time.sleep(0.01)
    use(area, store, markers[0])
    use(area, store, markers[2])
    # Shard 2 needs more than shard 1 had: shard 3 went too, shard 0 only if both weren't enough.
    kept = {0, 2} if sizes[1] + sizes[3] >= sizes[2] else {2}
    assert staged(area) == {copy_key(markers[shard]) for shard in kept}
    assert stored_bytes(tmp_path) <= area.settings.max_bytes


def test_what_is_in_use_stays(store, markers, tmp_path):
    sizes = [marker.num_bytes for marker in markers]
    area = area_of(tmp_path, max(sizes[0] + sizes[1], sizes[0] + sizes[3]))
    with area.pinned(store, markers[0]) as copy:
        before = sorted(copy.rglob("*"))
        for shard in (1, 3, 1):
            use(area, store, markers[shard])
        assert sorted(copy.rglob("*")) == before
        with (
            area.pinned(store, markers[1]),
            pytest.raises(CacheError, match=r"000003 has [\d,]+ bytes and finds no room .* in use take [\d,]+ of"),
        ):
            use(area, store, markers[3])
    use(area, store, markers[3])


def test_what_others_keep_in_the_folder_stays(store, markers, tmp_path):
    area = area_of(tmp_path, max(markers[0].num_bytes, markers[1].num_bytes))
    key = copy_key(markers[0])
    strangers = ["checkpoint-1000", ".tmp-build-7", "models", key]
    alike = ["checkpoint-1000", ".tmp-build-7", "models", f"{key}.old", f"old-{key}", key[1:], f".tmp-.tmp-{key}"]
    kept = [tmp_path / name for name in strangers] + [area.folder / name for name in alike]
    for folder in kept:
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"precious")
    for shard in (0, 1, 0):
        use(area, store, markers[shard])
    assert staged(area) == {key, *alike}
    assert [(folder / "weights").read_bytes() for folder in kept] == [b"precious"] * len(kept)
    assert {path.name for path in tmp_path.iterdir()} == {*strangers, SUBFOLDER}


def test_no_copy_is_renamed_while_another_process_counts(store, markers, tmp_path, monkeypatch):
    area = area_of(tmp_path, max(markers[0].num_bytes, markers[1].num_bytes))
    rename, seen = Path.rename, []

    def watched(path, target):
        lock = FileLock(area.folder / "area.lock")
        seen.append(lock.acquire(shared=True, wait=False))
        if seen[-1]:
            lock.release()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watched)
    for shard in (0, 1):
        use(area, store, markers[shard])
    assert seen == [False] * 3, "two copies finished, one removed, and nobody else could have counted"


def test_a_limit_below_one_shard_is_refused(store, markers, tmp_path):
    area = area_of(tmp_path, markers[2].num_bytes - 1)
    with pytest.raises(CacheError, match=rf"000002 has {markers[2].num_bytes:,} bytes, the staging area .* Raise"):
        use(area, store, markers[2])
    use(area, store, markers[1])


@pytest.mark.parametrize("changes", [{"max_gb": 0}, {"patience": -1}])
def test_unusable_settings_are_refused(tmp_path, changes):
    with pytest.raises(ConfigError, match="expected more than 0 gigabytes"):
        StagingSettings(**{"folder": tmp_path, "max_gb": 1, **changes})


def test_a_shard_made_anew_is_another_copy(markers):
    other = ShardMarker(
        **{**vars(markers[0]), "objects": {**markers[0].objects, "zarr.json": markers[1].objects["zarr.json"]}}
    )
    assert copy_key(other) != copy_key(markers[0])


def test_a_damaged_copy_is_named(store, tmp_path):
    cache = FeatureCache(store, staging=StagingSettings(folder=tmp_path, max_gb=1))
    cache.read(0)
    (copy,) = (path for path in (tmp_path / SUBFOLDER).iterdir() if path.is_dir())
    file = copy / "features/c/0/0"
    data = file.read_bytes()
    file.write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    with pytest.raises(CacheError, match=rf"shard 000000, object features/c/0/0: .* in the staged copy {copy}"):
        cache.read(0)
    file.write_bytes(data[:-1])
    with pytest.raises(CacheError, match=rf"in the staged copy {copy}"):
        FeatureCache(store, staging=StagingSettings(folder=tmp_path, max_gb=1)).read(0)


def read_at_random(store: CacheStore, settings: StagingSettings, seed: int, count: int) -> None:
    """Read `count` samples in random order and compare each with what was captured."""
    cache = FeatureCache(store, staging=settings)
    for index in random.Random(seed).choices(range(len(cache)), k=count):
        assert torch.equal(cache.read(index).features, make_sample(index).features)


def start(function, *args):
    process = PROCESSES.Process(target=function, args=args)
    process.start()
    return process


@pytest.mark.slow
def test_processes_share_one_download(store, server, tmp_path):
    server.requests.clear()
    settings = StagingSettings(folder=tmp_path, max_gb=1)
    processes = [start(read_at_random, store, settings, seed, 60) for seed in range(3)]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert [server.count("GET", f"00000{shard}/features/c/0/0") for shard in range(4)] == [1, 1, 1, 1]


@pytest.mark.slow
def test_processes_share_a_limit_and_are_killed(store, server, markers, tmp_path):
    """Three readers with room for the largest shard and one more; one of them is killed again and again."""
    settings = area_of(tmp_path, markers[2].num_bytes + markers[3].num_bytes, patience=60).settings
    steady = [start(read_at_random, store, settings, seed, 60) for seed in range(2)]
    moments, largest = random.Random(0), 0
    for round_ in range(6):
        done = sum(server.count("GET", f"00000{shard}/features/c/0/0") for shard in range(4))
        doomed = start(read_at_random, store, settings, 100 + round_, 10_000)
        more = moments.randrange(1, 12)
        while sum(server.count("GET", f"00000{shard}/features/c/0/0") for shard in range(4)) < done + more:
            largest = max(largest, stored_bytes(tmp_path))
        doomed.kill()
        doomed.join(60)
    for process in steady:
        process.join(120)
    assert [process.exitcode for process in steady] == [0, 0]
    assert 0 < largest <= settings.max_bytes
    read_at_random(store, settings, 7, 20)
    assert not [path for path in (tmp_path / SUBFOLDER).iterdir() if path.name.startswith(".tmp-")]


def download_part(store: CacheStore, area: StagingArea, marker: ShardMarker) -> None:
    use(area, store, marker)


def test_a_killed_download_leaves_no_harm(store, server, markers, tmp_path):
    fault = server.add("stall", "GET", "000002/features/c/0/0", times=1)
    area = area_of(tmp_path, markers[2].num_bytes + markers[1].num_bytes)
    process = start(download_part, store, area, markers[2])
    while not fault.done:
        time.sleep(0.01)
    process.kill()
    process.join(60)
    (left,) = staged(area)
    assert left.startswith(".tmp-")
    # Who needs another shard removes what is left, since its size still counts; who needs the same one starts again.
    use(area, store, markers[3])
    assert staged(area) == {copy_key(markers[3])}
    use(area, store, markers[2])
