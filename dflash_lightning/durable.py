"""Durable files: what was reported as written survives a power cut, and a reader never sees half of it."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there whole or not at all, whatever happens meanwhile; an older one is replaced.

    Text is written as UTF-8.
    """
    partial = path.with_name(f".{path.name}.partial")
    write_synced(partial, content.encode() if isinstance(content, str) else content)
    os.replace(partial, path)
    sync_folder(path.parent)


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


def sync_tree(folder: Path) -> None:
    """Write every file and every name below `folder` through to the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with Path(parent, name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))
