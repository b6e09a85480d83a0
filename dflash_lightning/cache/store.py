"""Where a cache lies: the one interface through which everything else reads and writes it, and the local folder."""

import errno
import hashlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from dflash_lightning.cache.byte_ranges import MappedFile, ObjectReader
from dflash_lightning.durable import sync_folder, sync_tree, write_synced
from dflash_lightning.errors import CacheError

TEMPORARY_PREFIX = ".tmp-"
MARKER = "COMMITTED"
PART_BYTES = 2**20
CAPTURE_AGAIN = "The shards committed so far are kept: free some space and run the same capture command again."


class CacheStore(ABC):
    """Objects by name. Names are relative to the cache and use "/": "manifest.json", "shards/000042/COMMITTED".

    Beside single objects there are committed folders: all objects under one name, which count only once the marker
    `COMMITTED` is among them, the last to be written. A store can be pickled and used in another process.

    Attributes:
        location: path or URL of the cache, for messages.
        concurrency: how many objects are worth handling at a time.
    """

    location: str
    concurrency: int

    @abstractmethod
    def make(self) -> None:
        """Make the place itself, where that is needed."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of an object; FileNotFoundError if there is none."""

    @abstractmethod
    def open_object(self, name: str) -> ObjectReader:
        """An object for reading ranges of it, in this process; FileNotFoundError if there is none."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write an object in one step; readers see the old content or the new one."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; of several processes exactly one succeeds.

        Returns:
            Whether this call wrote it. After either answer a whole object is there.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of an object; FileNotFoundError if there is none."""

    @abstractmethod
    def parts(self, name: str, size: int) -> Iterator[memoryview]:
        """The content of an object of `size` bytes in pieces, in order, so that memory is bounded."""

    @abstractmethod
    def entries(self) -> list[str]:
        """Names of what lies directly in the cache, sorted."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Space for what is still to be written; None if nothing is known of a limit."""

    @abstractmethod
    def prepared(self, folder: str, owner: str, needed: int) -> AbstractContextManager[Path]:
        """A new path on a local disk at which the caller makes `folder`; what is there at the end is removed.

        Args:
            folder: name of the committed folder to be.
            owner: tells the writers of one cache apart, by rank and process.
            needed: bytes that it may take (an upper bound), for the message when the disk is full.
        """

    @abstractmethod
    def commit(self, prepared: Path, folder: str, marker: bytes) -> None:
        """Publish every file below `prepared` as `folder`, then the marker.

        Raises:
            CacheError: another process committed or changed the same folder meanwhile.
        """

    @abstractmethod
    def sweep(self, folder: str) -> list[str]:
        """Remove what dead writers left of an uncommitted folder; return what was removed. For its writer only."""

    @abstractmethod
    def remove(self, folder: str) -> None:
        """Remove a folder, committed or not, its marker first; nothing happens if there is none."""

    @abstractmethod
    def sweep_unfinished(self, name: str) -> None:
        """Remove what writers that were killed left of an object; one that is alive writes it again."""

    def sha256(self, name: str) -> str:
        """SHA-256 (hex) of an object's content, read in pieces; FileNotFoundError if there is none."""
        digest = hashlib.sha256()
        for part in self.parts(name, self.size(name)):
            digest.update(part)
        return digest.hexdigest()

    def contested(self, folder: str) -> CacheError:
        """The error when two processes write one folder."""
        return CacheError(
            f"{folder} of {self.location} is being written by another process as well; run one capture at a time"
        )


class LocalFolder(CacheStore):
    """A cache in a folder of this machine or of a file system that all nodes share.

    What is reported as written was synced to the disk. A folder appears by a rename and its marker by another.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.location = str(path)
        self.concurrency = 2

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from error

    def open_object(self, name: str) -> MappedFile:
        return MappedFile(self.path / name)

    def replace(self, name: str, data: bytes) -> None:
        try:
            self._write(name, data, os.replace)
        except FileNotFoundError:
            # A writer that was just starting swept what this one had begun.
            self._write(name, data, os.replace)

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._write(name, data, os.link)
        except FileExistsError:
            return False
        except FileNotFoundError:
            # Another writer was first, and swept what this one had begun.
            if not (self.path / name).exists():
                raise
            return False
        return True

    def _write(self, name: str, data: bytes, publish) -> None:
        path = self.path / name
        temporary = self._temporary(name, f"{os.uname().nodename}-{os.getpid()}")
        with space_needed(self.path, len(data)), removed_afterwards(temporary):
            write_synced(temporary, data)
            publish(temporary, path)
            sync_folder(path.parent)

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def parts(self, name: str, size: int) -> Iterator[memoryview]:
        with (self.path / name).open("rb", buffering=0) as file:
            for start in range(0, size, PART_BYTES):
                yield memoryview(file.read(min(PART_BYTES, size - start)))

    def entries(self) -> list[str]:
        return sorted(entry.name for entry in self.path.iterdir())

    def free_bytes(self) -> int:
        existing = next(folder for folder in (self.path.absolute(), *self.path.absolute().parents) if folder.exists())
        return shutil.disk_usage(existing).free

    @contextmanager
    def prepared(self, folder: str, owner: str, needed: int) -> Iterator[Path]:
        path = self._temporary(folder, owner)
        with space_needed(self.path, needed), removed_afterwards(path):
            if not path.parent.exists():
                path.parent.mkdir(exist_ok=True)
                sync_folder(self.path)
            try:
                yield path
            except FileNotFoundError as error:
                # Nobody but another writer of this folder removes what is written here.
                raise self.contested(folder) from error

    def commit(self, prepared: Path, folder: str, marker: bytes) -> None:
        # The marker is on disk before the rename, so that space can't run out after it.
        sync_tree(prepared)
        unnamed = f"{TEMPORARY_PREFIX}{MARKER}"
        write_synced(prepared / unnamed, marker)
        final = self.path / folder
        try:
            os.rename(prepared, final)
        except OSError as error:
            if final.exists():
                raise self.contested(folder) from error
            raise
        sync_folder(final.parent)
        os.rename(final / unnamed, final / MARKER)
        sync_folder(final)

    def sweep(self, folder: str) -> list[str]:
        pattern = self._temporary(folder, "*")
        leftovers = sorted(pattern.parent.glob(pattern.name))
        final = self.path / folder
        if final.exists() and not (final / MARKER).exists():
            leftovers.append(final)
        for leftover in leftovers:
            try:
                shutil.rmtree(leftover)
            except FileNotFoundError as error:
                # What is left by the dead doesn't move.
                raise self.contested(folder) from error
        return [leftover.relative_to(self.path).as_posix() for leftover in leftovers]

    def remove(self, folder: str) -> None:
        final = self.path / folder
        if final.exists():
            (final / MARKER).unlink(missing_ok=True)
            sync_folder(final)
            shutil.rmtree(final)
            sync_folder(final.parent)

    def sweep_unfinished(self, name: str) -> None:
        pattern = self._temporary(name, "*")
        for leftover in pattern.parent.glob(pattern.name):
            leftover.unlink(missing_ok=True)

    def _temporary(self, name: str, owner: str) -> Path:
        """Where `owner` prepares an object or a folder; with owner "*" the pattern of all of them."""
        final = self.path / name
        return final.with_name(f"{TEMPORARY_PREFIX}{final.name}-{owner}")


def files_below(folder: Path) -> list[Path]:
    """Every file below `folder`, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


@contextmanager
def removed_afterwards(path: Path) -> Iterator[None]:
    """Remove the file or folder `path` whatever happens, if it is there."""
    try:
        yield
    finally:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def space_needed(folder: Path, needed: int, advice: str = CAPTURE_AGAIN) -> Iterator[None]:
    """Make a CacheError of a disk that is full (with bytes needed, an upper bound, and free) or can't be written to.

    Args:
        folder: an existing folder on the file system in question.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EIO, errno.ESTALE):
            raise CacheError(f"{folder} can't be written to: {os.strerror(error.errno)}. {advice}") from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(folder).free
        raise CacheError(
            f"no space left in {folder}: up to {needed:,} bytes needed, {free:,} bytes free "
            f"({os.strerror(error.errno)}). {advice}"
        ) from error
