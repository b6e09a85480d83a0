"""Reading ranges of one object, many times."""

import mmap
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np


class ObjectReader(ABC):
    """Random access to the bytes of an object that doesn't change.

    Attributes:
        size: bytes of the object when it was opened.
    """

    size: int

    @abstractmethod
    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes `start` to `stop` as uint8, for reading only.

        Raises:
            ValueError: the object changed its size since it was opened.
            FileNotFoundError: it is gone.
        """


class ReopenedFile(ObjectReader):
    """A local file that is opened for each range, so that its space is free as soon as it is removed."""

    def __init__(self, path: Path):
        self._path, self.size = path, path.stat().st_size

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.fromfile(self._path, dtype=np.uint8, count=stop - start, offset=start)


class MappedFile(ObjectReader):
    """A local file mapped into memory: to read a range again gives the same memory.

    The file may be unlinked meanwhile; what is mapped stays.
    """

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self.size = file.seek(0, 2)
            # An empty file can't be mapped.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None
        self._bytes = np.frombuffer(self._map or b"", dtype=np.uint8)

    def read(self, start: int, stop: int) -> np.ndarray:
        self.check_size()
        return self._bytes[start:stop]

    def check_size(self) -> None:
        """Raise a ValueError if the file has another size now."""
        # To touch mapped bytes that the file lost since would kill the process.
        if self._map is not None and self._map.size() != self.size:
            raise ValueError(f"it has {self._map.size():,} bytes now, {self.size:,} when it was opened")
