"""The index object says what the shards say, is never trusted damaged or stale, and is all that opening needs."""

import os
import pickle
import random
import shutil
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_helpers import SHARD_SAMPLES, capture, make_manifest, make_sample, shard_samples
from torch.utils.data import DataLoader

from datamodules.loader import MicroBatchDataset
from datamodules.sampler import MicroBatch
from dflash_lightning.cache import Fault, FeatureCache, create_or_join, verify, write_index
from dflash_lightning.cache.index import INDEX, SampleIndex, id_hash
from dflash_lightning.cache.store import TEMPORARY_PREFIX, LocalFolder
from dflash_lightning.errors import CacheError

COLUMNS = ("id_hashes", "lengths", "anchor_candidates", "shards")


@pytest.fixture(scope="module")
def indexed_cache(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("indexed") / "cache"
    capture(folder)
    assert write_index(folder)
    return folder


@pytest.fixture
def cache_folder(indexed_cache, tmp_path) -> Path:
    return shutil.copytree(indexed_cache, tmp_path / "cache")


def test_the_stored_index_says_what_the_shards_say(cache_folder):
    by_index = FeatureCache(cache_folder)
    (cache_folder / INDEX).unlink()
    by_shards = FeatureCache(cache_folder)
    for cache in (by_index, by_shards):
        assert list(cache.sample_ids) == [make_sample(i).sample_id for i in range(10)]
        assert cache.id_hashes.tolist() == [id_hash(make_sample(i).sample_id.encode()) for i in range(10)]
        assert cache.shards.tolist() == [0] * 3 + [1] + [2] * 4 + [3] * 2
        for i in range(10):
            assert torch.equal(cache.read(i).features, make_sample(i).features)
    assert (by_index.complete, by_index.num_bytes) == (by_shards.complete, by_shards.num_bytes)
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(by_index, column), getattr(by_shards, column))


def test_opening_reads_nothing_but_manifest_and_index(cache_folder):
    shutil.move(cache_folder / "shards", cache_folder / "elsewhere")
    cache = FeatureCache(cache_folder)
    assert cache.complete
    assert len(cache) == 10
    with pytest.raises(CacheError, match="shard 000001, object COMMITTED: it is missing"):
        cache.read(3)
    shutil.move(cache_folder / "elsewhere", cache_folder / "shards")
    assert cache.read(3).sample_id == cache.sample_ids[3]


def test_ids_are_a_sequence(indexed_cache):
    ids = FeatureCache(indexed_cache).sample_ids
    assert (ids[0], ids[-1], ids[2:4]) == ("prüfung-0", "prüfung-9", ["prüfung-2", "prüfung-3"])
    for outside in (10, -11):
        with pytest.raises(IndexError):
            ids[outside]


def test_any_damage_to_the_index_is_found(cache_folder):
    whole = (cache_folder / INDEX).read_bytes()
    positions = random.Random(3)
    damaged = [whole[:k] + bytes([whole[k] ^ 4]) + whole[k + 1 :] for k in positions.sample(range(len(whole)), 60)]
    for data in [*damaged, whole[:-1], whole + b"\0", whole[:40]]:
        (cache_folder / INDEX).write_bytes(data)
        with pytest.raises(
            CacheError, match=r"object index: damaged: [^.]*\. Run `[^`]* cache verify [^`]* --repair`$"
        ):
            FeatureCache(cache_folder)
        (fault,) = verify(cache_folder)
        assert (fault.shard, fault.object) == (None, INDEX)
        assert "index" not in fault.what
        assert "--repair" not in fault.what
    assert write_index(cache_folder)
    assert (cache_folder / INDEX).read_bytes() == whole


def test_a_finished_cache_without_an_index_is_a_fault(cache_folder):
    (cache_folder / INDEX).unlink()
    assert verify(cache_folder) == [Fault(None, INDEX, "it is missing, though all shards are committed")]


def test_removing_a_shard_withdraws_the_index(cache_folder):
    """However the removal ends, the cache doesn't open as a whole one."""
    writer = create_or_join(cache_folder, make_manifest())
    writer.remove(2)
    with pytest.raises(CacheError, match="3 of 4 shards are committed"):
        FeatureCache(cache_folder)
    assert [fault.object for fault in verify(cache_folder)] == ["COMMITTED"]
    writer.write_shard(2, shard_samples(2))
    assert [fault.object for fault in verify(cache_folder)] == [INDEX]
    assert write_index(cache_folder)
    assert verify(cache_folder) == []


def rewrite_shard(folder: Path, shard: int, samples) -> None:
    shutil.rmtree(folder / "shards" / f"{shard:06d}")
    create_or_join(folder, make_manifest()).write_shard(shard, samples)


def test_a_shard_written_anew_with_the_same_samples_leaves_the_index_current(cache_folder):
    rewrite_shard(cache_folder, 2, shard_samples(2))
    assert verify(cache_folder) == []
    assert torch.equal(FeatureCache(cache_folder).read(5).features, make_sample(5).features)


def test_a_stale_index_is_found_before_a_wrong_sample_is_read(cache_folder):
    rewrite_shard(cache_folder, 2, [make_sample(i + 100) for i in range(4)])
    cache = FeatureCache(cache_folder)
    assert torch.equal(cache.read(3).features, make_sample(3).features)
    for i in range(4, 8):
        with pytest.raises(CacheError, match=r"shard 000002 of .* was written anew after the cache was indexed"):
            cache.read(i)
    (fault,) = verify(cache_folder)
    assert str(fault) == "object index: it is older than shard 000002"
    assert write_index(cache_folder)
    assert verify(cache_folder) == []
    assert torch.equal(FeatureCache(cache_folder).read(5).features, make_sample(101).features)


def test_the_index_of_another_cache_is_refused(cache_folder, tmp_path):
    create_or_join(tmp_path / "other", make_manifest(dataset_sha256="e" * 64))
    shutil.copy(cache_folder / INDEX, tmp_path / "other" / INDEX)
    with pytest.raises(CacheError, match="object index: it belongs to another cache"):
        FeatureCache(tmp_path / "other")


def test_an_unfinished_cache_gets_no_index(tmp_path):
    writer = create_or_join(tmp_path, make_manifest())
    for shard in range(len(SHARD_SAMPLES)):
        assert not write_index(tmp_path)
        assert not (tmp_path / INDEX).exists()
        writer.write_shard(shard, shard_samples(shard))
    assert write_index(tmp_path)


def test_several_processes_may_write_it_at_once(cache_folder):
    expected = (cache_folder / INDEX).read_bytes()
    (cache_folder / INDEX).unlink()
    context = get_context("fork")
    writers = [context.Process(target=write_index, args=(cache_folder,)) for _ in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
        assert process.exitcode == 0
    assert (cache_folder / INDEX).read_bytes() == expected


def test_a_parsed_index_is_the_dumped_one():
    random_numbers = np.random.default_rng(0)
    for samples in ((), (3,), (4, 0, 9), (1,) * 7):
        total = sum(samples)
        names = [f"ü{i}" * (i % 5) for i in range(total)]
        index = SampleIndex(
            identity_sha256="i" * 64,
            num_bytes=2**40,
            id_hashes=random_numbers.integers(0, 2**64, total, dtype=np.uint64),
            id_offsets=np.cumsum([0, *(len(name.encode()) for name in names)]),
            lengths=random_numbers.integers(2, 99, total, dtype=np.int32),
            anchor_candidates=random_numbers.integers(1, 99, total, dtype=np.int32),
            shard_samples=np.array(samples, dtype=np.int32),
            sources=random_numbers.integers(0, 255, (len(samples), 32), dtype=np.uint8),
            ids=np.frombuffer("".join(names).encode(), dtype=np.uint8),
        )
        parsed = SampleIndex.parse(index.dump())
        for name, values in vars(index).items():
            np.testing.assert_array_equal(getattr(parsed, name), values)
            assert getattr(getattr(parsed, name), "dtype", None) == getattr(values, "dtype", None)
        assert list(parsed.sample_ids) == names
        starts = parsed.starts().tolist()
        rows = np.split(parsed.lengths, np.cumsum(samples)[:-1]) if samples else []
        assert starts == [end - length for part in rows for end, length in zip(np.cumsum(part), part, strict=True)]
        assert all(a <= b for a, b in pairwise(parsed.shards().tolist()))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_data_workers_read_without_an_index(cache_folder, method):
    """What a worker gets is small and doesn't need the index, which only the process that plans holds."""
    cache = FeatureCache(cache_folder)
    cache.read(0)
    os.unlink(cache_folder / INDEX)
    dataset = MicroBatchDataset(cache.reader, num_anchors=4, seed=0)
    assert len(pickle.dumps(dataset)) < 5_000
    plan = [MicroBatch((i, 9 - i), (cache.locate(i), cache.locate(9 - i)), 0, 8) for i in range(10)]
    loader = DataLoader(
        dataset, batch_size=None, sampler=plan, num_workers=1, multiprocessing_context=method, timeout=120
    )
    for i, batch in enumerate(loader):
        for row, sample in enumerate((make_sample(i), make_sample(9 - i))):
            tokens = len(sample.input_ids)
            assert batch["input_ids"][row, :tokens].tolist() == sample.input_ids.tolist()
            assert torch.equal(batch["features"][row, :tokens], sample.features)


def test_writing_leaves_no_temporary_file(cache_folder):
    assert not [name for name in LocalFolder(cache_folder).entries() if name.startswith(TEMPORARY_PREFIX)]
