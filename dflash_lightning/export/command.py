"""The command `export`."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from dflash_lightning.cache import CacheManifest, open_store
from dflash_lightning.errors import DataError, ExportError
from dflash_lightning.export.card import Provenance
from dflash_lightning.export.folder import check_free, export_drafter, parse_formats
from dflash_lightning.export.format import TokenIds
from dflash_lightning.export.loading import check_fits_target, read_drafter, read_json
from dflash_lightning.progress import say
from dflash_lightning.target import target_text_config


def export(
    checkpoint: Path,
    output: Path,
    format: str = "zlab,transformers",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    target: str | None = None,
    cache: str | None = None,
    evaluations: list[Path] | None = None,
) -> list[Path]:
    """Write a drafter as folders that inference engines load without a patch.

    Makes one folder a format, OUTPUT/zlab (vLLM, SGLang, llama.cpp, the official package) and OUTPUT/transformers
    (generate() of transformers). Nothing is overwritten, and an interrupted export never looks finished.

    Args:
        checkpoint: Training checkpoint (X.ckpt), or a folder exported before. A checkpoint is a pickle: only give one
            that you trust.
        output: Folder that gets one folder a format.
        format: Formats, separated by commas: zlab, transformers.
        dtype: Data type of the exported weights.
        target: Where the target is now (folder, hub name or .gguf file). Default: where it was in training.
        cache: Folder or URL of the feature cache that the drafter was trained on; its generation settings go into the
            model card.
        evaluations: JSON files that `evaluate` wrote for this drafter; their figures go into the model card, each
            under its file's name.

    Returns:
        The folders written.

    Raises:
        ExportError: The checkpoint or its target can't be used, the drafter doesn't fit, or a folder isn't free.
    """
    forms = parse_formats(format)
    output = Path(output)
    for form in forms:
        check_free(output / form.name)
    source = read_drafter(checkpoint)
    target = target or source.target_path
    if target is not None:
        check_fits_target(source, target)
    tokens = source.tokens if target is None else TokenIds.from_target(target_text_config(target))
    provenance = _complete(source.provenance, cache, evaluations or [])
    for form in forms:  # before the first folder is written
        form.write_config(source.config, tokens)
    folders = []
    for form in forms:
        folder = export_drafter(
            source.weights,
            source.config,
            output / form.name,
            form,
            tokens=tokens,
            provenance=provenance,
            dtype=getattr(torch, dtype),
        )
        say(f"{folder}: {source.config.num_layers} layers, block {source.config.block_size}, {dtype}")
        folders.append(folder)
    return folders


def _complete(provenance: Provenance | None, cache: str | None, evaluations: list[Path]) -> Provenance | None:
    """Add what the checkpoint doesn't know."""
    if provenance is None:
        if cache or evaluations:
            raise ExportError("The drafter has no dflash_lightning.json; leave out --cache and --evaluations.")
        return None
    if cache:
        manifest = CacheManifest.load(open_store(cache))
        if not manifest.target.fits(provenance.target):
            raise ExportError(
                f"The cache {cache} is of the target {manifest.target.name}, the drafter's is {provenance.target.name}"
                ". Give the cache that the drafter was trained on."
            )
        provenance = replace(provenance, generation=manifest.generation)
    return replace(provenance, evaluations=[*provenance.evaluations, *map(_evaluation, evaluations)])


def _evaluation(path: Path) -> dict[str, Any]:
    report = read_json(path)
    if missing := [key for key in ("tau", "prompts") if report.get(key) is None]:
        raise DataError(f"{path} has no {' and no '.join(missing)}; expected a JSON file that `evaluate` wrote.")
    return {"prompt_set": Path(path).stem, **report}
