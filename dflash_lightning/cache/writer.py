"""Writing a cache: several processes at once, each the only writer of its shards, any of them killed at any moment."""

import os
import shutil
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import numpy as np

from dflash_lightning.cache.arrays import FEATURES, OBJECTS, write_arrays
from dflash_lightning.cache.files import (
    TEMPORARY_PREFIX,
    sync_and_digest,
    sync_folder,
    temporary_until_renamed,
    write_synced,
)
from dflash_lightning.cache.manifest import MANIFEST, CacheManifest
from dflash_lightning.cache.samples import Sample, SampleError, count_anchor_candidates, feature_bits, storable
from dflash_lightning.cache.shards import MARKER, SHARDS, ShardMarker, StoredObject, shard_folder, temporary_folder
from dflash_lightning.errors import CacheError


def create_or_join(path: str | Path, manifest: CacheManifest, *, rank: int = 0) -> "CacheWriter":
    """Open the cache in folder `path` for writing; create it if it isn't there.

    Any number of processes may call this at once, without talking to each other: one creates the manifest, the others,
    and any later run that resumes, must bring the same one.

    Args:
        path: the cache folder, shared by all writers.
        manifest: what this run is about to write.
        rank: number of this writer, for names of temporary folders and the markers' `producer`.

    Raises:
        CacheError: the cache belongs to a different run (each differing field is listed with both values), the folder
            holds something else, or there is no space left.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if not (path / MANIFEST).exists():
        strangers = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(TEMPORARY_PREFIX))
        if strangers and not (path / MANIFEST).exists():
            raise CacheError(
                f"{path} is not empty and has no {MANIFEST}; found {', '.join(strangers[:5])}. Name a new folder, or "
                "restore the manifest."
            )
        manifest.create(path)
    differences = CacheManifest.load(path).differences(manifest)
    if differences:
        raise CacheError(
            f"{path} belongs to another run and can't be continued by this one:\n  "
            + "\n  ".join(differences)
            + "\nUse the settings that the cache was made with, or name a new folder."
        )
    return CacheWriter(path, manifest, rank)


class CacheWriter:
    """Writes whole shards. The caller sees to it that one shard is written by one process at a time.

    A shard appears in one step: it is written under a temporary name and synced, the folder is renamed, and the marker
    comes last. A process killed in between leaves only what `sweep` removes.

    Attributes:
        path: the cache folder.
        manifest: the manifest of the cache, the plan included.
    """

    def __init__(self, path: Path, manifest: CacheManifest, rank: int):
        self.path = path
        self.manifest = manifest
        self._producer = {"host": os.uname().nodename, "pid": os.getpid(), "rank": rank}
        (path / SHARDS).mkdir(exist_ok=True)

    def is_committed(self, shard: int) -> bool:
        """Whether the shard is finished and visible to readers; CacheError if its marker is damaged."""
        return ShardMarker.load(self.path, shard) is not None

    def sweep(self, shard: int) -> list[Path]:
        """Remove what dead producers left of an uncommitted shard; return the removed folders. For its owner only."""
        pattern = temporary_folder(self.path, shard, "*")
        leftovers = sorted(pattern.parent.glob(pattern.name))
        folder = shard_folder(self.path, shard)
        if folder.exists() and not (folder / MARKER).exists():
            leftovers.append(folder)
        for leftover in leftovers:
            try:
                shutil.rmtree(leftover)
            except FileNotFoundError as error:
                # What is left by the dead doesn't move.
                raise self._second_writer(shard) from error
        return leftovers

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
            raise CacheError(f"shard {shard:06d} of {self.path} is already committed")
        self.sweep(shard)
        columns = _flatten(samples)
        needed = sum(column.nbytes for column in columns.values())
        temporary = temporary_folder(self.path, shard, f"{self._producer['rank']}-{os.getpid()}")
        with temporary_until_renamed(self.path, needed, removed=temporary):
            try:
                write_arrays(
                    temporary,
                    columns,
                    group_attributes={"format_version": self.manifest.format_version, "shard": shard},
                    feature_attributes={"feature_dtype": self.manifest.feature_dtype},
                )
                objects = {name: StoredObject(*found) for name, found in sync_and_digest(temporary).items()}
                if objects.keys() != OBJECTS:
                    raise self._second_writer(shard)
                marker = ShardMarker(
                    shard=shard,
                    rows=len(columns[FEATURES]),
                    samples=len(samples),
                    objects=objects,
                    producer=self._producer,
                    code_version=self.manifest.code_version,
                )
                self._commit(temporary, marker)
            except FileNotFoundError as error:
                # Nobody but another writer of this shard removes what is written here.
                raise self._second_writer(shard) from error
        return marker

    def _commit(self, temporary: Path, marker: ShardMarker) -> None:
        """Publish a prepared shard. The marker is on disk before the rename, so that space can't run out after it."""
        folder = shard_folder(self.path, marker.shard)
        unnamed = f"{TEMPORARY_PREFIX}{MARKER}"
        write_synced(temporary / unnamed, marker.dump())
        try:
            os.rename(temporary, folder)
        except OSError as error:
            if folder.exists():
                raise self._second_writer(marker.shard) from error
            raise
        sync_folder(folder.parent)
        os.rename(folder / unnamed, folder / MARKER)
        sync_folder(folder)

    def _second_writer(self, shard: int) -> CacheError:
        return CacheError(
            f"shard {shard:06d} of {self.path} is being written by another process as well; run one capture at a time"
        )


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
