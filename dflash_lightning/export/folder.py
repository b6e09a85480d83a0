"""Write an exported folder: whole, or not at all."""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_lightning.config import DrafterConfig
from dflash_lightning.errors import ExportError
from dflash_lightning.export.card import (
    CARD_FILE,
    METADATA_FILE,
    ORIGINAL_CARD_FILE,
    Provenance,
    Verification,
    metadata,
    model_card,
)
from dflash_lightning.export.format import Format, TokenIds, Verifier, rope_parameters
from dflash_lightning.export.layout import check_tensors
from dflash_lightning.export.loading import CONFIG_FILE, FORMATS, WEIGHTS_FILE, check_mask_token, read_drafter
from dflash_lightning.export.unfinished import take_names, unfinished_folder, writing
from dflash_lightning.writable import check_writable


def check_free(folder: str | Path) -> None:
    """Refuse a place that holds something: an export never overwrites.

    Raises:
        ExportError: ``folder`` is a file, or a folder that isn't empty.
        ConfigError: it can't be written.
    """
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise ExportError(
            f"{folder} is not empty, and an export overwrites nothing. Remove it, or choose another folder."
        )
    if folder.exists() and not folder.is_dir():
        raise ExportError(f"{folder} is a file; expected a folder to make.")
    check_writable("output", folder.parent, folder=True)  # it is prepared there


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
    verifier: Verifier | None = None,
) -> Path:
    """`export_formats` of one format, or its name; returns the folder."""
    if isinstance(form, str):
        [form] = parse_formats(form)
    [folder] = export_formats(
        weights,
        config,
        {form.name: Path(folder)},
        tokens=tokens,
        provenance=provenance,
        dtype=dtype,
        verifier=verifier,
    )
    return folder


def export_formats(
    weights: Mapping[str, Tensor],
    config: DrafterConfig,
    folders: Mapping[str, Path],
    *,
    tokens: TokenIds,
    provenance: Provenance | None,
    dtype: torch.dtype,
    verifier: Verifier | None,
    original_card: bytes | None = None,
    verify: Callable[[dict[str, Path]], Verification] | None = None,
) -> list[Path]:
    """Write one drafter as folders, each of `config.json`, `model.safetensors`, `README.md`, `dflash_lightning.json`.

    Each folder is written beside its place, read back and compared. Only when all are good and on disk they take
    their names, all or none, so that an export that was interrupted or refused never looks finished.

    Args:
        weights: exactly the drafter's tensors, named as in `Drafter` (its ``state_dict()``).
        folders: folder to make for each format, by the format's name; one that exists must be empty.
        tokens: the target's special token ids.
        provenance: what the model card tells of the drafter's making.
        dtype: data type of the exported weights.
        verifier: what formats that carry a part of the target take from it.
        original_card: the model card of the folder that it is converted from, if somebody else wrote that.
        verify: called with the written folders, which don't have their names yet; may refuse them by an ExportError.

    Returns:
        The folders.

    Raises:
        ExportError: the tensors aren't the drafter's, or hold NaN, or infinity in ``dtype``; a format can't express it;
            the mask token is one of ``tokens``; a folder isn't empty, can't be written, or doesn't hold what was
            written.
    """
    check_tensors(weights, config, "The drafter")
    check_mask_token(config, tokens)
    for folder in folders.values():
        check_free(folder)
    name = str(dtype).removeprefix("torch.")
    configs = {
        form: {**FORMATS[form].write_config(config, tokens, verifier), "dtype": name}  # refused before one is written
        for form in folders
    }
    weights = {key: _exported(tensor, dtype) for key, tensor in weights.items()}
    _check_exported(weights, name)
    forms = {form: FORMATS[form] for form in folders}
    with ExitStack() as unfinished:
        partials = {form: unfinished.enter_context(unfinished_folder(folder)) for form, folder in folders.items()}
        for form, partial in ((forms[form], partial) for form, partial in partials.items()):
            tables = _tables(form, verifier, dtype)
            _check_exported(tables, name)
            tensors = weights | tables
            with writing(folders[form.name]):
                _write_text(partial / CONFIG_FILE, _json(configs[form.name]))
                save_file(
                    {form.renamed.get(key, key): tensor for key, tensor in tensors.items()},
                    partial / WEIGHTS_FILE,
                    metadata={"format": "pt"},
                )
            _check_written(partial, config, tensors)
        verification = verify(partials) if verify else None
        for form, partial in ((forms[form], partial) for form, partial in partials.items()):
            with writing(folders[form.name]):
                told = metadata(config, form, name, tokens, provenance, verification)
                _write_text(partial / METADATA_FILE, _json(told))
                card = model_card(config, form, name, provenance, verification, converted=original_card is not None)
                _write_text(partial / CARD_FILE, card)
                if original_card is not None:
                    (partial / ORIGINAL_CARD_FILE).write_bytes(original_card)
        take_names({partial: folders[form] for form, partial in partials.items()})
    return list(folders.values())


def _check_written(folder: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Read a folder back, and compare."""
    found = read_drafter(folder)
    read = dict(found.weights)
    if found.verifier:
        read |= dict(zip(found.form.tables, (found.verifier.embedding, found.verifier.head), strict=True))
    expected = asdict(replace(config, rope_parameters=rope_parameters(config)))
    differing = [field for field, value in asdict(found.config).items() if value != expected[field]]
    differing += [
        name
        for name, tensor in tensors.items()
        if name not in read or read[name].dtype != tensor.dtype or not torch.equal(read[name], tensor)
    ]
    if differing:
        raise ExportError(
            f"{folder} doesn't hold what was written to it: {', '.join(differing)} differ. Nothing was left there. "
            "Check the disk, then export again."
        )


def _check_exported(tensors: Mapping[str, Tensor], dtype: str) -> None:
    """Refuse what the data type has no room for."""
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ExportError(
            f"In {dtype} these tensors hold NaN or infinity: {', '.join(broken)}. Export in bfloat16 or float32, which "
            "have room for larger values."
        )


def _tables(form: Format, verifier: Verifier | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The target's tables, by their names in the file, each with memory of its own: a file holds a tied head twice."""
    if not form.tables:
        return {}
    pair = (verifier.embedding, verifier.head.clone())
    return {name: _exported(table, dtype) for name, table in zip(form.tables, pair, strict=True)}


def _exported(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(device="cpu", dtype=dtype).contiguous()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _json(values: dict) -> str:
    return json.dumps(values, indent=2) + "\n"
