"""The index of a cache: where each sample lies, in one object, so that opening reads neither markers nor shards."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

import numpy as np

from dflash_lightning.cache.manifest import CacheManifest
from dflash_lightning.cache.sample_reader import SampleReader
from dflash_lightning.cache.shards import INDEXED, ShardMarker, source_digest
from dflash_lightning.cache.store import CacheStore
from dflash_lightning.errors import CacheError

INDEX = "index"
INDEX_VERSION = 1
# The content of an index that doesn't count any more.
WITHDRAWN = b""
# Columns with larger items come first and the header is padded, so that every column is aligned.
ALIGNMENT = 8


class UnusableIndex(CacheError):
    """The index of a cache can't be trusted.

    Attributes:
        what: is wrong with it.
    """

    def __init__(self, store: CacheStore, what: str):
        place = store.location
        super().__init__(f"{place}, object {INDEX}: {what}. Run `dflash-lightning cache verify {place} --repair`")
        self.what = what


class SampleIds(Sequence[str]):
    """The ids of n samples in one piece of memory, decoded on demand: a list of str takes 80 bytes for each."""

    def __init__(self, text: np.ndarray, offsets: np.ndarray):
        self._text, self._offsets = text, offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index):
        size = len(self._offsets) - 1
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(size))]
        if not -size <= index < size:
            raise IndexError(f"sample {index} of {size}")
        index %= size
        return self._text[self._offsets.item(index) : self._offsets.item(index + 1)].tobytes().decode()


@dataclass(frozen=True, eq=False)
class SampleIndex:
    """Columns over the n stored samples of a cache, in the plan's order, and over its planned shards.

    Attributes:
        identity_sha256: the manifest's; ties the index to its cache.
        num_bytes: stored bytes of the shards.
        id_hashes: [n] uint64, `id_hash` of each sample.
        id_offsets: [n + 1] int64, first byte of each id in `ids`.
        lengths: [n] int32, tokens.
        anchor_candidates: [n] int32, places for a training block.
        shard_samples: [shards] int32, stored samples; 0 in a shard that isn't committed or stores none.
        sources: [shards, 32] uint8, `source_digest` of each shard; zeros for one that isn't committed.
        ids: [bytes] uint8, the ids in UTF-8, one after the other.
    """

    identity_sha256: str
    num_bytes: int
    id_hashes: np.ndarray
    id_offsets: np.ndarray
    lengths: np.ndarray
    anchor_candidates: np.ndarray
    shard_samples: np.ndarray
    sources: np.ndarray
    ids: np.ndarray

    @classmethod
    def build(
        cls,
        manifest: CacheManifest,
        markers: Sequence[ShardMarker | None],
        reader: SampleReader,
    ) -> "SampleIndex":
        """Make the index of the committed shards.

        Args:
            manifest: of the cache.
            markers: the marker of each planned shard; None for one that isn't committed.
            reader: of the cache.
        """
        committed = [marker for marker in markers if marker is not None]

        def read(marker: ShardMarker) -> dict[str, np.ndarray]:
            return {name: reader.read_array(marker, name) for name in INDEXED}

        with ThreadPoolExecutor(reader.store.concurrency) as pool:
            shards = list(pool.map(read, (marker for marker in committed if marker.samples)))
        hashes = []
        for arrays in shards:
            text, bounds = arrays["sample_ids"].tobytes(), arrays["sample_id_offsets"].tolist()
            hashes += [id_hash(text[a:b]) for a, b in pairwise(bounds)]
        id_lengths = _joined([np.diff(arrays["sample_id_offsets"]) for arrays in shards], np.int64)
        sources = [bytes(32) if marker is None else source_digest(marker) for marker in markers]
        return cls(
            identity_sha256=manifest.identity_sha256,
            num_bytes=sum(marker.num_bytes for marker in committed),
            id_hashes=np.array(hashes, dtype=np.uint64),
            id_offsets=np.concatenate([[0], np.cumsum(id_lengths)]).astype(np.int64),
            lengths=_joined([np.diff(arrays["offsets"]) for arrays in shards], np.int32),
            anchor_candidates=_joined([arrays["anchor_candidates"] for arrays in shards], np.int32),
            shard_samples=np.array([0 if marker is None else marker.samples for marker in markers], dtype=np.int32),
            sources=np.frombuffer(b"".join(sources), dtype=np.uint8).reshape(-1, 32),
            ids=_joined([arrays["sample_ids"] for arrays in shards], np.uint8),
        )

    @property
    def sample_ids(self) -> SampleIds:
        return SampleIds(self.ids, self.id_offsets)

    @property
    def num_committed(self) -> int:
        """Committed shards."""
        return int(self.sources.any(axis=1).sum())

    def shards(self) -> np.ndarray:
        """[n] int32, the shard of each sample."""
        return np.repeat(np.arange(len(self.shard_samples), dtype=np.int32), self.shard_samples)

    def starts(self) -> np.ndarray:
        """[n] int64, the row of its shard at which each sample begins."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        firsts = np.concatenate([[0], np.cumsum(self.shard_samples)])[:-1]
        before = np.concatenate([[0], ends])[firsts]
        return ends - self.lengths - np.repeat(before, self.shard_samples)

    def is_made_from(self, markers: Iterable[ShardMarker | None]) -> bool:
        """Whether it still tells the truth about the shards with these markers."""
        digests = [bytes(32) if marker is None else source_digest(marker) for marker in markers]
        return b"".join(digests) == self.sources.tobytes()

    def dump(self) -> bytes:
        """The object `index`. One index has one serialisation."""
        columns = {name: values for name, values in vars(self).items() if isinstance(values, np.ndarray)}
        header = {
            "index_version": INDEX_VERSION,
            "identity_sha256": self.identity_sha256,
            "num_bytes": self.num_bytes,
            "columns": {name: [values.dtype.newbyteorder("<").str, values.shape] for name, values in columns.items()},
        }
        line = json.dumps(header).encode()
        line += b" " * (-(len(line) + 66) % ALIGNMENT) + b"\n"
        parts = [line, *(np.ascontiguousarray(values).data.cast("B") for values in columns.values() if values.size)]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        return b"".join([digest.hexdigest().encode(), b"\n", *parts])

    @classmethod
    def parse(cls, data: bytes) -> "SampleIndex":
        """Read what `dump` made; the columns are views into `data`.

        Raises:
            CacheError: a byte differs, or another version wrote it.
        """
        if hashlib.sha256(memoryview(data)[65:]).hexdigest().encode() + b"\n" != data[:65]:
            raise CacheError("its checksum doesn't match its content")
        end = data.index(b"\n", 65) + 1
        header = json.loads(data[65:end])
        if header["index_version"] != INDEX_VERSION:
            raise CacheError(f"it has version {header['index_version']}; this version reads {INDEX_VERSION}")
        columns = {}
        for name, (dtype, shape) in header["columns"].items():
            count = int(np.prod(shape))
            columns[name] = np.frombuffer(data, dtype=dtype, count=count, offset=end).reshape(shape)
            end += columns[name].nbytes
        return cls(header["identity_sha256"], header["num_bytes"], **columns)


def load_index(store: CacheStore, manifest: CacheManifest) -> SampleIndex | None:
    """The index that was written when the cache was finished; None if there is none, or it was withdrawn.

    Raises:
        UnusableIndex: it is damaged, or belongs to another cache.
    """
    try:
        data = store.read(INDEX)
    except FileNotFoundError:
        return None
    if data == WITHDRAWN:
        return None
    try:
        index = SampleIndex.parse(data)
    except (CacheError, ValueError) as error:
        raise UnusableIndex(store, f"damaged: {error}") from error
    if index.identity_sha256 != manifest.identity_sha256:
        raise UnusableIndex(store, "it belongs to another cache")
    return index


def withdraw_index(store: CacheStore) -> None:
    """Let the cache open by its shards alone, in one step, before a shard that the index names is removed."""
    try:
        size = store.size(INDEX)
    except FileNotFoundError:
        return
    if size:
        store.replace(INDEX, WITHDRAWN)


def id_hash(sample_id: bytes) -> int:
    """64 bits that follow from a sample's id alone: the first 8 bytes, little endian, of its SHA-256."""
    return int.from_bytes(hashlib.sha256(sample_id).digest()[:8], "little")


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=dtype), *parts]).astype(dtype)
