"""A journal of finished work: appended line by line, readable after a kill at any moment."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from dflash_lightning.errors import DataError

IDENTIFYING_HASHES = ("weights_sha256", "tokenizer_sha256", "chat_template_sha256")


class Journal:
    """Append-only JSONL file whose first line says what the work is, and each further line is one finished piece.

    A line counts once its newline is on disk; a torn last line is cut off when the journal is opened again. One
    process at a time may hold a journal.

    Args:
        path: The file; it is made if it isn't there.
        header: What the work is. It goes into a new journal; `header` of an old one is what stands in the file.

    Raises:
        DataError: Another process holds the journal, or a line that was finished can't be read.
    """

    def __init__(self, path: Path, header: dict[str, Any]):
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError as error:
            self.close()
            raise DataError(
                f"{path.parent}: another process is writing there. Wait for it, or choose another."
            ) from error
        except DataError:
            self.close()
            raise
        if self.header is None:
            self.header = header
            self.append(header)
            self.entries.clear()

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._file, whole)
        self.header, self.entries = read_journal(self.path)

    def append(self, entry: dict[str, Any]) -> None:
        """Add one finished piece; it is on disk when this returns."""
        line = (json.dumps(entry) + "\n").encode()
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)
        self.entries.append(entry)

    def close(self) -> None:
        """Let go of the file; closing twice does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Header (None of an empty journal) and finished pieces of a journal, which another process may be writing.

    Raises:
        DataError: A line that was finished can't be read.
    """
    data = path.read_bytes()
    records = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}, line {number}: damaged ({error}). Remove the file to start this stage again."
            ) from error
    return (records[0] if records else None), records[1:]


def refuse_other_work(record: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare what a folder holds with what is asked for, field by field; a target's name and revision are free.

    Raises:
        DataError: Some fields differ; each is named with both values. Nothing was changed.
    """
    differing = []
    for part, value in wanted.items():
        old = found.get(part)
        fields = IDENTIFYING_HASHES if part == "target" else value if isinstance(value, dict) else None
        if fields is None or not isinstance(old, dict):
            differing += [f"{part}: there {old!r}, asked for {value!r}"] if old != value else []
            continue
        differing += [
            f"{part}.{field}: there {old.get(field)!r}, asked for {value[field]!r}"
            for field in fields
            if old.get(field) != value[field]
        ]
    if differing:
        raise DataError(
            f"{record} belongs to other work: {'; '.join(differing)}. Nothing was changed. "
            "Give the same settings to go on with it, or choose another output."
        )
