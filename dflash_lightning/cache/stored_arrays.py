"""Values of a shard's arrays from their stored objects: what Zarr defines, without what it costs on each read.

`zarr.Array` takes about a millisecond for a slice, which is longer than it takes to copy a sample. Arrays of this
format have one object each, so a few lines of the specification are enough to read them.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import google_crc32c
import numcodecs.blosc
import numcodecs.zstd
import numpy as np

from dflash_lightning.cache.byte_ranges import MappedFile, ObjectReader

CRC_BYTES = 4
DECOMPRESS: dict[str, Callable] = {"blosc": numcodecs.blosc.decompress, "zstd": numcodecs.zstd.decompress}


@dataclass(frozen=True)
class _Chunks:
    """How an array is cut and encoded, from its metadata."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: np.dtype
    decompress: Callable | None

    @classmethod
    def parse(cls, metadata: bytes) -> "_Chunks":
        fields = json.loads(metadata)
        chunk_shape, codecs = fields["shape"], fields["codecs"]
        if codecs[0]["name"] == "sharding_indexed":
            chunk_shape, codecs = (codecs[0]["configuration"][key] for key in ("chunk_shape", "codecs"))
        names = [codec["name"] for codec in codecs]
        assert (names[0], names[-1]) == ("bytes", "crc32c"), names
        decompress = DECOMPRESS[names[1]] if len(names) == 3 else None
        dtype = np.dtype(fields["data_type"]).newbyteorder("<")
        return cls(tuple(fields["shape"]), tuple(chunk_shape), dtype, decompress)

    @property
    def num_bytes(self) -> int:
        """Of a decoded chunk."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    def decode(self, data: np.ndarray) -> np.ndarray:
        """The values of a chunk whose checksum was cut off."""
        plain = data if self.decompress is None else self.decompress(data)
        return np.frombuffer(plain, dtype=self.dtype).reshape(self.chunk_shape)

    def decode_all(self, stored: np.ndarray, bounds: list[int]) -> Iterable[np.ndarray]:
        """The values of several chunks.

        Args:
            stored: their bytes, one chunk after the other, each with its checksum.
            bounds: first byte of each and end of the last, from wherever counted.
        """
        if self.decompress is None:  # all as views, in one step
            size, row, item = bounds[1] - bounds[0], self.chunk_shape[1] * self.dtype.itemsize, self.dtype.itemsize
            return np.ndarray((len(bounds) - 1, *self.chunk_shape), self.dtype, stored, strides=(size, row, item))
        cuts = (slice(begin - bounds[0], end - bounds[0] - CRC_BYTES) for begin, end in pairwise(bounds))
        return (self.decode(stored[cut]) for cut in cuts)


def read_array(metadata: bytes, data: bytes) -> np.ndarray:
    """All values of an array that is one chunk; they can't be changed.

    Args:
        metadata: its `zarr.json`.
        data: its data object. The caller compared both with their digests.
    """
    return _Chunks.parse(metadata).decode(np.frombuffer(data, dtype=np.uint8)[:-CRC_BYTES])


class FeatureRows:
    """Random access to the rows of an array [N, width], an outer shard of chunks of whole rows.

    The chunks that hold the rows are read as one range and decoded. The CRC-32C of a chunk is checked whenever it is
    read anew. Bytes of a file that stays mapped into memory are checked when this process first uses them; of
    uncompressed chunks, nothing is left to do then but to copy the rows.
    """

    def __init__(self, metadata: bytes, stored: ObjectReader):
        """
        Args:
            metadata: the array's `zarr.json`; the caller compared it with its digest.
            stored: reads its data object.

        Raises:
            ValueError: the table of chunks is damaged.
        """
        self._encoding, self._stored = _Chunks.parse(metadata), stored
        self._chunk_rows, _ = self._encoding.chunk_shape
        self._bounds = self._read_bounds(-(-self._encoding.shape[0] // self._chunk_rows))
        self._checked = bytearray(len(self._bounds) - 1)
        self._file = stored if isinstance(stored, MappedFile) else None
        plain = self._file is not None and self._encoding.decompress is None
        self._mapped = self._encoding.decode_all(stored.read(0, self._bounds[-1]), self._bounds) if plain else None

    def _read_bounds(self, chunks: int) -> list[int]:
        """First byte of each chunk, and the end of the last."""
        end = self._stored.size
        table = self._stored.read(max(0, end - 16 * chunks - CRC_BYTES), end)
        _check(table, "the table of chunks")
        places = np.frombuffer(table[:-CRC_BYTES], dtype="<u8").reshape(-1, 2).astype(np.int64)
        bounds = np.concatenate([[0], np.cumsum(places[:, 1])])
        if len(places) != chunks or (places[:, 0] != bounds[:-1]).any():
            raise ValueError("its chunks don't follow each other")
        if self._encoding.decompress is None and (places[:, 1] != self._encoding.num_bytes + CRC_BYTES).any():
            raise ValueError("its chunks have other sizes than its shape says")
        return bounds.tolist()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop`, at least one, in memory that belongs to the caller.

        Raises:
            ValueError: a chunk is damaged.
        """
        first, last = start // self._chunk_rows, (stop - 1) // self._chunk_rows
        parts = list(self._read_chunks(first, last))
        parts[-1] = parts[-1][: stop - last * self._chunk_rows]
        parts[0] = parts[0][start - first * self._chunk_rows :]
        return np.concatenate(parts)

    def _read_chunks(self, first: int, last: int) -> Iterable[np.ndarray]:
        """The values of the chunks `first` to `last`, all checked."""
        if self._mapped is not None and self._checked.find(0, first, last + 1) < 0:
            self._file.check_size()
            return self._mapped[first : last + 1]
        bounds = self._bounds[first : last + 2]
        stored = self._stored.read(bounds[0], bounds[-1])
        for chunk, (begin, end) in enumerate(pairwise(bounds), first):
            if not self._checked[chunk]:
                _check(stored[begin - bounds[0] : end - bounds[0]], f"chunk {chunk}")
                self._checked[chunk] = self._file is not None
        return self._encoding.decode_all(stored, bounds)


def _check(data: np.ndarray, what: str) -> None:
    if google_crc32c.value(data[:-CRC_BYTES]) != int.from_bytes(data[-CRC_BYTES:].tobytes(), "little"):
        raise ValueError(f"the checksum of {what} (CRC-32C) doesn't match")
