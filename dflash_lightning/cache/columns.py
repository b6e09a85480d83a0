"""The arrays of a shard, made from its samples."""

from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import torch

from dflash_lightning.cache.arrays import CHANNELS, FEATURES
from dflash_lightning.cache.manifest import CacheManifest
from dflash_lightning.cache.packing import normal_levels, pack
from dflash_lightning.cache.samples import Sample, count_anchor_candidates, feature_bits
from dflash_lightning.cache.storage import packed_bits


def shard_columns(
    samples: list[Sample], manifest: CacheManifest, device: torch.device | str = "cpu"
) -> dict[str, np.ndarray]:
    """The arrays of a shard by name: token-wise ones, a sample after the other, and where each sample begins.

    Args:
        samples: the stored samples of the shard, one at least.
        manifest: of the cache.
        device: where features are packed.
    """
    features = torch.cat([sample.features for sample in samples])
    names = [sample.sample_id.encode() for sample in samples]
    columns = {
        "input_ids": np.concatenate([sample.input_ids for sample in samples]),
        "loss_mask": np.concatenate([sample.loss_mask for sample in samples]),
        "offsets": _offsets(len(sample.input_ids) for sample in samples),
        "sample_ids": np.frombuffer(b"".join(names), dtype=np.uint8),
        "sample_id_offsets": _offsets(map(len, names)),
        "anchor_candidates": np.array(
            [count_anchor_candidates(sample.loss_mask) for sample in samples], dtype=np.int32
        ),
    }
    bits = packed_bits(manifest.storage)
    if bits is None:
        return {FEATURES: feature_bits(features), **columns}
    packed = pack(features, bits, len(manifest.target_layer_ids), device)
    return {FEATURES: packed.rows.numpy(), CHANNELS: packed.channels.numpy(), **columns}


def feature_attributes(manifest: CacheManifest) -> dict:
    """What a reader without this package needs to make features of the stored rows."""
    bits = packed_bits(manifest.storage)
    levels = {} if bits is None else {"levels": normal_levels(bits).tolist()}
    return {"storage": manifest.storage, **levels}


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    return np.array([0, *accumulate(lengths)], dtype=np.int64)
