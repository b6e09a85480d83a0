"""A cache as a list of samples: the index in memory, everything else read on demand."""

from pathlib import Path

from dflash_lightning.cache.index import INDEX, SampleIndex, load_index
from dflash_lightning.cache.location import open_store
from dflash_lightning.cache.manifest import CacheManifest, TargetIdentity
from dflash_lightning.cache.sample_reader import SampleLocation, SampleReader
from dflash_lightning.cache.samples import Sample
from dflash_lightning.cache.shards import load_markers
from dflash_lightning.cache.staging import StagingSettings
from dflash_lightning.cache.store import CacheStore
from dflash_lightning.errors import CacheError


class FeatureCache:
    """A read-only view of the committed shards, safe to hand to data workers (fork, forkserver, spawn).

    Opening a finished cache reads its manifest and its index, and nothing that lies in the shards: those open on first
    use, anew in each process. Without an index (the capture isn't finished) it is made in memory, from the markers and
    a few small arrays of each shard.

    Args:
        cache: path, URL or store of the cache.
        require_complete: refuse a cache whose capture isn't finished. If False, only the committed samples are there.
        staging: where to keep copies of whole shards on this machine. Without a folder, samples are read directly.

    Attributes:
        store: where the cache lies.
        manifest: target, layers, generation and plan.
        complete: whether every planned shard is committed.
        reader: reads a sample by its location: the part that data workers need.
        sample_ids: the id of each sample, in the plan's order; decoded on demand.
        id_hashes: [samples] uint64, 64 bits that follow from each id (`index.id_hash`).
        lengths: [samples] int32, tokens in each sample.
        anchor_candidates: [samples] int32, places for a training block in each sample (`count_anchor_candidates`).
        shards: [samples] int32, the shard that holds each sample.
        num_tokens: tokens in all.
        num_bytes: stored bytes of the shards.

    Raises:
        CacheError: no cache there, another format, incomplete or empty, or its index is damaged.
    """

    def __init__(
        self,
        cache: str | Path | CacheStore,
        *,
        require_complete: bool = True,
        staging: StagingSettings = StagingSettings(),  # noqa: B008
    ):
        self.store = open_store(cache)
        self.manifest = CacheManifest.load(self.store)
        self.reader = SampleReader(self.store, self.manifest, staging)
        index = load_index(self.store, self.manifest) or self._make_index()
        planned = self.manifest.num_shards
        self.complete = index.num_committed == planned
        if (require_complete and not self.complete) or not index.num_committed:
            raise CacheError(
                f"{self.store.location}: {index.num_committed} of {planned} shards are committed; finish it with the "
                "same capture command"
            )
        if not len(index.lengths):
            raise CacheError(f"{self.store.location} holds no sample: all that were captured are quarantined")
        self.sample_ids = index.sample_ids
        self.id_hashes, self.lengths, self.anchor_candidates = index.id_hashes, index.lengths, index.anchor_candidates
        self.shards, self._starts = index.shards(), index.starts()
        self._sources = [digest.tobytes() for digest in index.sources]
        self.num_tokens, self.num_bytes = int(self.lengths.sum()), index.num_bytes

    def _make_index(self) -> SampleIndex:
        markers = list(load_markers(self.store, range(self.manifest.num_shards), self.manifest))
        return SampleIndex.build(self.manifest, markers, self.reader)

    def __len__(self) -> int:
        return len(self.lengths)

    def locate(self, index: int) -> SampleLocation:
        """Where sample `index` lies; IndexError if there is no such sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a cache with {len(self)} samples")
        shard = self.shards.item(index)
        return SampleLocation(
            sample_id=self.sample_ids[index],
            shard=shard,
            start=self._starts.item(index),
            length=self.lengths.item(index),
            source=self._sources[shard],
        )

    def read(self, index: int) -> Sample:
        """Read sample `index`; see `SampleReader.read`."""
        return self.reader.read(self.locate(index))

    def check_compatible(
        self, target_identity: TargetIdentity | None, target_layer_ids: tuple[int, ...], hidden_size: int
    ) -> None:
        """Refuse a drafter that this cache can't train.

        Args:
            target_identity: the drafter's target, or None if it isn't known. One model under another name or revision
                is the same target.
            target_layer_ids: the layers that the drafter taps, in its order.
            hidden_size: H of the drafter's target.

        Raises:
            CacheError: lists every differing field with both values.
        """
        wanted = {"target_layer_ids": list(target_layer_ids), "hidden_size": hidden_size}
        stored = {
            "target_layer_ids": list(self.manifest.target_layer_ids),
            "hidden_size": self.manifest.hidden_size,
        }
        if target_identity is not None and not self.manifest.target.fits(target_identity):
            wanted |= {f"target.{field}": value for field, value in vars(target_identity).items()}
            stored |= {f"target.{field}": value for field, value in vars(self.manifest.target).items()}
        differences = [
            f"{field}: cache has {stored[field]}, this run has {wanted[field]}"
            for field in wanted
            if stored[field] != wanted[field]
        ]
        if differences:
            raise CacheError(
                f"the cache {self.store.location} doesn't fit this drafter:\n  "
                + "\n  ".join(differences)
                + "\nUse the target and the layers that the cache was made with, or capture a new cache."
            )


def write_index(cache: str | Path | CacheStore) -> bool:
    """Write the index of a finished cache, unless a current one is there. Any process may, at any time.

    Returns:
        Whether the cache is finished, so that it has a current index now.

    Raises:
        CacheError: a marker or an array that the index is made from is damaged.
    """
    store = open_store(cache)
    manifest = CacheManifest.load(store)
    markers = list(load_markers(store, range(manifest.num_shards), manifest))
    if None in markers:
        return False
    try:
        current = load_index(store, manifest)
    except CacheError:
        current = None  # to be replaced
    if current is None or not current.is_made_from(markers):
        index = SampleIndex.build(manifest, markers, SampleReader(store, manifest))
        store.replace(INDEX, index.dump())
    return True
