"""A full scan of a cache: every byte against the checksums taken when it was written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_lightning.cache.location import open_store
from dflash_lightning.cache.manifest import CacheManifest
from dflash_lightning.cache.shards import ShardMarker, object_fault
from dflash_lightning.cache.store import MARKER, CacheStore
from dflash_lightning.errors import CacheError


@dataclass(frozen=True)
class Fault:
    """One damaged or missing object: `shard` index, `object` path within the shard, and `what` is wrong."""

    shard: int
    object: str
    what: str

    def __str__(self) -> str:
        return f"shard {self.shard:06d}, object {self.object}: {self.what}"


def verify(cache: str | Path | CacheStore, progress: Callable[[int, int], None] | None = None) -> list[Fault]:
    """Check size and SHA-256 of every object of every planned shard; an uncommitted shard is a fault too.

    Args:
        cache: path, URL or store of the cache.
        progress: called after each shard with (shards done, shards planned).

    Returns:
        All faults, by shard and object; empty for a complete, sound cache.

    Raises:
        CacheError: there is no manifest, or it is damaged: without it nothing can be judged.
    """
    store = open_store(cache)
    manifest = CacheManifest.load(store)
    faults = []
    for shard in range(manifest.num_shards):
        faults += _shard_faults(store, shard, manifest)
        if progress is not None:
            progress(shard + 1, manifest.num_shards)
    return faults


def _shard_faults(store: CacheStore, shard: int, manifest: CacheManifest) -> list[Fault]:
    try:
        marker = ShardMarker.load(store, shard, manifest)
    except CacheError as error:
        return [Fault(shard, MARKER, f"damaged: {error.__cause__ or error}")]
    if marker is None:
        return [Fault(shard, MARKER, "it is missing: the shard was not committed")]
    faults = []
    for name in sorted(marker.objects):
        try:
            what = object_fault(store, marker, name, digest=True)
        except OSError as error:
            what = f"it can't be read ({error})"
        if what:
            faults.append(Fault(shard, name, what))
    return faults
