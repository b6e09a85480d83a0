"""Prompts and settings of short `prepare` runs."""

import json
from pathlib import Path

PROMPTS = ["Hi", "Count to three, please.", "a", "Which way is north?", "One more, a bit longer than the others were."]
SETTINGS = {"max_new_tokens": 24, "batch_size": 2, "dtype": "float32", "device": "cpu"}


def write_rows(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
