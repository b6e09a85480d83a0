"""Read a target's embedding table and LM head without the rest of its weights."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from dflash_lightning.errors import TargetError
from dflash_lightning.target.files import TargetFiles, find_target, loading
from dflash_lightning.target.loading import config_of, load_target

EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
HEAD_NAMES = ("lm_head.weight", "embed_out.weight", "output.weight")


def load_tables(name: str, *, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the two tables that a drafter shares with its target.

    A tensor is found by the end of its name and by its width, whatever the prefix (`model.`, `language_model.`, ...).
    A GGUF file, or names that leave a doubt, cost a load of the whole model instead.

    Returns:
        Embedding table [V, H] and LM head [V, H], in `dtype`, on the CPU, without gradients. A tied head is the
        embedding table itself: the same tensor object.

    Raises:
        TargetError: The target can't be loaded, or has an LM head with a bias, which a drafter doesn't have.
    """
    files = find_target(name)
    if files.gguf is not None:
        return _from_model(name, dtype)
    config = config_of(files)
    hidden_size = config.get_text_config().hidden_size
    tied = getattr(config, "tie_word_embeddings", False)
    with loading("tables", files):
        found = _stored_tables(files, hidden_size, tied)
    if found is None:
        return _from_model(name, dtype)
    embedding, head = found
    if tied and torch.equal(embedding, head):
        embedding = head = embedding.to(dtype)
    return embedding.to(dtype), head.to(dtype)


def _stored_tables(files: TargetFiles, hidden_size: int, tied: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The two tables as they are stored, or None if it isn't plain which tensors they are."""
    where = _tensor_files(files)
    embedding = _find(where, EMBEDDING_NAMES, hidden_size)
    head = _find(where, HEAD_NAMES, hidden_size)
    has_bias = any(tensor.endswith("lm_head.bias") for tensor in where)
    if embedding is None or (head is None and not tied) or has_bias:
        return None
    table = _read(where, embedding)
    return table, table if head is None else _read(where, head)


def _from_model(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    model = load_target(name, dtype=dtype)
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise TargetError(f"Target {name!r}: its LM head has a bias. Expected a head that is one [V, H] matrix.")
    embedding_table, head_table = model.get_input_embeddings().weight.data, head.weight.data
    if head.weight is model.get_input_embeddings().weight:
        head_table = embedding_table
    return embedding_table, head_table


def _tensor_files(files: TargetFiles) -> dict[str, Path]:
    """File of every tensor, by the tensor's name."""
    index = files.folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {tensor: files.folder / file for tensor, file in weight_map.items()}
    where = {}
    for path in files.weights:
        with safe_open(path, framework="pt") as tensors:
            where.update(dict.fromkeys(tensors.keys(), path))
    return where


def _find(where: dict[str, Path], endings: tuple[str, ...], hidden_size: int) -> str | None:
    """The one tensor of width `hidden_size` whose name ends so, or None if there isn't exactly one."""
    found = [
        tensor
        for tensor, path in where.items()
        if any(tensor == ending or tensor.endswith(f".{ending}") for ending in endings)
        and _shape(path, tensor)[1:] == [hidden_size]
    ]
    return found[0] if len(found) == 1 else None


def _shape(path: Path, tensor: str) -> list[int]:
    with safe_open(path, framework="pt") as tensors:
        return tensors.get_slice(tensor).get_shape()


def _read(where: dict[str, Path], tensor: str) -> torch.Tensor:
    with safe_open(where[tensor], framework="pt") as tensors:
        return tensors.get_tensor(tensor)
