"""Locks between the processes of one machine, which a killed process can't leave behind."""

import fcntl
import os
from pathlib import Path


class FileLock:
    """A lock on a file (`flock`), shared by many holders or held by one. The kernel returns it when the holder dies.

    The file is made when needed. Whoever holds the lock alone may remove the file; the others then lock a new one.
    Not for network file systems.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, *, shared: bool, wait: bool) -> bool:
        """Take the lock; whether it was free. With `wait` the answer is always True."""
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, kind)
            except BlockingIOError:
                os.close(descriptor)
                return False
            if _is_file(descriptor, self.path):
                self._descriptor = descriptor
                return True
            os.close(descriptor)  # its holder removed the file meanwhile

    def release(self) -> None:
        os.close(self._descriptor)
        self._descriptor = None


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
