"""Packed features: against a naive unpacking, the theory of quantisation, and through a cache into a batch."""

import math

import numpy as np
import pytest
import torch
from cache_helpers import HIDDEN, LAYERS, SHARD_SAMPLES, make_manifest, make_sample, shard_samples

from datamodules.loader import collate
from dflash_lightning.cache import FeatureCache, arrays, create_or_join
from dflash_lightning.cache.packing import GROUP, normal_levels, pack, packed_width, unpack
from dflash_lightning.cache.storage import STORAGES, packed_bits
from dflash_lightning.training.module import context_features

BITS = (8, 4, 2, 1)
# The least mean square error of 2**bits levels on a standard normal (Max 1960, table 1); for 8 bits Panter and Dite's
# limit for many levels, sqrt(3) pi / 2 / 4**bits.
LEAST_ERROR = {1: 0.3634, 2: 0.1175, 4: 0.009497, 8: math.sqrt(3) * math.pi / 2 / 4**8}


def unpack_naively(rows: torch.Tensor, channels: torch.Tensor, bits: int) -> np.ndarray:
    """Value by value in float64, from the description in docs/cache-format.md."""
    levels = normal_levels(bits).double().numpy()
    width = channels.shape[1]
    groups = math.ceil(width / 64)
    features = np.zeros((len(rows), width))
    for t, row in enumerate(rows.numpy()):
        for g in range(groups):
            scale = 2.0 ** ((int(row[len(row) - groups + g]) - 128) / 8)
            turned = []
            for j in range(64):
                place = (g * 64 + j) * bits
                turned.append(levels[(int(row[place // 8]) >> place % 8) & (2**bits - 1)] * scale)
            for c in range(g * 64, min(width, g * 64 + 64)):
                value = sum((-1) ** (c % 64 & j).bit_count() * turned[j] for j in range(64)) / 8
                features[t, c] = value * float(channels[1, c]) + float(channels[0, c])
    return features


def states(tokens: int, hidden_size: int, layers: int = 3, seed: int = 0) -> torch.Tensor:
    """Features as language models have them: channels of very different size and mean, a first token of huge values."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(tokens, layers, hidden_size, generator=generator)
    size = torch.exp(torch.randn(layers, hidden_size, generator=generator))
    features = features * size + 5 * torch.randn(layers, hidden_size, generator=generator) * size
    features[0, :, 3] = 3000.0
    return features.flatten(1).bfloat16()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("hidden_size", [64, 40])
def test_unpacking_follows_the_documented_layout(bits, hidden_size):
    packed = pack(states(5, hidden_size), bits, num_layers=3)
    assert packed.rows.shape == (5, packed_width(3 * hidden_size, bits))
    assert packed.rows.dtype == torch.uint8
    naive = unpack_naively(packed.rows, packed.channels, bits)
    np.testing.assert_allclose(unpack(packed).float().numpy(), naive, rtol=2**-8, atol=1e-5 * np.abs(naive).max())


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_the_best_for_a_normal_distribution(bits):
    levels = normal_levels(bits)
    torch.testing.assert_close(levels, -levels.flip(0))
    values = torch.randn(400_000, generator=torch.Generator().manual_seed(0))
    nearest = (values[:, None] - levels).abs().amin(dim=1) if bits < 8 else None
    if nearest is None:
        nearest = values - levels[torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)]
    assert nearest.pow(2).mean().item() == pytest.approx(LEAST_ERROR[bits], rel=0.03)


@pytest.mark.parametrize("bits", BITS)
def test_error_is_that_of_the_best_levels_whatever_the_channels_look_like(bits):
    features = states(2000, 128)
    error = (unpack(pack(features, bits, num_layers=3)).float() - features.float())[1:]
    size = features[1:].float().std(dim=0)
    relative = (error / size).pow(2).mean().item()
    # Rounding a group's scale to 9 % and bfloat16 itself add a little.
    assert relative == pytest.approx(LEAST_ERROR[bits], rel=0.1, abs=3e-4)


def test_massive_values_of_one_token_cost_the_others_nothing():
    features = states(500, 128)
    calm = features.clone()
    calm[0] = calm[1]
    with_massive, without = (unpack(pack(f, 4, num_layers=3))[1:].float() for f in (features, calm))
    error = (with_massive - features[1:].float()).norm(), (without - features[1:].float()).norm()
    assert error[0] == pytest.approx(error[1].item(), rel=0.02)
    first = unpack(pack(features, 4, num_layers=3))[0].float()
    assert (first - features[0].float()).norm() < 0.15 * features[0].float().norm()


def test_constant_channels_come_back():
    features = states(50, 64)
    features[:, 7] = 12.5
    assert bool((unpack(pack(features, 2, num_layers=3))[:, 7] == 12.5).all())
    alone = torch.full((4, GROUP), 2.5).bfloat16()
    torch.testing.assert_close(unpack(pack(alone, 2, num_layers=1)), alone)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_cache_of_any_storage_reaches_the_module(storage, tmp_path):
    writer = create_or_join(tmp_path, make_manifest(storage=storage, compression="zstd"))
    for shard in range(len(SHARD_SAMPLES)):
        writer.write_shard(shard, shard_samples(shard))
    cache = FeatureCache(tmp_path)
    indices = [0, 4, 9]  # of three shards
    samples = [cache.read(i) for i in indices]
    features = context_features(collate(samples, [np.array([0])] * 3, indices=range(3), anchors_in_step=3))
    bits = packed_bits(storage)
    for row, index in enumerate(indices):
        given = make_sample(index).features
        if bits is None:
            expected = given
        else:
            shard = next(s for s in range(4) if index < sum(SHARD_SAMPLES[: s + 1]))
            start = sum(SHARD_SAMPLES[:shard])
            together = torch.cat([make_sample(start + i).features for i in range(SHARD_SAMPLES[shard])])
            first = sum(len(make_sample(start + i).input_ids) for i in range(index - start))
            expected = unpack(pack(together, bits, len(LAYERS)))[first : first + len(given)]
        assert torch.equal(features[row, : len(given)], expected)
        assert features.shape[2] == len(LAYERS) * HIDDEN


def test_chunks_are_even_and_small(monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 1000)
    for rows, expected in ((7, 7), (10, 10), (11, 6), (20, 10), (21, 7), (1, 1)):
        assert arrays.chunk_rows(np.zeros((rows, 100), dtype=np.uint8), "zstd") == expected
    assert arrays.chunk_rows(np.zeros((3, 4000), dtype=np.uint8), "none") == 1
    for rows, expected in ((1, 1), (32, 32), (33, 17), (1000, 32)):
        assert arrays.chunk_rows(np.zeros((rows, 4000), dtype=np.uint16), "lz4") == expected
