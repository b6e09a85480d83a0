"""`cache bench` compares like with like, and leaves nothing behind."""

import json
import re

import numpy as np
import pytest
from cache_helpers import capture

from dflash_lightning.cache import FeatureCache, bench, bench_reading
from dflash_lightning.cache.bench_command import bench as bench_command
from dflash_lightning.errors import CacheError, ConfigError


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "cache"
    capture(folder)
    return folder


def test_all_ways_read_the_same_bytes(cache_folder, tmp_path):
    cache = FeatureCache(cache_folder)
    chosen = [7, 0, 4]
    copies = bench._Copies(tmp_path, map(cache.read, chosen))
    for number, index in enumerate(chosen):
        expected = bench._columns(cache.read(index))
        for found in (copies.read_memmap(number), copies.read_torch_file(number)):
            for values, column in zip(found, expected, strict=True):
                np.testing.assert_array_equal(values.numpy(), column)


def test_figures_fit_each_other_and_the_copies_are_removed(cache_folder, tmp_path, capsys):
    result = bench_reading(cache_folder, samples=6, scratch=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert result["samples"] == 6
    assert result["bytes"] == result["tokens"] * (3 * 24 * 2 + 4 + 1)
    assert result["cache"]["ratio"] == 1
    for way in ("cache", "memmap", "torch_files"):
        speed = result[way]
        assert speed["tokens_per_second"] / speed["samples_per_second"] == pytest.approx(result["tokens"] / 6)
        assert speed["mb_per_second"] / speed["samples_per_second"] == pytest.approx(result["bytes"] / 6e6)
    bench_command(str(cache_folder), json=True, scratch=tmp_path)
    assert json.loads(capsys.readouterr().out).keys() == result.keys()
    bench_command(str(cache_folder), scratch=tmp_path)
    assert re.search(r"numpy.memmap.*x as fast", capsys.readouterr().out)


def test_the_samples_are_bounded(cache_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "MAX_BYTES", 1000)
    assert bench_reading(cache_folder, samples=6, scratch=tmp_path)["samples"] == 1


def test_too_little_space_and_no_samples_are_refused(cache_folder, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="samples is 0"):
        bench_reading(cache_folder, samples=0)
    monkeypatch.setattr(bench, "RESERVE", 1 << 60)
    with pytest.raises(CacheError, match=r"the copies need [\d,]+ bytes in .*, but [\d,]+ are free"):
        bench_reading(cache_folder, scratch=tmp_path)
    assert list(tmp_path.iterdir()) == []
