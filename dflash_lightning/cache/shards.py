"""A shard on disk: its folder, its commit marker, and the check of an object against that marker."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_lightning.cache.arrays import OBJECTS
from dflash_lightning.cache.files import TEMPORARY_PREFIX, dump_record, parse_record
from dflash_lightning.errors import CacheError

SHARDS = "shards"
MARKER = "COMMITTED"


@dataclass(frozen=True)
class StoredObject:
    """Size in bytes and SHA-256 (hex) of one file of a shard."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardMarker:
    """The content of COMMITTED. Its presence makes a shard visible; it is written after everything else is on disk.

    Attributes:
        shard: index in the plan; ties the marker to its folder.
        rows: tokens in the shard.
        samples: samples in the shard.
        objects: every other file of the shard by relative path.
        producer: host, process id and rank that wrote it. The only part that may differ between two runs.
        code_version: version of the code that wrote it.
    """

    shard: int
    rows: int
    samples: int
    objects: dict[str, StoredObject]
    producer: dict
    code_version: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the shard on disk, without the marker."""
        return sum(stored.bytes for stored in self.objects.values())

    def dump(self) -> bytes:
        return dump_record(asdict(self))

    @classmethod
    def load(cls, cache: Path, shard: int) -> "ShardMarker | None":
        """Read the marker of a shard; None if the shard isn't committed.

        Raises:
            CacheError: the marker is damaged or belongs to another shard.
        """
        try:
            data = (shard_folder(cache, shard) / MARKER).read_bytes()
        except FileNotFoundError:
            return None
        try:
            fields = parse_record(data)
            fields["objects"] = {name: StoredObject(**stored) for name, stored in fields["objects"].items()}
            marker = cls(**fields)
        except (CacheError, TypeError, KeyError) as error:
            raise damaged(cache, shard, MARKER, str(error)) from error
        if marker.shard != shard:
            raise damaged(cache, shard, MARKER, f"it belongs to shard {marker.shard:06d}")
        if marker.objects.keys() != OBJECTS:
            raise damaged(cache, shard, MARKER, f"it lists the objects {sorted(marker.objects)}")
        return marker


def shard_folder(cache: Path, shard: int) -> Path:
    return cache / SHARDS / f"{shard:06d}"


def temporary_folder(cache: Path, shard: int, owner: str) -> Path:
    """Folder in which `owner` prepares a shard; with owner "*" the pattern of all of them."""
    return cache / SHARDS / f"{TEMPORARY_PREFIX}{shard:06d}-{owner}"


def damaged(cache: Path, shard: int, name: str, what: str) -> CacheError:
    """The error for a damaged object: shard, object, what was found, what to do."""
    return CacheError(
        f"shard {shard:06d}, object {name}: {what}. List all the damage with `dflash-lightning cache verify {cache}`; "
        f"to repair, delete {shard_folder(cache, shard)} and run the same capture command again."
    )


def object_fault(cache: Path, marker: ShardMarker, name: str, digest: bool) -> str | None:
    """Say what is wrong with an object, or None: present, of the marker's size and, if `digest`, of its SHA-256."""
    path, expected = shard_folder(cache, marker.shard) / name, marker.objects[name]
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"it has {size:,} bytes, committed were {expected.bytes:,}"
        if digest:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                    return "its content changed since it was committed (SHA-256)"
    except FileNotFoundError:
        return "it is missing"
    return None
