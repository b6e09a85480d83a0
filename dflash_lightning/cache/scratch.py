"""Local folders in which shards are prepared before they are uploaded. What the dead left is swept by the living."""

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_lightning.cache.locks import FileLock

PREFIX = "dflash-upload-"


@contextmanager
def scratch_folder(parent: Path | None, owner: str) -> Iterator[Path]:
    """A new folder below `parent` (default: the system's temporary folder), removed at the end.

    It is locked while it is used, so that whoever comes next can tell the folders of killed processes and remove them.
    """
    parent = parent or Path(tempfile.gettempdir())
    _sweep(parent)
    folder = parent / f"{PREFIX}{owner}-{uuid.uuid4().hex[:8]}"
    lock = FileLock(folder.with_suffix(".lock"))
    lock.acquire(shared=False, wait=True)
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        _remove(folder, lock)


def _sweep(parent: Path) -> None:
    for file in parent.glob(f"{PREFIX}*.lock"):
        lock = FileLock(file)
        try:
            free = lock.acquire(shared=False, wait=False)
        except PermissionError:
            continue  # another user's
        if free:
            _remove(file.with_suffix(""), lock)


def _remove(folder: Path, lock: FileLock) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.path.unlink(missing_ok=True)
    lock.release()
