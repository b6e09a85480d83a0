"""No damaged object is read as if it were data, and the reader works in any kind of data worker."""

import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from cache_helpers import (
    HIDDEN,
    LAYERS,
    SHARD_SAMPLES,
    capture,
    faults_beside_index,
    make_manifest,
    make_sample,
    shard_samples,
)
from torch.utils.data import DataLoader, Dataset

from dflash_lightning.cache import (
    Fault,
    FeatureCache,
    TargetIdentity,
    create_or_join,
    open_store,
    restore_manifest,
    sample_reader,
    verify,
    write_index,
)
from dflash_lightning.cache.arrays import fill_values, objects_of
from dflash_lightning.errors import CacheError

SHARD = 2
FIRST_SAMPLE = sum(SHARD_SAMPLES[:SHARD])
TARGET = make_manifest().target


@pytest.fixture(scope="module")
def sound_cache(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "cache"
    capture(folder)
    return folder


@pytest.fixture
def cache_folder(sound_cache, tmp_path) -> Path:
    return shutil.copytree(sound_cache, tmp_path / "cache")


def read_all(folder: Path) -> None:
    cache = FeatureCache(folder)
    for i in range(len(cache)):
        cache.read(i)


def remove(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[random.Random(file.as_posix()).randrange(len(data))] ^= 0x10
    file.write_bytes(data)


@pytest.mark.parametrize("name", sorted(objects_of(fill_values("bfloat16"))))
@pytest.mark.parametrize("damage", [remove, truncate, empty, flip])
def test_each_damaged_object_is_found(cache_folder, damage, name):
    damage(cache_folder / "shards" / f"{SHARD:06d}" / name)
    (fault,) = faults_beside_index(cache_folder)
    assert (fault.shard, fault.object) == (SHARD, name)
    assert f"shard 000002, object {name}: " in str(fault)
    if name == "zarr.json":
        return  # the group's metadata: nothing that the reader uses
    with pytest.raises(CacheError, match=f"shard 000002, object {name}: ") as caught:
        read_all(cache_folder)
    assert str(caught.value).count("cache verify") == 1


@pytest.mark.parametrize("damage", [truncate, empty, flip])
def test_a_damaged_marker_is_found(cache_folder, damage):
    damage(cache_folder / "shards/000002/COMMITTED")
    (fault,) = faults_beside_index(cache_folder)
    assert (fault.shard, fault.object) == (SHARD, "COMMITTED")
    with pytest.raises(CacheError, match="shard 000002, object COMMITTED"):
        FeatureCache(cache_folder)
    with pytest.raises(CacheError, match="shard 000002, object COMMITTED"):
        create_or_join(cache_folder, make_manifest()).is_committed(SHARD)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.copy.json"])
@pytest.mark.parametrize("damage", [remove, truncate, empty, flip])
def test_a_damaged_manifest_is_found_and_restored(cache_folder, damage, name):
    sound = (cache_folder / name).read_bytes()
    damage(cache_folder / name)
    (fault,) = faults_beside_index(cache_folder)
    assert (fault.shard, fault.object) == (None, name)
    assert str(fault).startswith(f"object {name}: ")
    if name == "manifest.json":
        with pytest.raises(CacheError, match=r"manifest\.json"):
            FeatureCache(cache_folder)
        with pytest.raises(CacheError, match=r"manifest\.json.*cache verify .* --repair"):
            create_or_join(cache_folder, make_manifest())
    restore_manifest(open_store(cache_folder))
    assert (cache_folder / name).read_bytes() == sound
    assert faults_beside_index(cache_folder) == []


def test_without_a_manifest_and_its_copy_nothing_can_be_judged(cache_folder):
    flip(cache_folder / "manifest.json")
    remove(cache_folder / "manifest.copy.json")
    for attempt in (faults_beside_index, lambda folder: restore_manifest(open_store(folder))):
        with pytest.raises(
            CacheError, match=r"both damaged or missing.* run the same capture command with a new f"
        ) as e:
            attempt(cache_folder)
        assert "--repair" not in str(e.value)


def test_a_shard_in_another_shards_place_is_found(cache_folder):
    shutil.rmtree(cache_folder / "shards/000001")
    shutil.copytree(cache_folder / "shards/000002", cache_folder / "shards/000001")
    with pytest.raises(CacheError, match=r"shard 000001, object COMMITTED: it belongs to shard 000002"):
        FeatureCache(cache_folder)
    assert "belongs to shard 000002" in str(faults_beside_index(cache_folder))


def test_a_shard_of_another_cache_is_found(cache_folder, tmp_path):
    """The same plan and the same samples, but another dtype: nothing in the shard itself is damaged."""
    other = create_or_join(tmp_path / "other", make_manifest(capture={"dtype": "float32"}))
    other.write_shard(1, shard_samples(1))
    shutil.rmtree(cache_folder / "shards/000001")
    shutil.copytree(tmp_path / "other/shards/000001", cache_folder / "shards/000001")
    with pytest.raises(CacheError, match=r"shard 000001, object COMMITTED: it belongs to another cache"):
        FeatureCache(cache_folder)
    (fault,) = faults_beside_index(cache_folder)
    assert (fault.shard, fault.object) == (1, "COMMITTED")


def test_many_flips_of_single_bytes_in_the_features(cache_folder):
    file = cache_folder / "shards/000002/features/c/0/0"
    whole = file.read_bytes()
    positions = random.Random(1)
    for _ in range(50):
        position = positions.randrange(len(whole))
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(CacheError, match=r"shard 000002, object features/c/0/0: its content is damaged"):
            read_all(cache_folder)


@pytest.mark.parametrize("damage", [truncate, empty])
def test_an_object_that_shrinks_while_in_use(cache_folder, damage):
    cache = FeatureCache(cache_folder)
    cache.read(FIRST_SAMPLE)
    damage(cache_folder / "shards/000002/features/c/0/0")
    with pytest.raises(CacheError, match=r"shard 000002, object features/c/0/0"):
        cache.read(FIRST_SAMPLE)


def test_an_object_that_is_removed_while_in_use_stays_what_it_was(cache_folder):
    cache = FeatureCache(cache_folder)
    cache.read(FIRST_SAMPLE)
    remove(cache_folder / "shards/000002/features/c/0/0")
    assert torch.equal(cache.read(FIRST_SAMPLE).features, make_sample(FIRST_SAMPLE).features)


def test_an_incomplete_cache_is_refused_unless_asked_for(tmp_path):
    writer = create_or_join(tmp_path, make_manifest())
    with pytest.raises(CacheError, match="0 of 4 shards"):
        FeatureCache(tmp_path, require_complete=False)
    for shard in (0, 2):
        writer.write_shard(shard, shard_samples(shard))
    (tmp_path / "shards/000003").mkdir()
    with pytest.raises(CacheError, match=r"2 of 4 shards are committed; finish it with the same capture command"):
        FeatureCache(tmp_path)
    cache = FeatureCache(tmp_path, require_complete=False)
    assert not cache.complete
    assert list(cache.sample_ids) == [s.sample_id for shard in (0, 2) for s in shard_samples(shard)]
    assert torch.equal(cache.read(4).features, make_sample(5).features)
    missing = "it is missing: the shard was not committed"
    assert faults_beside_index(tmp_path) == [Fault(1, "COMMITTED", missing), Fault(3, "COMMITTED", missing)]


def test_verify_reports_progress(cache_folder):
    steps = []
    write_index(cache_folder)
    assert verify(cache_folder, lambda: steps.append("shard")) == []
    assert steps == ["shard"] * 4


def test_what_fits_is_accepted(sound_cache):
    cache = FeatureCache(sound_cache)
    cache.check_compatible(TARGET, LAYERS, HIDDEN)
    cache.check_compatible(None, list(LAYERS), HIDDEN)
    moved = TargetIdentity("/elsewhere/tiny", "", *list(vars(TARGET).values())[2:])
    cache.check_compatible(moved, LAYERS, HIDDEN)


def test_what_does_not_fit_is_listed(sound_cache):
    other = TargetIdentity("big", "main", "x" * 64, "t" * 64, "y" * 64)
    with pytest.raises(CacheError) as caught:
        FeatureCache(sound_cache).check_compatible(other, (1, 2, 4), 32)
    assert [line.strip() for line in str(caught.value).splitlines()[1:-1]] == [
        "target_layer_ids: cache has [1, 4, 2], this run has [1, 2, 4]",
        "hidden_size: cache has 24, this run has 32",
        "target.name: cache has tiny, this run has big",
        f"target.weights_sha256: cache has {'w' * 64}, this run has {'x' * 64}",
        f"target.chat_template_sha256: cache has {'c' * 64}, this run has {'y' * 64}",
    ]


class Rows(Dataset):
    def __init__(self, cache: FeatureCache):
        self.cache = cache

    def __len__(self):
        return len(self.cache)

    def __getitem__(self, index):
        sample = self.cache.read(index)
        return sample.sample_id, torch.from_numpy(sample.input_ids), sample.features, os.getpid()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_data_workers(sound_cache, method):
    cache = FeatureCache(sound_cache)
    cache.read(0)  # a handle is open when the workers start
    workers = 1 if method == "spawn" else 2
    loader = DataLoader(Rows(cache), batch_size=None, num_workers=workers, multiprocessing_context=method, timeout=120)
    seen = list(loader)
    assert [row[0] for row in seen] == list(cache.sample_ids)
    assert len({row[3] for row in seen} - {os.getpid()}) == workers
    for i, (_, ids, features, _) in enumerate(seen):
        given = make_sample(i)
        assert ids.tolist() == given.input_ids.tolist()
        assert torch.equal(features, given.features)


def test_pickling_drops_open_shards(sound_cache):
    cache = FeatureCache(sound_cache)
    before = len(pickle.dumps(cache))
    cache.read(0)
    data = pickle.dumps(cache)
    assert len(data) == before
    assert torch.equal(pickle.loads(data).read(0).features, make_sample(0).features)


def test_the_number_of_open_shards_is_bounded(sound_cache, monkeypatch):
    monkeypatch.setattr(sample_reader, "MAX_OPEN_SHARDS", 2)
    cache = FeatureCache(sound_cache)
    for i in [*range(len(cache)), 0, 9, 4]:
        assert torch.equal(cache.read(i).features, make_sample(i).features)
    assert list(cache.reader._open_shards) == [3, 2]
