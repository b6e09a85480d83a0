"""A full scan of a cache: every byte against the checksums taken when it was written."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dflash_lightning.cache.index import INDEX, UnusableIndex, load_index
from dflash_lightning.cache.location import open_store
from dflash_lightning.cache.manifest import MANIFEST, MANIFEST_COPY, CacheManifest
from dflash_lightning.cache.shards import ShardMarker, object_fault, shard_name, sound_markers, source_digest
from dflash_lightning.cache.store import MARKER, CacheStore
from dflash_lightning.errors import CacheError

NOT_COMMITTED = "it is missing: the shard was not committed"


@dataclass(frozen=True)
class Fault:
    """A damaged or missing object.

    Attributes:
        shard: index of the shard, or None if the object belongs to the cache as a whole.
        object: path within the shard, or within the cache.
        what: is wrong with it.
    """

    shard: int | None
    object: str
    what: str

    @property
    def uncommitted(self) -> bool:
        """Whether the shard as a whole isn't there: damage, or a capture that isn't finished."""
        return self.what == NOT_COMMITTED

    def __str__(self) -> str:
        place = f"object {self.object}" if self.shard is None else f"shard {self.shard:06d}, object {self.object}"
        return f"{place}: {self.what}"


def verify(cache: str | Path | CacheStore, progress: Callable[[], None] | None = None) -> list[Fault]:
    """Check size and SHA-256 of every object of every planned shard, and the manifest, its copy and the index.

    An uncommitted shard is a fault too, and so is a finished cache without an index.

    Args:
        cache: path, URL or store of the cache.
        progress: called after each shard.

    Returns:
        All faults, by shard and object; empty for a complete, sound cache.

    Raises:
        CacheError: there is no sound manifest, nor a copy of it: without it nothing can be judged.
    """
    store = open_store(cache)
    manifest, faults = sound_manifest(store)
    with ThreadPoolExecutor(store.concurrency) as pool:
        found = pool.map(lambda shard: _shard_faults(store, shard, manifest), range(manifest.num_shards))
        for in_shard in found:
            faults += in_shard
            if progress is not None:
                progress()
    return faults + _index_faults(store, manifest)


def _index_faults(store: CacheStore, manifest: CacheManifest) -> list[Fault]:
    try:
        index = load_index(store, manifest)
    except UnusableIndex as error:
        return [Fault(None, INDEX, error.what)]
    markers = sound_markers(store, manifest)
    if index is None:
        # It is made when the last shard is committed.
        return [] if None in markers else [Fault(None, INDEX, "it is missing, though all shards are committed")]
    for shard, (source, marker) in enumerate(zip(index.sources, markers, strict=True)):
        if marker is not None and source.tobytes() != source_digest(marker):
            return [Fault(None, INDEX, f"it is older than shard {shard:06d}")]
    return []


def sound_manifest(store: CacheStore) -> tuple[CacheManifest, list[Fault]]:
    """The manifest, or its copy if it is damaged or missing; and what is wrong with the one or the other.

    Raises:
        CacheError: neither can be read.
    """
    found, errors = {}, {}
    for name in (MANIFEST, MANIFEST_COPY):
        try:
            found[name] = CacheManifest.load(store, name)
        except CacheError as error:
            errors[name] = error
    if not found:
        causes = [error.__cause__ for error in errors.values()]
        if None in causes or all(isinstance(cause, FileNotFoundError) for cause in causes):
            raise errors[MANIFEST]  # another version's cache, or none
        raise CacheError(
            f"{store.location} can't be read or repaired: {MANIFEST} and {MANIFEST_COPY} are both damaged or missing, "
            "and nothing else tells what the shards hold. Put back either from a backup, or run the same capture "
            "command with a new folder."
        )
    faults = []
    for name, error in errors.items():
        missing = isinstance(error.__cause__, FileNotFoundError)
        faults.append(Fault(None, name, "it is missing" if missing else f"damaged: {error.__cause__ or error}"))
    if len(found) == 2 and found[MANIFEST] != found[MANIFEST_COPY]:
        faults.append(Fault(None, MANIFEST_COPY, f"it isn't equal to {MANIFEST}"))
    return next(iter(found.values())), faults


def restore_manifest(store: CacheStore) -> CacheManifest:
    """Write the manifest or its copy anew, whichever isn't sound; if both are but differ, the manifest counts.

    Raises:
        CacheError: neither can be read.
    """
    manifest, faults = sound_manifest(store)
    for fault in faults:
        store.replace(fault.object, manifest.dump())
    return manifest


def _shard_faults(store: CacheStore, shard: int, manifest: CacheManifest) -> list[Fault]:
    try:
        marker = ShardMarker.load(store, shard, manifest)
    except CacheError as error:
        return [Fault(shard, MARKER, f"damaged: {error.__cause__ or error}")]
    if marker is None:
        return [Fault(shard, MARKER, NOT_COMMITTED)]
    faults = []
    for name in sorted(marker.objects):
        try:
            what = object_fault(store, f"{shard_name(shard)}/{name}", marker.objects[name], digest=True)
        except OSError as error:
            what = f"it can't be read ({error})"
        if what:
            faults.append(Fault(shard, name, what))
    return faults
