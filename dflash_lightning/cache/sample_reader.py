"""Reading samples whose place is known: all that a data worker needs of a cache."""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dflash_lightning.cache.arrays import CHANNELS, FEATURES, data_object, metadata_object
from dflash_lightning.cache.manifest import CacheManifest
from dflash_lightning.cache.packing import PackedFeatures
from dflash_lightning.cache.samples import Sample
from dflash_lightning.cache.shards import ShardMarker, damaged, shard_name, source_digest
from dflash_lightning.cache.staging import StagedCopies, StagingArea, StagingSettings
from dflash_lightning.cache.storage import packed_bits
from dflash_lightning.cache.store import MARKER, CacheStore
from dflash_lightning.cache.stored_arrays import FeatureRows, read_array
from dflash_lightning.errors import CacheError

# A bound on memory and open files: an open shard holds its token ids and mask (5 bytes a token).
MAX_OPEN_SHARDS = 256


class SampleLocation(NamedTuple):
    """Where a sample lies."""

    sample_id: str
    shard: int
    start: int
    """First row in its shard."""
    length: int
    """Rows, one a token."""
    source: bytes
    """`source_digest` of the shard that this location was taken from."""


class _Place(NamedTuple):
    """Where the objects of a shard are read from: the cache, or a copy in the staging area."""

    store: CacheStore
    folder: str


@dataclass(frozen=True, slots=True)
class _OpenShard:
    place: AbstractContextManager[_Place] | None
    """Where it is read from; None if a staged copy has to be pinned for every read."""
    features: FeatureRows
    channels: torch.Tensor | None
    input_ids: np.ndarray
    loss_mask: np.ndarray
    marker: ShardMarker
    source: bytes


class SampleReader:
    """Reads samples of committed shards. Small to pickle; shards open on first use, anew in each process.

    A shard's marker is read when the shard opens. Everything but the features is then read whole and compared with its
    SHA-256; the features with their size, and with CRC-32C as they are read (`FeatureRows`).
    """

    def __init__(
        self,
        store: CacheStore,
        manifest: CacheManifest,
        staging: StagingSettings = StagingSettings(),  # noqa: B008
    ):
        self.store, self.manifest = store, manifest
        self._staging = StagingArea(staging) if staging.folder else None
        self._open_shards: OrderedDict[int, _OpenShard] = OrderedDict()
        self._process = os.getpid()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open_shards": OrderedDict()}

    def read(self, location: SampleLocation) -> Sample:
        """Read one sample into memory that belongs to the caller.

        Raises:
            CacheError: an object is missing, truncated or damaged, with shard and object; or the shard was written anew
                after the index that knew this location.
        """
        shard, stop = location.shard, location.start + location.length
        opened = self._opened_before(shard)
        marker = opened.marker if opened else self._load_marker(shard)
        with (opened and opened.place) or self._place(marker) as place:
            opened = opened or self._open(marker, place)
            if opened.source != location.source:
                raise CacheError(
                    f"shard {shard:06d} of {self.store.location} was written anew after the cache was indexed. Stop "
                    "what uses the cache, run `dflash-lightning cache verify --repair` on it and start again."
                )
            try:
                features = torch.from_numpy(opened.features.read(location.start, stop))
            except FileNotFoundError as error:
                raise self._damaged(place, shard, data_object(FEATURES), "it was removed while in use") from error
            except CacheError:  # a ValueError too; it says already what failed
                raise
            except ValueError as error:
                what = f"its content is damaged ({error})"
                raise self._damaged(place, shard, data_object(FEATURES), what) from error
        packed = opened.channels is not None
        return Sample(
            sample_id=location.sample_id,
            input_ids=opened.input_ids[location.start : stop].copy(),
            loss_mask=opened.loss_mask[location.start : stop].copy(),
            features=PackedFeatures(features, opened.channels) if packed else features.view(torch.bfloat16),
        )

    def read_array(self, marker: ShardMarker, name: str) -> np.ndarray:
        """All values of an array other than the features, from the cache itself; they can't be changed.

        Raises:
            CacheError: an object is missing or damaged, with shard and object.
        """
        return self._read_array(_Place(self.store, shard_name(marker.shard)), marker, name)

    def _place(self, marker: ShardMarker) -> AbstractContextManager[_Place]:
        """Where to read a shard from. A staged copy stays as long as the block runs."""
        if self._staging is None:
            return nullcontext(_Place(self.store, shard_name(marker.shard)))
        return self._staged_place(self._staging, marker)

    @contextmanager
    def _staged_place(self, staging: StagingArea, marker: ShardMarker) -> Iterator[_Place]:
        with staging.pinned(self.store, marker) as copy:
            yield _Place(StagedCopies(copy.parent), copy.name)

    def _opened_before(self, shard: int) -> _OpenShard | None:
        if self._process != os.getpid():
            self._open_shards.clear()
            self._process = os.getpid()
        opened = self._open_shards.get(shard)
        if opened is not None:
            self._open_shards.move_to_end(shard)
        return opened

    def _load_marker(self, shard: int) -> ShardMarker:
        marker = ShardMarker.load(self.store, shard, self.manifest)
        if marker is None:
            raise damaged(self.store, shard, MARKER, "it is missing")
        return marker

    def _open(self, marker: ShardMarker, place: _Place) -> _OpenShard:
        packed = packed_bits(self.manifest.storage) is not None
        opened = _OpenShard(
            place=nullcontext(place) if self._staging is None else None,
            features=self._feature_rows(place, marker),
            channels=torch.from_numpy(self._read_array(place, marker, CHANNELS).copy()) if packed else None,
            input_ids=self._read_array(place, marker, "input_ids"),
            loss_mask=self._read_array(place, marker, "loss_mask"),
            marker=marker,
            source=source_digest(marker),
        )
        self._open_shards[marker.shard] = opened
        if len(self._open_shards) > MAX_OPEN_SHARDS:
            self._open_shards.popitem(last=False)
        return opened

    def _feature_rows(self, place: _Place, marker: ShardMarker) -> FeatureRows:
        metadata, name = self._object(place, marker, metadata_object(FEATURES)), data_object(FEATURES)
        try:
            stored = place.store.open_object(f"{place.folder}/{name}")
            self._check_size(place, marker, name, stored.size)
            return FeatureRows(metadata, stored)
        except FileNotFoundError as error:
            raise self._damaged(place, marker.shard, name, "it is missing") from error
        except CacheError:  # a ValueError too; it says already what failed
            raise
        except ValueError as error:
            raise self._damaged(place, marker.shard, name, f"its content is damaged ({error})") from error

    def _read_array(self, place: _Place, marker: ShardMarker, name: str) -> np.ndarray:
        metadata, data = (self._object(place, marker, of(name)) for of in (metadata_object, data_object))
        return read_array(metadata, data)

    def _object(self, place: _Place, marker: ShardMarker, name: str) -> bytes:
        """The content of an object, compared with its digest."""
        try:
            data = place.store.read(f"{place.folder}/{name}")
        except FileNotFoundError as error:
            raise self._damaged(place, marker.shard, name, "it is missing") from error
        self._check_size(place, marker, name, len(data))
        if hashlib.sha256(data).hexdigest() != marker.objects[name].sha256:
            what = "its content changed since it was committed (SHA-256)"
            raise self._damaged(place, marker.shard, name, what)
        return data

    def _check_size(self, place: _Place, marker: ShardMarker, name: str, size: int) -> None:
        expected = marker.objects[name].bytes
        if size != expected:
            what = f"it has {size:,} bytes, committed were {expected:,}"
            raise self._damaged(place, marker.shard, name, what)

    def _damaged(self, place: _Place, shard: int, name: str, what: str) -> CacheError:
        if place.store is self.store:
            return damaged(self.store, shard, name, what)
        return CacheError(
            f"shard {shard:06d}, object {name}: {what}, in the staged copy {place.store.location}/{place.folder}. "
            "Remove that folder; the shard is downloaded again when it is next needed."
        )
