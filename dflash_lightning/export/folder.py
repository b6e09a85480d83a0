"""Write an exported folder: whole, or not at all."""

import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dflash_lightning.config import DrafterConfig
from dflash_lightning.durable import sync_folder, sync_tree
from dflash_lightning.errors import ExportError
from dflash_lightning.export.card import CARD_FILE, METADATA_FILE, Provenance, metadata, model_card
from dflash_lightning.export.format import Format, TokenIds
from dflash_lightning.export.layout import check_tensors
from dflash_lightning.export.loading import CONFIG_FILE, FORMATS, WEIGHTS_FILE, check_mask_token


def check_free(folder: str | Path) -> None:
    """Refuse a place that holds something: an export never overwrites.

    Raises:
        ExportError: ``folder`` is a file, or a folder that isn't empty.
    """
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise ExportError(
            f"{folder} is not empty, and an export overwrites nothing. Remove it, or choose another folder."
        )
    if folder.exists() and not folder.is_dir():
        raise ExportError(f"{folder} is a file; expected a folder to make.")


def parse_formats(names: str) -> list[Format]:
    """The formats of a comma-separated list, in its order.

    Raises:
        ExportError: a name is unknown, or there is none.
    """
    listed = [name.strip() for name in names.split(",") if name.strip()]
    if not listed or (unknown := [name for name in listed if name not in FORMATS]):
        found = f"unknown format {', '.join(map(repr, unknown))}" if listed else "no format"
        raise ExportError(f"{found} in {names!r}; known are {', '.join(FORMATS)}. Separate several by commas.")
    return [FORMATS[name] for name in dict.fromkeys(listed)]


def export_drafter(
    weights: Mapping[str, Tensor],
    config: DrafterConfig,
    folder: str | Path,
    form: Format | str = "zlab",
    *,
    tokens: TokenIds,
    provenance: Provenance | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write one drafter in one format: `config.json`, `model.safetensors`, `README.md`, `dflash_lightning.json`.

    The folder is written beside its place and then renamed, so that an interrupted export never looks finished.

    Args:
        weights: exactly the drafter's tensors, named as in `Drafter` (its ``state_dict()``).
        folder: folder to make; one that exists must be empty.
        form: the format, or its name.
        tokens: the target's special token ids.
        provenance: what the model card tells of the drafter's making.
        dtype: data type of the exported weights.

    Returns:
        The folder.

    Raises:
        ExportError: the tensors aren't the drafter's, or hold NaN; the format can't express it; the mask token is one
            of ``tokens``; the folder isn't empty; or it can't be written.
    """
    folder = Path(folder)
    if isinstance(form, str):
        form = parse_formats(form)[0]
    check_tensors(weights, config, "The drafter")
    _check_values(weights)
    check_mask_token(config, tokens)
    check_free(folder)
    dtype_name = str(dtype).removeprefix("torch.")
    files = {
        CONFIG_FILE: _json({**form.write_config(config, tokens), "dtype": dtype_name}),
        METADATA_FILE: _json(metadata(config, form, dtype_name, provenance)),
        CARD_FILE: model_card(config, form, dtype_name, provenance),
    }
    tensors = {form.renamed.get(name, name): _exported(tensor, dtype) for name, tensor in weights.items()}
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.partial"
    try:
        partial.mkdir(parents=True)
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
        save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        sync_tree(partial)
        partial.rename(folder)
        sync_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{folder} can't be written: {error}. Nothing was left there.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _check_values(weights: Mapping[str, Tensor]) -> None:
    if broken := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
        raise ExportError(
            f"The drafter's weights hold NaN or infinity: {', '.join(broken)}. Its training diverged; take an earlier "
            "checkpoint."
        )


def _exported(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(device="cpu", dtype=dtype).contiguous()


def _json(values: dict) -> str:
    return json.dumps(values, indent=2) + "\n"
