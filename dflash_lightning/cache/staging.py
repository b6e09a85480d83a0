"""A staging area: whole shards of remote caches, copied to a disk of this machine when they are first read.

All processes of the machine share it, those of several ranks and runs too, and agree by file locks alone: a process may
be killed at any moment and leaves nothing that counts. In a subfolder of its own, beside names of other forms that are
left alone, lie

    area.lock           held while space is given out, and while a copy gets its final name
    KEY/                a whole copy; KEY says what the copy holds, and its bytes
    KEY.lock            shared by those who read the copy; held alone by who makes or removes it. Its time is that of
                        the last use
    .tmp-KEY/           a copy being made or removed
"""

import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflash_lightning.cache.byte_ranges import ReopenedFile
from dflash_lightning.cache.locks import FileLock
from dflash_lightning.cache.shards import ShardMarker, damaged, shard_name
from dflash_lightning.cache.store import TEMPORARY_PREFIX, CacheStore, LocalFolder, space_needed
from dflash_lightning.errors import CacheError, ConfigError

PAUSE = 0.05
SUBFOLDER = "dflash-staging"
# `copy_key`, of a copy that is whole or not; the group is its bytes.
COPY_NAME = re.compile(rf"(?:{re.escape(TEMPORARY_PREFIX)})?[0-9a-f]{{24}}-(\d+)", re.ASCII)


@dataclass(frozen=True)
class StagingSettings:
    """Where copies of remote shards are kept on this machine.

    Args:
        folder: on a local disk, not on a network file system. The copies lie in its subfolder `dflash-staging`; nothing
            else in it is touched. Several runs may share one. Default: none; samples are read straight from the cache.
        max_gb: size of all copies together, in 10^9 bytes. The copies that were not used for longest make room.
        patience: seconds to wait for room while all copies are in use.
    """

    folder: Path | None = None
    max_gb: float = 100.0
    patience: float = 300.0

    def __post_init__(self):
        if not 0 < self.max_gb < math.inf or not 0 <= self.patience < math.inf:
            raise ConfigError(
                f"staging.max_gb is {self.max_gb}, staging.patience {self.patience}; expected more than 0 gigabytes "
                "and at least 0 seconds, both finite."
            )

    @property
    def max_bytes(self) -> int:
        return int(self.max_gb * 1e9)


class StagedCopies(LocalFolder):
    """The copies in a staging area: no file stays open from one read to the next, which would keep its space taken."""

    def open_object(self, name: str) -> ReopenedFile:
        return ReopenedFile(self.path / name)


class StagingArea:
    """Keeps copies of whole shards within a limit. Can be pickled; every process opens its own locks."""

    def __init__(self, settings: StagingSettings):
        self.settings = settings
        self.folder = Path(settings.folder) / SUBFOLDER

    @contextmanager
    def pinned(self, store: CacheStore, marker: ShardMarker) -> Iterator[Path]:
        """A local copy of a shard, downloaded if it isn't there, which nobody removes before the block ends.

        Every object's SHA-256 is checked against the marker as it is downloaded.

        Raises:
            CacheError: the shard alone is larger than the limit; all copies are in use, so that there is no room; an
                object is damaged; or the store can't be reached.
        """
        key = copy_key(marker)
        lock = FileLock(self.folder / f"{key}.lock")
        self._acquire_copy(store, marker, key, lock)
        try:
            os.utime(lock.path)
            yield self.folder / key
        finally:
            lock.release()

    def _acquire_copy(self, store: CacheStore, marker: ShardMarker, key: str, lock: FileLock) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            lock.acquire(shared=True, wait=True)
            if (self.folder / key).is_dir():
                return
            lock.release()
            # The first to hold it alone makes the copy; the others wait for it above.
            if lock.acquire(shared=False, wait=False):
                try:
                    if not (self.folder / key).is_dir():
                        self._make_copy(store, marker, key)
                finally:
                    lock.release()
            else:
                time.sleep(PAUSE)

    def _make_copy(self, store: CacheStore, marker: ShardMarker, key: str) -> None:
        partial = self.folder / f"{TEMPORARY_PREFIX}{key}"
        self._reserve(store, marker, partial)
        try:
            advice = "Free some space, or lower staging.max_gb."
            with space_needed(self.folder, marker.num_bytes, advice), ThreadPoolExecutor(store.concurrency) as pool:
                list(pool.map(lambda name: _download(store, marker, name, partial / name), marker.objects))
            with self._counting():
                partial.rename(self.folder / key)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _reserve(self, store: CacheStore, marker: ShardMarker, partial: Path) -> None:
        """Make room for a shard and claim it, by making the folder `partial`, whose name says its size."""
        shard, needed, limit = f"{store.location}/{shard_name(marker.shard)}", marker.num_bytes, self.settings.max_bytes
        if needed > limit:
            raise CacheError(
                f"{shard} has {needed:,} bytes, the staging area {self.folder} may take {limit:,}. Raise "
                "staging.max_gb, or read without a staging area."
            )
        deadline = time.monotonic() + self.settings.patience
        while True:
            with self._counting():
                used = self._shrink_to(limit - needed, but_not=partial.name)
                if used + needed <= limit:
                    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
                    partial.mkdir()
                    return
            if time.monotonic() > deadline:
                raise CacheError(
                    f"{shard} has {needed:,} bytes and finds no room in the staging area {self.folder}: copies in use "
                    f"take {used:,} of {limit:,} bytes. Raise staging.max_gb, or use fewer data workers."
                )
            time.sleep(PAUSE)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Keep everybody else from adding and renaming copies, so that a list of them misses none."""
        lock = FileLock(self.folder / "area.lock")
        lock.acquire(shared=False, wait=True)
        try:
            yield
        finally:
            lock.release()

    def _copies(self) -> dict[Path, int]:
        """Bytes that each copy takes or may come to take, whole or not. What is called otherwise isn't ours."""
        with os.scandir(self.folder) as entries:
            folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return {self.folder / name: int(match[1]) for name in folders if (match := COPY_NAME.fullmatch(name))}

    def _shrink_to(self, target: int, but_not: str) -> int:
        """Remove copies, the longest unused first, until those left take `target` bytes; what they take now."""
        sizes = {path: size for path, size in self._copies().items() if path.name != but_not}
        used = sum(sizes.values())
        for path in sorted(sizes, key=self._eviction_order):
            partial = path.name.startswith(TEMPORARY_PREFIX)
            if used <= target and not partial:
                break
            lock = self._lock_of(path)
            if lock.acquire(shared=False, wait=False):
                _remove(path, lock)
                used -= sizes[path]
        return used

    def _eviction_order(self, path: Path) -> tuple[bool, float]:
        """What the dead left first, then by last use."""
        lock = self._lock_of(path).path
        return not path.name.startswith(TEMPORARY_PREFIX), lock.stat().st_mtime if lock.exists() else 0.0

    def _lock_of(self, path: Path) -> FileLock:
        return FileLock(self.folder / f"{path.name.removeprefix(TEMPORARY_PREFIX)}.lock")


def copy_key(marker: ShardMarker) -> str:
    """Name of a copy: it follows from the shard's content, so that a shard made anew is another copy."""
    content = ",".join(f"{name}:{stored.bytes}:{stored.sha256}" for name, stored in sorted(marker.objects.items()))
    return f"{hashlib.sha256(content.encode()).hexdigest()[:24]}-{marker.num_bytes}"


def _download(store: CacheStore, marker: ShardMarker, name: str, path: Path) -> None:
    expected, digest = marker.objects[name], hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("wb") as file:
            for part in store.parts(f"{shard_name(marker.shard)}/{name}", expected.bytes):
                digest.update(part)
                file.write(part)
    except FileNotFoundError as error:
        raise damaged(store, marker.shard, name, "it is missing") from error
    if digest.hexdigest() != expected.sha256:
        raise damaged(store, marker.shard, name, "its content changed since it was committed (SHA-256)")


def _remove(copy: Path, lock: FileLock) -> None:
    """Remove a copy whose lock is held alone. The name goes first, so that half a copy never looks whole."""
    partial = copy if copy.name.startswith(TEMPORARY_PREFIX) else copy.with_name(f"{TEMPORARY_PREFIX}{copy.name}")
    if copy != partial:
        shutil.rmtree(partial, ignore_errors=True)
        copy.rename(partial)
    shutil.rmtree(partial, ignore_errors=True)
    lock.path.unlink(missing_ok=True)
    lock.release()
