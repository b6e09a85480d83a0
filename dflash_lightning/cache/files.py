"""Durable files: what was reported as written survives a power cut, and a reader never sees half of it."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_lightning.errors import CacheError

TEMPORARY_PREFIX = ".tmp-"


def dump_record(payload: dict) -> bytes:
    """Serialise `payload` as readable JSON that carries its own SHA-256, so that a flipped byte can't pass.

    The digest (key `sha256`, last) is taken over the same JSON without that key. One payload has one serialisation.
    """
    digest = hashlib.sha256(json.dumps(payload, indent=2).encode()).hexdigest()
    return json.dumps({**payload, "sha256": digest}, indent=2).encode()


def parse_record(data: bytes) -> dict:
    """Return the payload of `dump_record`; CacheError says what is wrong if a single byte differs."""
    try:
        payload = json.loads(data)
    except ValueError as error:
        raise CacheError(f"not valid JSON ({error})") from error
    if not isinstance(payload, dict) or "sha256" not in payload:
        raise CacheError("no checksum in it")
    del payload["sha256"]
    if dump_record(payload) != data:
        raise CacheError("its checksum doesn't match its content")
    return payload


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and its directory entry through to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` (created, renamed) survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_and_digest(folder: Path) -> dict[str, tuple[int, str]]:
    """Sync every file below `folder`; return {relative path: (bytes, sha256 in hex)}, sorted by path."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with path.open("rb") as file:
                os.fsync(file.fileno())
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                found[path.relative_to(folder).as_posix()] = (file.tell(), digest)
        sync_folder(Path(parent))
    return dict(sorted(found.items()))


@contextmanager
def temporary_until_renamed(folder: Path, needed: int, removed: Path) -> Iterator[None]:
    """Remove the temporary `removed` whatever happens; make "no space left" a CacheError with bytes needed and free.

    Args:
        folder: an existing folder on the file system in question.
        needed: bytes that the operation may need (an upper bound).
        removed: temporary file or folder that the operation fills, and renames if it succeeds.
    """
    try:
        try:
            yield
        finally:
            if removed.is_dir():
                shutil.rmtree(removed, ignore_errors=True)
            else:
                removed.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free
        raise CacheError(
            f"no space left in {folder}: up to {needed:,} bytes needed, {free:,} bytes free "
            f"({os.strerror(error.errno)}). The shards committed so far are kept: free some space and run the same "
            "capture command again."
        ) from error
