"""Writing a cache: several processes at once, each the only writer of its shards, any of them killed at any moment."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from dflash_lightning.cache.arrays import objects_of, write_arrays
from dflash_lightning.cache.columns import feature_attributes, shard_columns
from dflash_lightning.cache.index import INDEX, withdraw_index
from dflash_lightning.cache.location import open_store
from dflash_lightning.cache.manifest import MANIFEST, MANIFEST_COPY, CacheManifest
from dflash_lightning.cache.samples import Quarantined, Sample, SampleError, storable
from dflash_lightning.cache.shards import ShardMarker, StoredObject, load_markers, shard_name
from dflash_lightning.cache.store import TEMPORARY_PREFIX, CacheStore, files_below
from dflash_lightning.errors import CacheError

# Quarantined samples that an error lists.
MAX_LISTED = 20
# A writer looks for what others quarantined whenever this share of the allowed samples has been added to what it knows.
RECOUNT_SHARE = 0.1


def create_or_join(
    cache: str | Path | CacheStore,
    manifest: CacheManifest,
    *,
    rank: int = 0,
    max_quarantined: float = 0.01,
) -> "CacheWriter":
    """Open a cache for writing; create it if it isn't there.

    Any number of processes may call this at once, without talking to each other: one creates the manifest, the others,
    and any later run that resumes, must bring the same one.

    Args:
        cache: path, URL or store of the cache, shared by all writers.
        manifest: what this run is about to write.
        rank: number of this writer, for names of temporary folders and the markers' `producer`.
        max_quarantined: share of the planned samples that may be quarantined, 0 to 1.

    Raises:
        CacheError: the cache belongs to a different run (each differing field is listed with both values), the place
            holds something else, or there is no space left.
    """
    store = open_store(cache)
    store.make()
    entries = store.entries()
    if MANIFEST not in entries:
        if MANIFEST_COPY in entries:
            raise CacheError(
                f"{store.location} has lost its {MANIFEST}: restore it with "
                f"`dflash-lightning cache verify {store.location} --repair`"
            )
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
    if MANIFEST_COPY not in entries:
        store.create(MANIFEST_COPY, store.read(MANIFEST))
    for name in (MANIFEST, MANIFEST_COPY, INDEX):
        store.sweep_unfinished(name)
    return CacheWriter(store, manifest, rank, max_quarantined)


class CacheWriter:
    """Writes whole shards. The caller sees to it that one shard is written by one process at a time.

    A shard appears in one step: it is prepared on a local disk, then published, and the marker comes last. A process
    killed in between leaves only what `sweep` removes.

    Attributes:
        store: where the cache lies.
        manifest: the manifest of the cache, the plan included.
        device: where features are packed. The CPU, unless the producer, whose target sits elsewhere, changes it.
    """

    def __init__(self, store: CacheStore, manifest: CacheManifest, rank: int, max_quarantined: float):
        self.store = store
        self.manifest = manifest
        self._max_quarantined = max_quarantined
        self.device = torch.device("cpu")
        self._producer = {
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "rank": rank,
            "code_version": manifest.code_version,
        }
        self._committed: dict[int, ShardMarker] = {}
        self._num_quarantined = 0  # in the shards that are known to be committed
        self._recount_at = 1

    def is_committed(self, shard: int) -> bool:
        """Whether the shard is finished and visible to readers; CacheError if its marker is damaged."""
        if shard not in self._committed:
            marker = ShardMarker.load(self.store, shard, self.manifest)
            if marker is None:
                return False
            self._remember(marker)
        return True

    def quarantined(self) -> list[Quarantined]:
        """The quarantined samples of all committed shards, whoever wrote them."""
        return [sample for shard in sorted(self.committed()) for sample in self._committed[shard].quarantined]

    def check_quarantined(self, more: Sequence[Quarantined] = ()) -> None:
        """Refuse to go on once too many samples are quarantined.

        Args:
            more: samples that are about to be quarantined, beside those in committed shards.

        Raises:
            CacheError: they are more than the share that is allowed; lists samples and reasons.
        """
        found, planned = [*self.quarantined(), *more], self.manifest.num_samples
        if len(found) / planned > self._max_quarantined:
            listed = [str(sample) for sample in found[-MAX_LISTED:]]
            if len(found) > len(listed):
                listed.append(f"and {len(found) - len(listed):,} before")
            raise CacheError(
                f"{len(found):,} of {planned:,} planned samples can't be stored; max_quarantined allows "
                f"{self._max_quarantined:.4g} of them:\n  "
                + "\n  ".join(listed)
                + "\nThe shards committed so far are kept. Remove the cause, or allow more with "
                "--max-quarantined, and run the same command again."
            )

    def _recount_quarantined(self, more: Sequence[Quarantined]) -> None:
        """`check_quarantined`, which reads the marker of every shard that isn't known, and when to do so again."""
        self.check_quarantined(more)
        allowed = int(self._max_quarantined * self.manifest.num_samples)
        known = self._num_quarantined + len(more)
        self._recount_at = min(known + max(1, int(RECOUNT_SHARE * allowed)), allowed + 1)

    def committed(self) -> set[int]:
        """All finished shards, whoever wrote them; CacheError if a marker is damaged."""
        unknown = [shard for shard in range(self.manifest.num_shards) if shard not in self._committed]
        found = load_markers(self.store, unknown, self.manifest)
        for marker in found:
            if marker is not None:
                self._remember(marker)
        return set(self._committed)

    def _remember(self, marker: ShardMarker) -> None:
        if marker.shard not in self._committed:
            self._committed[marker.shard] = marker
            self._num_quarantined += len(marker.quarantined)

    def sweep(self, shard: int) -> list[str]:
        """Remove what dead producers left of an uncommitted shard; return what was removed. For its owner only."""
        return self.store.sweep(shard_name(shard))

    def remove(self, shard: int) -> None:
        """Remove a shard, so that it can be written anew, and the index, which names it. For its owner only."""
        if shard in self._committed:
            self._num_quarantined -= len(self._committed.pop(shard).quarantined)
        withdraw_index(self.store)
        self.store.remove(shard_name(shard))

    def write_shard(self, shard: int, samples: Iterable[Sample | Quarantined]) -> ShardMarker:
        """Store and commit the samples of one shard, after sweeping its leftovers.

        A sample that isn't `storable`, or that comes as quarantined already, is named in the marker instead.

        Memory: the features of the shard once more, plus their compressed form.

        Args:
            shard: index in the plan.
            samples: as many as the plan says, in the plan's order.

        Raises:
            CacheError: the shard is committed already, so that another process writes it too, the number of samples
                isn't the planned one, too many samples are quarantined, or there is no space left. Committed shards
                are kept.
        """
        samples = list(samples)
        planned = self.manifest.shard_samples[shard]
        if len(samples) != planned:
            raise CacheError(f"shard {shard:06d}: {len(samples)} samples given, the manifest plans {planned}")
        if self.is_committed(shard):
            raise self.store.contested(shard_name(shard))
        stored, quarantined = self._sorted_out(samples)
        if quarantined and self._num_quarantined + len(quarantined) >= self._recount_at:
            self._recount_quarantined(quarantined)
        self.sweep(shard)
        columns = shard_columns(stored, self.manifest, self.device) if stored else {}
        needed = sum(column.nbytes for column in columns.values())
        with self.store.prepared(shard_name(shard), f"{self._producer['rank']}-{os.getpid()}", needed) as folder:
            write_arrays(
                folder,
                columns,
                storage=self.manifest.storage,
                compression=self.manifest.compression,
                group_attributes={"format_version": self.manifest.format_version, "shard": shard},
                feature_attributes=feature_attributes(self.manifest),
            )
            objects = _digests(folder)
            if objects.keys() != objects_of(columns):
                raise self.store.contested(shard_name(shard))
            marker = ShardMarker(
                identity_sha256=self.manifest.identity_sha256,
                shard=shard,
                rows=sum(len(sample.input_ids) for sample in stored),
                samples=len(stored),
                quarantined=tuple(quarantined),
                objects=objects,
                producer=self._producer,
            )
            self.store.commit(folder, shard_name(shard), marker.dump())
        self._remember(marker)
        return marker

    def _sorted_out(self, samples: list[Sample | Quarantined]) -> tuple[list[Sample], list[Quarantined]]:
        stored: dict[str, Sample] = {}
        quarantined = []
        for sample in samples:
            if isinstance(sample, Quarantined):
                quarantined.append(sample)
                continue
            try:
                part = storable(sample, self.manifest.target_layer_ids, self.manifest.hidden_size)
                if part.sample_id in stored:
                    raise SampleError(part.sample_id, "another sample of its shard has the same id")
                stored[part.sample_id] = part
            except SampleError as error:
                quarantined.append(Quarantined(error.sample_id, error.reason))
        return list(stored.values()), quarantined


def _digests(folder: Path) -> dict[str, StoredObject]:
    """Size and SHA-256 of every file below `folder`, by relative path, sorted."""
    found = {}
    for path in files_below(folder):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = StoredObject(file.tell(), digest)
    return dict(sorted(found.items()))
