"""What is stored comes back bit for bit, through the reader and through plain zarr."""

import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from cache_helpers import HIDDEN, LAYERS, SHARD_SAMPLES, capture, make_manifest, make_sample, shard_samples

from dflash_lightning.cache import (
    CacheManifest,
    FeatureCache,
    Sample,
    count_anchor_candidates,
    create_or_join,
    describe,
    open_store,
    verify,
)
from dflash_lightning.cache.packing import unpack
from dflash_lightning.cache.records import dump_record
from dflash_lightning.errors import CacheError

FORMAT_PAGE = Path(__file__).parent.parent / "docs" / "cache-format.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", FORMAT_PAGE.read_text(), flags=re.DOTALL)
NUM_SAMPLES = sum(SHARD_SAMPLES)


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("format") / "cache"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(folder)
    return folder


def test_round_trip_is_bit_exact(cache_folder):
    cache = FeatureCache(cache_folder)
    assert len(cache) == NUM_SAMPLES
    assert cache.complete
    for i in range(NUM_SAMPLES):
        stored, given = cache.read(i), make_sample(i)
        assert stored.sample_id == given.sample_id
        for column in ("input_ids", "loss_mask"):
            np.testing.assert_array_equal(getattr(stored, column), getattr(given, column), strict=True)
        assert stored.features.dtype == torch.bfloat16
        assert torch.equal(stored.features.view(torch.uint16), given.features.view(torch.uint16))


def test_every_finite_bfloat16_survives(tmp_path):
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    values = bits[torch.isfinite(bits.view(torch.bfloat16))].view(torch.bfloat16)
    features = values[: len(values) // 72 * 72].reshape(-1, 72)
    tokens = len(features)
    sample = Sample("all", np.zeros(tokens, np.int32), np.ones(tokens, np.uint8), features)
    create_or_join(tmp_path, make_manifest(shard_samples=(1,))).write_shard(0, [sample])
    stored = FeatureCache(tmp_path).read(0)
    assert torch.equal(stored.features.view(torch.uint16), features.view(torch.uint16))
    assert not stored.input_ids.any()


def test_index(cache_folder):
    cache = FeatureCache(cache_folder)
    samples = [make_sample(i) for i in range(NUM_SAMPLES)]
    assert list(cache.sample_ids) == [sample.sample_id for sample in samples]
    assert cache.lengths.dtype == np.int32
    assert cache.lengths.tolist() == [len(sample.input_ids) for sample in samples]
    assert cache.anchor_candidates.tolist() == [count_anchor_candidates(sample.loss_mask) for sample in samples]
    assert cache.num_tokens == sum(len(sample.input_ids) for sample in samples)
    objects = [f for f in (cache_folder / "shards").rglob("*") if f.is_file() and f.name != "COMMITTED"]
    assert cache.num_bytes == sum(f.stat().st_size for f in objects)
    with pytest.raises(IndexError, match="sample 10 of a cache with 10"):
        cache.read(NUM_SAMPLES)


def test_read_samples_belong_to_the_caller(cache_folder):
    cache = FeatureCache(cache_folder)
    first = cache.read(0)
    first.input_ids[:] = 0
    first.loss_mask[:] = 0
    first.features[:] = 0
    again, given = cache.read(0), make_sample(0)
    np.testing.assert_array_equal(again.input_ids, given.input_ids)
    np.testing.assert_array_equal(again.loss_mask, given.loss_mask)
    assert torch.equal(again.features, given.features)


def test_documented_snippet_reads_the_cache(cache_folder, tmp_path, monkeypatch, capsys):
    snippet, _ = SNIPPETS
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 10
    (tmp_path / "CACHE").symlink_to(cache_folder)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(snippet, str(FORMAT_PAGE), "exec"), {})
    printed = capsys.readouterr().out
    assert [i for i in range(NUM_SAMPLES) if f"prüfung-{i} " in printed] == list(range(NUM_SAMPLES))
    last = make_sample(NUM_SAMPLES - 1)
    assert str(last.features.float().mean().item()) in printed


@pytest.mark.parametrize("storage", ["8bit", "4bit", "2bit", "1bit"])
def test_documented_snippet_unpacks(storage, tmp_path, monkeypatch):
    writer = create_or_join(tmp_path / "CACHE", make_manifest(storage=storage, compression="zstd"))
    for shard in range(len(SHARD_SAMPLES)):
        writer.write_shard(shard, shard_samples(shard))
    _, snippet = SNIPPETS
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(snippet, str(FORMAT_PAGE), "exec"), names)
    cache = FeatureCache(tmp_path / "CACHE")
    ours = torch.cat([unpack(cache.read(i).features) for i in range(SHARD_SAMPLES[0])])
    np.testing.assert_allclose(names["features"], ours.float().numpy(), rtol=2**-8, atol=1e-5)


def test_layout_is_the_documented_one(cache_folder):
    shard = cache_folder / "shards" / "000002"
    group = zarr.open_group(shard, mode="r")
    features = group["features"]
    tokens = sum(len(sample.input_ids) for sample in shard_samples(2))
    assert features.shape == (tokens, len(LAYERS) * HIDDEN)
    assert (features.dtype, features.fill_value) == (np.uint16, 0xFFFF)
    rows = features.chunks[0]
    assert features.chunks == (rows, len(LAYERS) * HIDDEN)
    assert rows <= 32 < 2 * rows
    assert features.attrs["storage"] == "bfloat16"
    (sharding,) = json.loads((shard / "features/zarr.json").read_text())["codecs"]
    _, blosc, checksum = sharding["configuration"]["codecs"]
    expected = {"cname": "lz4", "shuffle": "bitshuffle", "typesize": 2}
    assert {key: blosc["configuration"][key] for key in expected} == expected
    assert checksum["name"] == "crc32c"
    documented = set(re.findall(r"^ +(\w+)/ +zarr\.json +(c/[0/]+)\b.*$", FORMAT_PAGE.read_text(), flags=re.MULTILINE))
    documented -= {("channels", "c/0/0")}  # packed features only
    names = {f"{name}/{file}" for name, data in documented for file in ("zarr.json", data)} | {"zarr.json", "COMMITTED"}
    assert {file.relative_to(shard).as_posix() for file in shard.rglob("*") if file.is_file()} == names


def test_manifest_round_trip_and_damage(tmp_path):
    manifest = make_manifest(max_length=100)
    store = open_store(tmp_path)
    assert manifest.create(store)
    assert not make_manifest().create(store)
    assert CacheManifest.load(store) == manifest
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]
    file = tmp_path / "manifest.json"
    whole = file.read_bytes()
    assert b"hidden_states[i + 1]" in whole
    for position in range(0, len(whole), 7):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(CacheError, match=r"manifest\.json"):
            CacheManifest.load(store)


def test_another_format_version_is_named(tmp_path):
    (tmp_path / "manifest.json").write_bytes(dump_record({"format_version": 7, "something": "new"}))
    with pytest.raises(CacheError, match="format version 7; this version reads 2"):
        FeatureCache(tmp_path)


@pytest.mark.parametrize("path", ["absent", "file"])
def test_not_a_cache(tmp_path, path):
    (tmp_path / "file").touch()
    for opening in (FeatureCache, verify, describe):
        with pytest.raises(CacheError, match=f"{path} is not a feature cache"):
            opening(tmp_path / path)


def test_describe(cache_folder, tmp_path):
    told = describe(cache_folder)
    cache = FeatureCache(cache_folder)
    assert json.loads(json.dumps(told)) == told
    assert told["complete"]
    assert (told["samples"], told["tokens"], told["bytes"]) == (NUM_SAMPLES, cache.num_tokens, cache.num_bytes)
    assert told["bytes_per_token"] == cache.num_bytes / cache.num_tokens
    assert told["target_layer_ids"] == list(LAYERS)
    assert told["generation"]["mode"] == "greedy"
    make_manifest().create(open_store(tmp_path))
    told = describe(tmp_path)
    assert (told["complete"], told["shards_committed"], told["shards_planned"]) == (False, 0, 4)
    assert told["bytes_per_token"] is None
