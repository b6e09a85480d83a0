"""A cache at a glance."""

from dataclasses import asdict
from pathlib import Path

from dflash_lightning.cache.location import open_store
from dflash_lightning.cache.manifest import CacheManifest
from dflash_lightning.cache.shards import load_markers
from dflash_lightning.cache.space import feature_row_bytes
from dflash_lightning.cache.store import CacheStore


def describe(cache: str | Path | CacheStore) -> dict:
    """Sum up a cache, finished or not, from its manifest and markers. The answer can be written as JSON.

    Returns:
        path, complete, shards_committed, shards_planned, samples, samples_planned, samples_quarantined, quarantined
        (shard, sample_id and reason of each), tokens, bytes (stored),
        bytes_per_token (None without a token), bfloat16_bytes_per_token (of unpacked features), and every field of the
        manifest but `shard_samples`.

    Raises:
        CacheError: no cache there, or its manifest or a marker is damaged.
    """
    store = open_store(cache)
    manifest = CacheManifest.load(store)
    found = load_markers(store, range(manifest.num_shards), manifest)
    markers = [marker for marker in found if marker is not None]
    tokens = sum(marker.rows for marker in markers)
    num_bytes = sum(marker.num_bytes for marker in markers)
    identity = {field: value for field, value in asdict(manifest).items() if field != "shard_samples"}
    return {
        "path": store.location,
        "complete": len(markers) == manifest.num_shards,
        "shards_committed": len(markers),
        "shards_planned": manifest.num_shards,
        "samples": sum(marker.samples for marker in markers),
        "samples_planned": manifest.num_samples,
        "samples_quarantined": sum(len(marker.quarantined) for marker in markers),
        "quarantined": [
            {"shard": marker.shard, **asdict(sample)} for marker in markers for sample in marker.quarantined
        ],
        "tokens": tokens,
        "bytes": num_bytes,
        "bytes_per_token": num_bytes / tokens if tokens else None,
        "bfloat16_bytes_per_token": feature_row_bytes("bfloat16", manifest.feature_width),
        **identity,
        "target_layer_ids": list(manifest.target_layer_ids),
    }
