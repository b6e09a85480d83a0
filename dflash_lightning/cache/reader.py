"""Reading a cache: an index of all samples in memory, features from the store one sample at a time."""

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import zarr

from dflash_lightning.cache.arrays import (
    CHANNELS,
    FEATURES,
    data_object,
    fill_values,
    metadata_object,
    open_array,
)
from dflash_lightning.cache.location import open_store
from dflash_lightning.cache.manifest import CacheManifest, TargetIdentity
from dflash_lightning.cache.packing import PackedFeatures
from dflash_lightning.cache.samples import Sample
from dflash_lightning.cache.shards import damaged, load_markers, object_fault, shard_name
from dflash_lightning.cache.staging import StagingArea, StagingSettings
from dflash_lightning.cache.store import CacheStore, LocalFolder
from dflash_lightning.errors import CacheError

# A bound on memory: an open shard holds its token ids and mask (5 bytes a token); to open one takes milliseconds.
MAX_OPEN_SHARDS = 256


@dataclass(frozen=True)
class _OpenShard:
    features: zarr.Array
    channels: torch.Tensor | None
    input_ids: np.ndarray
    loss_mask: np.ndarray


class _Place(NamedTuple):
    store: CacheStore
    folder: str


class FeatureCache:
    """A read-only view of the committed shards, safe to hand to data workers (fork, forkserver, spawn).

    Opening reads the manifest, the commit markers and the small per-shard index; shards open on first use, anew in
    each process. Before an object is first used its presence and size are checked against the marker, since Zarr would
    read a missing one as fill values without a word. Values are checked by CRC as they are read.

    Args:
        cache: path, URL or store of the cache.
        require_complete: refuse a cache whose capture isn't finished. If False, only the committed samples are there.
        staging: where to keep copies of whole shards on this machine; without it, samples are read from the store.

    Attributes:
        store: where the cache lies.
        manifest: target, layers, generation and plan.
        complete: whether every planned shard is committed.
        sample_ids: list of str, one a sample; the order is the plan's.
        lengths: [samples] int64, tokens in each sample.
        anchor_candidates: [samples] int32, places for a training block in each sample (`count_anchor_candidates`).
        shards: [samples] int32, the shard that holds each sample.
        num_tokens: tokens in all.
        num_bytes: stored bytes of the shards.

    Raises:
        CacheError: no cache there, another format, incomplete or empty, or an index object is missing or damaged.
    """

    def __init__(
        self,
        cache: str | Path | CacheStore,
        *,
        require_complete: bool = True,
        staging: StagingSettings | None = None,
    ):
        self.store = open_store(cache)
        self._staging = StagingArea(staging) if staging else None
        self.manifest = CacheManifest.load(self.store)
        self._packed = self.manifest.storage != "bfloat16"
        self._fill_values = fill_values(self.manifest.storage)
        planned = self.manifest.num_shards
        found = load_markers(self.store, range(planned), self.manifest)
        self._markers = {marker.shard: marker for marker in found if marker is not None}
        self.complete = len(self._markers) == planned
        if (require_complete and not self.complete) or not self._markers:
            raise CacheError(
                f"{self.store.location}: {len(self._markers)} of {planned} shards are committed; finish it with the "
                "same capture command"
            )
        if not any(marker.samples for marker in self._markers.values()):
            raise CacheError(f"{self.store.location} holds no sample: all that were captured are quarantined")
        self.num_bytes = sum(marker.num_bytes for marker in self._markers.values())
        self._open_shards: OrderedDict[int, _OpenShard] = OrderedDict()
        self._process = os.getpid()
        self._read_index()

    def _read_index(self) -> None:
        self.sample_ids: list[str] = []
        starts, lengths, candidates, shards = [], [], [], []
        for shard, marker in self._markers.items():
            if not marker.samples:
                continue
            place = _Place(self.store, shard_name(shard))
            offsets = self._read_whole(shard, "offsets", place)
            names = self._read_whole(shard, "sample_ids", place).tobytes()
            bounds = self._read_whole(shard, "sample_id_offsets", place).tolist()
            self.sample_ids += [names[a:b].decode() for a, b in pairwise(bounds)]
            starts.append(offsets[:-1])
            lengths.append(np.diff(offsets))
            candidates.append(self._read_whole(shard, "anchor_candidates", place))
            shards.append(np.full(marker.samples, shard, dtype=np.int32))
        self._starts = np.concatenate(starts)
        self.shards = np.concatenate(shards)
        self.lengths = np.concatenate(lengths)
        self.anchor_candidates = np.concatenate(candidates)
        self.num_tokens = int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open_shards": OrderedDict()}

    def read(self, index: int) -> Sample:
        """Read one sample: one contiguous slice of its shard, into memory that belongs to the caller.

        Raises:
            IndexError: no such sample.
            CacheError: an object is missing, truncated or damaged; the message names shard and object.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a cache with {len(self)} samples")
        shard, start = int(self.shards[index]), int(self._starts[index])
        rows = slice(start, start + int(self.lengths[index]))
        with self._place(shard) as place:
            opened = self._opened(shard, place)
            features = torch.from_numpy(self._values(shard, FEATURES, place, opened.features, rows))
        packed = opened.channels is not None
        return Sample(
            sample_id=self.sample_ids[index],
            input_ids=opened.input_ids[rows].copy(),
            loss_mask=opened.loss_mask[rows].copy(),
            features=PackedFeatures(features, opened.channels) if packed else features.view(torch.bfloat16),
        )

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

    @contextmanager
    def _place(self, shard: int) -> Iterator[_Place]:
        """Where to read a shard from: the cache itself, or a copy, which stays as long as the block runs."""
        if self._staging is None:
            yield _Place(self.store, shard_name(shard))
        else:
            with self._staging.pinned(self.store, self._markers[shard]) as copy:
                yield _Place(LocalFolder(copy.parent), copy.name)

    def _opened(self, shard: int, place: _Place) -> _OpenShard:
        if self._process != os.getpid():
            self._open_shards.clear()
            self._process = os.getpid()
        if shard not in self._open_shards:
            self._open_shards[shard] = _OpenShard(
                features=self._open(shard, FEATURES, place),
                channels=torch.from_numpy(self._read_whole(shard, CHANNELS, place)) if self._packed else None,
                input_ids=self._read_whole(shard, "input_ids", place),
                loss_mask=self._read_whole(shard, "loss_mask", place),
            )
            if len(self._open_shards) > MAX_OPEN_SHARDS:
                self._open_shards.popitem(last=False)
        self._open_shards.move_to_end(shard)
        return self._open_shards[shard]

    def _open(self, shard: int, name: str, place: _Place) -> zarr.Array:
        # Zarr keeps no checksum of its metadata; they are small, so their digest is checked here.
        for stored, digest in ((metadata_object(name), True), (data_object(name), False)):
            expected = self._markers[shard].objects[stored]
            fault = object_fault(place.store, f"{place.folder}/{stored}", expected, digest)
            if fault:
                raise self._damaged(shard, stored, place, fault)
        with place.store.naming(f"{place.folder}/{metadata_object(name)}"):
            return open_array(place.store.zarr_store(), place.folder, name)

    def _read_whole(self, shard: int, name: str, place: _Place) -> np.ndarray:
        return self._values(shard, name, place, self._open(shard, name, place), slice(None))

    def _values(self, shard: int, name: str, place: _Place, array: zarr.Array, rows: slice) -> np.ndarray:
        try:
            with place.store.naming(f"{place.folder}/{data_object(name)}"):
                values = array[rows]
        except CacheError:
            raise  # the store says what is wrong
        except ValueError as error:
            raise self._damaged(shard, data_object(name), place, f"its content is damaged ({error})") from error
        # The object may have vanished since its size was checked.
        if np.array_equal(values.flat[-1], self._fill_values[name], equal_nan=True):
            what = "it was removed or emptied after the cache was opened"
            raise self._damaged(shard, data_object(name), place, what)
        return values

    def _damaged(self, shard: int, name: str, place: _Place, what: str) -> CacheError:
        if place.store is self.store:
            return damaged(self.store, shard, name, what)
        return CacheError(
            f"shard {shard:06d}, object {name}: {what}, in the staged copy {place.store.location}/{place.folder}. "
            "Remove that folder; the shard is downloaded again when it is next needed."
        )
