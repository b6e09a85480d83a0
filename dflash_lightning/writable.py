"""Whether a place can be written, found out before the work that is to end up there."""

import errno
import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from dflash_lightning.errors import ConfigError

_ELSEWHERE = "Choose another place"
_FREE_SOME = "Free some space, and give the same command again: what was finished is kept"
ADVICE = {
    errno.ENOSPC: _FREE_SOME,
    errno.EDQUOT: _FREE_SOME,
    errno.EACCES: f"{_ELSEWHERE}, or ask for the permission",
    errno.EPERM: f"{_ELSEWHERE}, or ask for the permission",
    errno.EROFS: f"{_ELSEWHERE}: nothing can be written on this file system",
    errno.ENAMETOOLONG: "Give a shorter name",
    errno.ENOTDIR: f"{_ELSEWHERE}: there is a file where a folder is expected",
    errno.EEXIST: f"{_ELSEWHERE}: there is something of that name already",
    errno.EISDIR: "Give the name of a file: there is a folder of that name",
    errno.ENOENT: "Check the path",
    errno.EMFILE: "Allow more open files: `ulimit -n 65536`",
}
"""What to do about an error of the file system, by its number; all others are faults of ours."""


def advised(error: OSError) -> str | None:
    """What happened to which file, and what to do; None of an error that a user can't have caused."""
    if error.errno not in ADVICE:
        return None
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror}. {ADVICE[error.errno]}."


def check_writable(setting: str, path: Path, *, folder: bool) -> None:
    """Refuse a file or folder that couldn't be written, before anything is computed for it. Nothing is left behind.

    Args:
        setting: what the user calls it.
        path: it needn't exist, nor need the folders above it.
        folder: whether files are to be made in it; or else it is a file, which is written beside its place and renamed.

    Raises:
        ConfigError: it is of the other kind, or the nearest folder that exists can't be written.
    """
    place = path.absolute()
    try:
        if not folder:
            if place.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            _is_there(place.with_name(f".{place.name}.partial"))  # that name may be too long
            place = place.parent
        TemporaryFile(dir=next(place for place in (place, *place.parents) if _is_there(place))).close()
    except OSError as error:
        reason = ADVICE.get(error.errno, _ELSEWHERE)
        raise ConfigError(f"{setting} is {path}, where nothing can be written: {error.strerror}. {reason}.") from error


def _is_there(path: Path) -> bool:
    """Whether there is something of this name, be it a link to nothing. Raises OSError where that can't be told."""
    with suppress(FileNotFoundError):
        path.lstat()
        return True
    return False
