"""200 objects with a flipped byte, 20 truncated, 20 deleted: each one is found, and no read returns a wrong value."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_helpers import make_manifest, make_sample

from dflash_lightning.cache import FeatureCache, create_or_join, verify, write_index
from dflash_lightning.errors import CacheError

NUM_SHARDS, SAMPLES_IN_SHARD = 20, 3
DAMAGES = ["flip"] * 200 + ["truncate"] * 20 + ["delete"] * 20


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("integrity") / "cache"
    writer = create_or_join(folder, make_manifest(shard_samples=(SAMPLES_IN_SHARD,) * NUM_SHARDS))
    for shard in range(NUM_SHARDS):
        writer.write_shard(shard, [make_sample(number) for number in members(shard)])
    write_index(folder)
    return folder


@pytest.fixture(scope="module")
def single_shards(cache_folder, tmp_path_factory) -> list[Path]:
    """The same files as caches of one shard each and no index, so that all that the index is made from is read."""
    folders = []
    for shard in range(NUM_SHARDS):
        folder = tmp_path_factory.mktemp("single")
        (folder / "manifest.json").symlink_to(cache_folder / "manifest.json")
        (folder / "shards").mkdir()
        (folder / f"shards/{shard:06d}").symlink_to(cache_folder / f"shards/{shard:06d}")
        folders.append(folder)
    return folders


def members(shard: int) -> range:
    return range(shard * SAMPLES_IN_SHARD, (shard + 1) * SAMPLES_IN_SHARD)


def damage(file: Path, kind: str, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if kind == "delete":
        file.unlink()
    elif kind == "truncate":
        file.write_bytes(data[: draw.randrange(len(data))])
    else:
        data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
        file.write_bytes(data)


def check_refusal(error: CacheError, shard: int, name: str) -> None:
    if not (name == "COMMITTED" and "0 of 20 shards are committed" in str(error)):
        assert f"shard {shard:06d}, object {name}: " in str(error)


def open_and_read(folder: Path, shard: int, name: str) -> None:
    """Opening a cache of one shard is refused, or its samples are read."""
    try:
        cache = FeatureCache(folder, require_complete=False)
    except CacheError as error:
        check_refusal(error, shard, name)
        return
    assert list(cache.sample_ids) == [make_sample(number).sample_id for number in members(shard)]
    read_whatever_can_be_read(cache, 0, shard, name)


def read_whatever_can_be_read(cache: FeatureCache, first: int, shard: int, name: str) -> None:
    """Every sample of a shard is either refused, with the damaged object's name, or exactly what was stored."""
    for index, number in enumerate(members(shard), start=first):
        try:
            stored = cache.read(index)
        except CacheError as error:
            check_refusal(error, shard, name)
            continue
        expected = make_sample(number)
        assert torch.equal(stored.features.view(torch.uint16), expected.features.view(torch.uint16))
        np.testing.assert_array_equal(stored.input_ids, expected.input_ids)
        np.testing.assert_array_equal(stored.loss_mask, expected.loss_mask)


@pytest.mark.slow
def test_240_damaged_objects_are_all_found(cache_folder, single_shards):
    """In rounds: one object of each shard at a time."""
    draw = random.Random(240)
    kinds = draw.sample(DAMAGES, len(DAMAGES))
    remaining = []
    for shard in range(NUM_SHARDS):
        files = sorted(path for path in (cache_folder / f"shards/{shard:06d}").rglob("*") if path.is_file())
        remaining.append(draw.sample(files, len(files)))
    damaged = 0
    while kinds:
        originals, expected = {}, []
        for shard in range(NUM_SHARDS):
            file = remaining[shard].pop()
            name = file.relative_to(cache_folder / f"shards/{shard:06d}").as_posix()
            originals[file] = file.read_bytes()
            damage(file, kinds.pop(), draw)
            expected.append((shard, name))
        faults = verify(cache_folder)
        assert [(fault.shard, fault.object) for fault in faults] == expected
        by_index = FeatureCache(cache_folder)
        for shard, name in expected:
            open_and_read(single_shards[shard], shard, name)
            read_whatever_can_be_read(by_index, shard * SAMPLES_IN_SHARD, shard, name)
        for file, content in originals.items():
            file.write_bytes(content)
        damaged += len(expected)
    assert damaged == 240
    assert verify(cache_folder) == []
