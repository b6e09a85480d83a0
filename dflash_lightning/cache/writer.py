"""Writing a cache: several processes at once, each the only writer of its shards, any of them killed at any moment."""

import hashlib
import os
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import numpy as np

from dflash_lightning.cache.arrays import FEATURES, OBJECTS, write_arrays
from dflash_lightning.cache.location import open_store
from dflash_lightning.cache.manifest import MANIFEST, CacheManifest
from dflash_lightning.cache.samples import Sample, SampleError, count_anchor_candidates, feature_bits, storable
from dflash_lightning.cache.shards import ShardMarker, StoredObject, shard_name
from dflash_lightning.cache.store import TEMPORARY_PREFIX, CacheStore
from dflash_lightning.errors import CacheError


def create_or_join(cache: str | Path | CacheStore, manifest: CacheManifest, *, rank: int = 0) -> "CacheWriter":
    """Open a cache for writing; create it if it isn't there.

    Any number of processes may call this at once, without talking to each other: one creates the manifest, the others,
    and any later run that resumes, must bring the same one.

    Args:
        cache: path, URL or store of the cache, shared by all writers.
        manifest: what this run is about to write.
        rank: number of this writer, for names of temporary folders and the markers' `producer`.

    Raises:
        CacheError: the cache belongs to a different run (each differing field is listed with both values), the place
            holds something else, or there is no space left.
    """
    store = open_store(cache)
    store.make()
    entries = store.entries()
    if MANIFEST not in entries:
        strangers = [entry for entry in entries if not entry.startswith(TEMPORARY_PREFIX)]
        if strangers and MANIFEST not in store.entries():
            raise CacheError(
                f"{store.location} is not empty and has no {MANIFEST}; found {', '.join(strangers[:5])}. "
                "Name a new folder, or restore the manifest."
            )
        manifest.create(store)
    differences = CacheManifest.load(store).differences(manifest)
    if differences:
        raise CacheError(
            f"{store.location} belongs to another run and can't be continued by this one:\n  "
            + "\n  ".join(differences)
            + "\nUse the settings that the cache was made with, or name a new folder."
        )
    return CacheWriter(store, manifest, rank)


class CacheWriter:
    """Writes whole shards. The caller sees to it that one shard is written by one process at a time.

    A shard appears in one step: it is prepared on a local disk, then published, and the marker comes last. A process
    killed in between leaves only what `sweep` removes.

    Attributes:
        store: where the cache lies.
        manifest: the manifest of the cache, the plan included.
    """

    def __init__(self, store: CacheStore, manifest: CacheManifest, rank: int):
        self.store = store
        self.manifest = manifest
        self._producer = {"host": os.uname().nodename, "pid": os.getpid(), "rank": rank}

    def is_committed(self, shard: int) -> bool:
        """Whether the shard is finished and visible to readers; CacheError if its marker is damaged."""
        return ShardMarker.load(self.store, shard) is not None

    def sweep(self, shard: int) -> list[str]:
        """Remove what dead producers left of an uncommitted shard; return what was removed. For its owner only."""
        return self.store.sweep(shard_name(shard))

    def write_shard(self, shard: int, samples: Iterable[Sample]) -> ShardMarker:
        """Store and commit the samples of one shard, after sweeping its leftovers.

        Memory: the features of the shard once more, plus their compressed form.

        Args:
            shard: index in the plan.
            samples: as many as the plan says, in the plan's order.

        Raises:
            SampleError: a sample has wrong types or lengths, non-finite features, a repeated id, or no place for a
                training block.
            CacheError: the shard is committed already, the number of samples isn't the planned one, another process
                wrote the same shard, or there is no space left (committed shards are kept).
        """
        samples = list(samples)
        planned = self.manifest.shard_samples[shard]
        if len(samples) != planned:
            raise CacheError(f"shard {shard:06d}: {len(samples)} samples given, the manifest plans {planned}")
        samples = [storable(sample, self.manifest.target_layer_ids, self.manifest.hidden_size) for sample in samples]
        seen = set()
        for sample in samples:
            if sample.sample_id in seen:
                raise SampleError(sample.sample_id, f"its id occurs twice in shard {shard:06d}")
            seen.add(sample.sample_id)
        if self.is_committed(shard):
            raise CacheError(f"shard {shard:06d} of {self.store.location} is already committed")
        self.sweep(shard)
        columns = _flatten(samples)
        needed = sum(column.nbytes for column in columns.values())
        with self.store.prepared(shard_name(shard), f"{self._producer['rank']}-{os.getpid()}", needed) as folder:
            write_arrays(
                folder,
                columns,
                group_attributes={"format_version": self.manifest.format_version, "shard": shard},
                feature_attributes={"feature_dtype": self.manifest.feature_dtype},
            )
            objects = _digests(folder)
            if objects.keys() != OBJECTS:
                raise self.store.contested(shard_name(shard))
            marker = ShardMarker(
                shard=shard,
                rows=len(columns[FEATURES]),
                samples=len(samples),
                objects=objects,
                producer=self._producer,
                code_version=self.manifest.code_version,
            )
            self.store.commit(folder, shard_name(shard), marker.dump())
        return marker


def _digests(folder: Path) -> dict[str, StoredObject]:
    """Size and SHA-256 of every file below `folder`, by relative path, sorted."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = StoredObject(file.tell(), digest)
    return dict(sorted(found.items()))


def _flatten(samples: list[Sample]) -> dict[str, np.ndarray]:
    """The arrays of a shard: token-wise columns one sample after the other, and where each sample begins."""
    names = [sample.sample_id.encode() for sample in samples]
    return {
        FEATURES: np.concatenate([feature_bits(sample.features) for sample in samples]),
        "input_ids": np.concatenate([sample.input_ids for sample in samples]),
        "loss_mask": np.concatenate([sample.loss_mask for sample in samples]),
        "offsets": _offsets(len(sample.input_ids) for sample in samples),
        "sample_ids": np.frombuffer(b"".join(names), dtype=np.uint8),
        "sample_id_offsets": _offsets(map(len, names)),
        "anchor_candidates": np.array(
            [count_anchor_candidates(sample.loss_mask) for sample in samples], dtype=np.int32
        ),
    }


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    return np.array([0, *accumulate(lengths)], dtype=np.int64)
