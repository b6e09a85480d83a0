"""Folders that take their names only when they are whole, and what is left of those that never were."""

import errno
import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from dflash_lightning.durable import sync_folder, sync_tree
from dflash_lightning.errors import ExportError
from dflash_lightning.progress import inform


@contextmanager
def unfinished_folder(folder: Path) -> Iterator[Path]:
    """A folder beside ``folder``, which is removed when the block ends unless it was renamed.

    It is locked meanwhile: what an export that was killed has left there isn't, and is removed first. Not seen, and so
    left, is what another host has written, as most network file systems show a lock on its own host only, and anything
    on a file system that has no locks of folders.
    """
    partial = folder.parent / _partial_name(folder.name, uuid.uuid4().hex)
    with ExitStack() as held:
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder.parent, fcntl.LOCK_EX):  # two exports at once: neither takes the other's for left
                _sweep(folder)
                partial.mkdir()
                held.callback(shutil.rmtree, partial, ignore_errors=True)
                held.enter_context(_locked(partial, fcntl.LOCK_EX))
        yield partial


def take_names(folders: Mapping[Path, Path]) -> None:
    """Rename folders, all or none, once all are on disk."""
    for partial, folder in folders.items():
        with writing(folder):
            sync_tree(partial)
    with ExitStack() as renamed:
        for partial, folder in folders.items():
            with writing(folder):
                _rename(partial, folder)
                renamed.callback(shutil.rmtree, folder, ignore_errors=True)
                sync_folder(folder.parent)
        renamed.pop_all()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the disk refuses becomes an ExportError of the folder that was to be made."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{folder} can't be written: {error}. Nothing was left there.") from error


def _rename(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise ExportError(
            f"{folder} was made by another export in the meantime, and stands; nothing was left of this one. Choose "
            "another folder."
        ) from error


def _partial_name(name: str, ending: str) -> str:
    return f".{name}.{os.uname().nodename}-{ending}.partial"


def _sweep(folder: Path) -> None:
    """Remove what killed exports of ``folder`` have left beside it; what can't be removed is named, and stays."""
    for left in folder.parent.glob(_partial_name(glob.escape(folder.name), "[0-9a-f]" * 32)):
        if left.is_dir():
            try:
                with _locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB) as dead:
                    if dead:
                        shutil.rmtree(left)
            except FileNotFoundError:  # finished in the meantime
                continue
            except OSError as error:
                inform(f"{left}, which an export has left, can't be removed: {error}. Remove it if none writes there.")


@contextmanager
def _locked(folder: Path, operation: int) -> Iterator[bool]:
    """Hold a lock of a folder, which goes with the process at the latest.

    Yields whether it is held; it isn't if another process has it, or the file system has no locks of folders.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        held = False
        with suppress(OSError):
            fcntl.flock(descriptor, operation)
            held = True
        yield held
    finally:
        os.close(descriptor)
