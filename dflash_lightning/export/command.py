"""The command `export`."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from dflash_lightning.cache import CacheManifest, open_store
from dflash_lightning.config import DrafterConfig
from dflash_lightning.devices import resolve_device
from dflash_lightning.errors import ConfigError, DataError, ExportError
from dflash_lightning.export.card import Provenance
from dflash_lightning.export.folder import check_free, export_formats, parse_formats
from dflash_lightning.export.format import TokenIds, Verifier, rope_parameters
from dflash_lightning.export.loading import DrafterSource, check_fits_target, read_drafter, read_json
from dflash_lightning.export.verification import VerificationSettings, verify_folders, why_not
from dflash_lightning.progress import say
from dflash_lightning.target import load_tables, target_text_config
from dflash_lightning.target.files import find_target
from dflash_lightning.target.loading import config_of
from dflash_lightning.wording import counted


def export(
    checkpoint: Path,
    output: Path,
    format: str = "zlab,transformers",
    dtype: Literal["bfloat16", "float16", "float32"] | None = None,
    target: str | None = None,
    cache: str | None = None,
    evaluations: list[Path] | None = None,
    verify: bool | None = None,
    prompts: str | None = None,
    max_new_tokens: int = 32,
    device: str = "auto",
) -> list[Path]:
    """Write a drafter as folders that inference engines load without a patch.

    Makes one folder a format: OUTPUT/zlab (vLLM, SGLang, llama.cpp, the official package), OUTPUT/transformers
    (generate() of transformers), OUTPUT/speculators (vLLM's package speculators). Nothing is overwritten, and an
    export that was interrupted or refused leaves nothing.

    Before the folders take their names, a few prompts are decoded in float32 with what stands in them: by the target
    alone, by our decoder and by transformers' generate(). Texts and acceptance lengths must be equal.

    Args:
        checkpoint: Training checkpoint (X.ckpt), or a folder of any of the formats, whoever wrote it. A checkpoint is a
            pickle: only give one that you trust.
        output: Folder that gets one folder a format.
        format: Formats, separated by commas: zlab, transformers, speculators. The last is left out unless named: it
            holds the target's embedding table and LM head too (2.5 GB for Qwen3-8B), and vLLM reads zlab as well.
        dtype: Data type of the exported weights. Default: bfloat16 for a checkpoint, a folder's own for a folder.
        target: Where the target is now (folder, hub name or .gguf file). Default: where it was in training; a folder
            is converted without one, unless a format needs it.
        cache: Folder or URL of the feature cache that the drafter was trained on; its generation settings go into the
            model card.
        evaluations: JSON files that `evaluate` wrote for this drafter; their figures go into the model card, each
            under its file's name, in place of an earlier entry of that name.
        verify: Decode before the export is called good. Default: if the target is known and fits the memory in float32.
        prompts: JSONL file of prompts to verify with, or a data set; as in prepare. Default: three short ones.
        max_new_tokens: Length limit of each text that is decoded to verify.
        device: Where that is done; auto takes a GPU if there is one.

    Returns:
        The folders written.

    Raises:
        ExportError: The checkpoint or its target can't be used, the drafter doesn't fit, a folder isn't free, or the
            decoders disagree.
        ConfigError: A setting is without effect, or out of range.
    """
    if verify is False and prompts is not None:
        raise ConfigError("--prompts are what is decoded to verify, and --verify is false; leave one of them out.")
    forms = parse_formats(format)
    output = Path(output)
    for form in forms:
        check_free(output / form.name)
    source = read_drafter(checkpoint, target)
    if target is None and source.target_path is not None:
        target = source.target_path
        check_fits_target(source, target)
    exported_dtype = getattr(torch, dtype) if dtype else torch.bfloat16 if source.form is None else source.dtype
    provenance = _complete(source, cache, evaluations or [])
    where = resolve_device(device)
    reason = _not_asked(checkpoint, target) if verify is False else why_not(target, where, source.config)
    if reason and verify:
        raise ExportError(f"The export can't be verified: {reason}. Leave --verify out to export without.")
    check = None
    if reason is None:
        thinking = ((provenance and provenance.generation) or {}).get("thinking")
        settings = VerificationSettings(target, where, prompts, max_new_tokens, thinking)
        check = partial(verify_folders, settings=settings)
    verifier = source.verifier
    if target is not None and any(form.tables for form in forms):
        verifier = _verifier(target, exported_dtype)
    folders = export_formats(
        source.weights,
        source.config,
        {form.name: output / form.name for form in forms},
        tokens=source.tokens if target is None else TokenIds.from_target(target_text_config(target)),
        provenance=provenance,
        dtype=exported_dtype,
        verifier=verifier,
        original_card=source.original_card,
        verify=check,
    )
    if reason:
        say(f"not verified by decoding: {reason}")
    for folder in folders:
        name = str(exported_dtype).removeprefix("torch.")
        say(f"{folder}: {counted(source.config.num_layers, 'layer')}, block {source.config.block_size}, {name}")
    return folders


def _not_asked(checkpoint: Path, target: str | None) -> str:
    """Why a drafter isn't verified that needn't be, and what would do it."""
    reason = "it wasn't asked for"
    if target is None:
        return reason
    return f"{reason}; `dflash-lightning export --checkpoint {checkpoint} --target {target} --output ANOTHER` does it"


def _verifier(target: str, dtype: torch.dtype) -> Verifier:
    """What a folder can carry of a target."""
    files = find_target(target)
    architectures = config_of(files).architectures or ()
    return Verifier(files.name if files.revision else None, tuple(architectures), *load_tables(target, dtype=dtype))


def _complete(source: DrafterSource, cache: str | None, evaluations: list[Path]) -> Provenance | None:
    """Add what the checkpoint doesn't know."""
    provenance = source.provenance
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
    entries = {entry["prompt_set"]: entry for entry in provenance.evaluations}
    entries |= {path.stem: _evaluation(path, source.config, provenance) for path in map(Path, evaluations)}
    return replace(provenance, evaluations=list(entries.values()))


def _evaluation(path: Path, config: DrafterConfig, provenance: Provenance) -> dict[str, Any]:
    """The report at ``path``, under its file's name.

    The weights' hash isn't compared: it is of the evaluation's dtype, which need not be the one that is read here.
    """
    report = read_json(path, "Run `evaluate` again.")
    if missing := [key for key in ("tau", "prompts") if report.get(key) is None]:
        raise DataError(f"{path} has no {' and no '.join(missing)}; expected a JSON file that `evaluate` wrote.")
    if "target" in report and report["target"]["weights_sha256"] != provenance.target.weights_sha256:
        raise ExportError(
            f"{path} is of the target {report['target']['name']}, the drafter's is {provenance.target.name}, of other "
            "weights. Give reports of this drafter with its own target."
        )
    if "drafter" in report:
        described = {key: value for key, value in report["drafter"].items() if key != "weights_sha256"}
        theirs, ours = _comparable(DrafterConfig.from_dict(described)), _comparable(config)
        if differing := [f"{key} is {theirs[key]}, here {ours[key]}" for key in ours if theirs[key] != ours[key]]:
            raise ExportError(f"{path} is of another drafter: {'; '.join(differing)}. Give reports of this one.")
    return {**report, "prompt_set": path.stem}


def _comparable(config: DrafterConfig) -> dict[str, Any]:
    """With rotary parameters in the one spelling that folders have."""
    return asdict(replace(config, rope_parameters=rope_parameters(config)))
