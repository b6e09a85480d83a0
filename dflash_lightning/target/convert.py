"""Turn a `.gguf` target into a plain transformers folder, once."""

import json
import os
import shutil
import uuid
from pathlib import Path

import torch

from dflash_lightning.errors import TargetError
from dflash_lightning.target.files import TargetFiles, find_target, quiet_transformers
from dflash_lightning.target.identity import weights_sha256
from dflash_lightning.target.loading import load_target, load_tokenizer

ORIGIN_FILE = "converted_from.json"


def convert_gguf(gguf: str | Path, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a GGUF target as a transformers folder: config, safetensors, tokenizer, generation config.

    The folder appears whole or not at all: it is written beside its place and then renamed. A folder that holds
    this very conversion already is left as it is, so calling this again costs nothing.

    Args:
        gguf: The `.gguf` file.
        folder: Folder to make.
        dtype: Data type of the dequantised weights.

    Returns:
        The folder.

    Raises:
        TargetError: The file can't be read, its architecture isn't supported, or the folder holds something else.
    """
    files, folder = find_target(gguf), Path(folder)
    if files.gguf is None:
        raise TargetError(f"Can't convert {str(gguf)!r}: expected the path of a .gguf file.")
    origin = {"file": files.gguf, "weights_sha256": weights_sha256(files), "dtype": str(dtype).removeprefix("torch.")}
    if _holds(folder, origin):
        return folder
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.partial"
    partial.mkdir(parents=True)
    try:
        _write(files, partial, dtype)
        (partial / ORIGIN_FILE).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        try:
            os.rename(partial, folder)
        except OSError:  # another process may have finished the same conversion meanwhile
            if not _holds(folder, origin):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write(files: TargetFiles, folder: Path, dtype: torch.dtype) -> None:
    path = str(files.folder / files.gguf)
    model = load_target(path, dtype=dtype)
    with quiet_transformers():
        model.save_pretrained(folder)
        load_tokenizer(path).save_pretrained(folder)
        model.generation_config.save_pretrained(folder)


def _holds(folder: Path, origin: dict[str, str]) -> bool:
    """Whether `folder` is this conversion; False if it is free; an error if something else is in the way."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    record = folder / ORIGIN_FILE
    found = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else None
    if found == origin:
        return True
    held = "something that no conversion wrote" if found is None else f"the conversion of another file or type: {found}"
    raise TargetError(f"{folder} holds {held}; expected {origin}. Choose another folder, or remove this one.")
