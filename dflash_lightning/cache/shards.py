"""A shard: its name, its commit marker, and the check of an object against that marker."""

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from dflash_lightning.cache.arrays import data_object, fill_values, objects_of
from dflash_lightning.cache.manifest import CacheManifest
from dflash_lightning.cache.records import dump_record, parse_record
from dflash_lightning.cache.samples import Quarantined
from dflash_lightning.cache.store import MARKER, CacheStore
from dflash_lightning.errors import CacheError

SHARDS = "shards"
# The arrays that the cache's index is made from.
INDEXED = ("offsets", "sample_ids", "sample_id_offsets", "anchor_candidates")


@dataclass(frozen=True)
class StoredObject:
    """Size in bytes and SHA-256 (hex) of one file of a shard."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardMarker:
    """The content of COMMITTED. Its presence makes a shard visible; it is written after everything else is on disk.

    Attributes:
        identity_sha256: the manifest's; ties the marker to its cache.
        shard: index in the plan; ties the marker to its folder.
        rows: stored tokens.
        samples: stored samples. With the quarantined ones they are as many as the plan says.
        quarantined: planned samples that can't be stored.
        objects: every other file of the shard by relative path.
        producer: host, process id and rank that wrote it, and the version of its code. The only part that may differ
            between two runs.
    """

    identity_sha256: str
    shard: int
    rows: int
    samples: int
    quarantined: tuple[Quarantined, ...]
    objects: dict[str, StoredObject]
    producer: dict

    @property
    def num_bytes(self) -> int:
        """Stored bytes of the shard, without the marker."""
        return sum(stored.bytes for stored in self.objects.values())

    def dump(self) -> bytes:
        return dump_record(asdict(self))

    @classmethod
    def load(cls, store: CacheStore, shard: int, manifest: CacheManifest) -> "ShardMarker | None":
        """Read the marker of a shard; None if the shard isn't committed.

        Raises:
            CacheError: the marker is damaged, or belongs to another shard or another cache.
        """
        try:
            data = store.read(f"{shard_name(shard)}/{MARKER}")
        except FileNotFoundError:
            return None
        try:
            fields = parse_record(data)
            fields["objects"] = {name: StoredObject(**stored) for name, stored in fields["objects"].items()}
            fields["quarantined"] = tuple(Quarantined(**sample) for sample in fields["quarantined"])
            marker = cls(**fields)
        except (CacheError, TypeError, KeyError) as error:
            raise damaged(store, shard, MARKER, str(error)) from error
        fault = marker._fault(shard, manifest)
        if fault:
            raise damaged(store, shard, MARKER, fault)
        return marker

    def _fault(self, shard: int, manifest: CacheManifest) -> str | None:
        planned = manifest.shard_samples[shard]
        if self.shard != shard:
            return f"it belongs to shard {self.shard:06d}"
        if self.identity_sha256 != manifest.identity_sha256:
            return "it belongs to another cache"
        if self.samples + len(self.quarantined) != planned:
            return (
                f"it counts {self.samples} stored samples and {len(self.quarantined)} quarantined ones, the manifest "
                f"plans {planned}"
            )
        if self.objects.keys() != objects_of(fill_values(manifest.storage) if self.samples else ()):
            return f"it lists the objects {sorted(self.objects)}"
        return None


def load_markers(store: CacheStore, shards: Iterable[int], manifest: CacheManifest) -> Iterator[ShardMarker | None]:
    """The markers of several shards, in order, as by `ShardMarker.load`; several are read at a time."""
    with ThreadPoolExecutor(store.concurrency) as pool:
        yield from pool.map(lambda shard: ShardMarker.load(store, shard, manifest), shards)


def sound_markers(store: CacheStore, manifest: CacheManifest) -> list[ShardMarker | None]:
    """The marker of each planned shard; None where there is none, or a damaged one."""

    def load(shard: int) -> ShardMarker | None:
        try:
            return ShardMarker.load(store, shard, manifest)
        except CacheError:
            return None

    with ThreadPoolExecutor(store.concurrency) as pool:
        return list(pool.map(load, range(manifest.num_shards)))


def source_digest(marker: ShardMarker) -> bytes:
    """SHA-256 over the digests of the arrays that the cache's index is made from: another one, another index."""
    digests = [marker.objects[data_object(name)].sha256 for name in INDEXED if marker.samples]
    return hashlib.sha256("".join(digests).encode()).digest()


def shard_name(shard: int) -> str:
    """Name of the shard's committed folder within the cache."""
    return f"{SHARDS}/{shard:06d}"


def damaged(store: CacheStore, shard: int, name: str, what: str) -> CacheError:
    """The error for a damaged object: shard, object, what was found, what to do."""
    return CacheError(
        f"shard {shard:06d}, object {name}: {what}. List all the damage with "
        f"`dflash-lightning cache verify {store.location}`; with --repair it makes the damaged shards anew."
    )


def object_fault(store: CacheStore, name: str, expected: StoredObject, digest: bool) -> str | None:
    """Say what is wrong with an object, or None: present, of the marker's size and, if `digest`, of its SHA-256."""
    try:
        size = store.size(name)
        if size != expected.bytes:
            return f"it has {size:,} bytes, committed were {expected.bytes:,}"
        if digest and store.sha256(name) != expected.sha256:
            return "its content changed since it was committed (SHA-256)"
    except FileNotFoundError:
        return "it is missing"
    return None
