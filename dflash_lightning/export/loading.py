"""Read a drafter back, wherever it stands: an exported folder of any format, or a training checkpoint."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig

from dflash_lightning.checkpoints import is_training_checkpoint, read_training_checkpoint
from dflash_lightning.config import DrafterConfig
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import ExportError
from dflash_lightning.export.card import CARD_FILE, METADATA_FILE, ORIGINAL_CARD_FILE, Provenance
from dflash_lightning.export.format import Format, TokenIds, Verifier, rope_parameters
from dflash_lightning.export.layout import check_tables, check_tensors
from dflash_lightning.export.muse_assistant import TRANSFORMERS
from dflash_lightning.export.speculators import SPECULATORS
from dflash_lightning.export.zlab import ZLAB
from dflash_lightning.target import (
    load_generation_config,
    load_tokenizer,
    stop_token_ids,
    target_identity,
    target_text_config,
)

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
FORMATS: dict[str, Format] = {form.name: form for form in (ZLAB, SPECULATORS, TRANSFORMERS)}


@dataclass(frozen=True)
class DrafterSource:
    """A drafter as it was found.

    Attributes:
        weights: named as in `Drafter`, complete, in the dtype they were stored in.
        tokens: the target's special token ids; None in a training checkpoint, which doesn't hold them.
        provenance: what is known of its making; None for somebody else's folder.
        target_path: how its training run called the target; None for an exported folder.
        form: the exported folder's format; None for a training checkpoint.
        verifier: what the folder carries of the target; None if it carries nothing.
        original_card: content of somebody else's model card; None for our own.
    """

    config: DrafterConfig
    weights: dict[str, Tensor]
    tokens: TokenIds | None
    provenance: Provenance | None
    target_path: str | None
    form: Format | None
    verifier: Verifier | None = None
    original_card: bytes | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The smallest that holds all weights as they are."""
        return reduce(torch.promote_types, (tensor.dtype for tensor in self.weights.values()))


def read_drafter(path: str | Path, target: str | None = None) -> DrafterSource:
    """Read the drafter at ``path``: a folder of any format, or a training checkpoint (a pickle: trust it).

    Args:
        target: folder, hub name or .gguf file of the target that it is for, which is checked, and asked for what
            somebody else's folder doesn't say.

    Raises:
        ExportError: there is none, it is incomplete (missing and unexpected tensors are named), its weights aren't
            finite, or it was made for another target.
    """
    source = _read(Path(path), target)
    if target is not None:
        check_fits_target(source, target)
    return source


def _read(path: Path, target: str | None) -> DrafterSource:
    if not (path / CONFIG_FILE).is_file() and is_training_checkpoint(path):
        checkpoint = read_training_checkpoint(path)
        check_tensors(checkpoint.state_dict, checkpoint.config, str(path))
        return DrafterSource(
            config=checkpoint.config,
            weights=checkpoint.state_dict,
            tokens=None,
            provenance=Provenance.of_checkpoint(checkpoint),
            target_path=checkpoint.target_path,
            form=None,
        )
    if not path.is_dir():
        raise ExportError(f"There is no drafter at {path}; expected a folder that `export` wrote, or a checkpoint.")
    inside = sorted(found.name for found in path.glob("*.ckpt"))
    if inside and not (path / CONFIG_FILE).is_file():
        raise ExportError(f"{path} holds checkpoints and is none itself; give one of them: {', '.join(inside)}.")
    return _read_folder(path, target)


def load_drafter(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", target: str | None = None
) -> Drafter:
    """Load a drafter for decoding: evaluation mode, no gradients.

    Args:
        path: an exported folder (ours or the official ones), or a training checkpoint. A checkpoint is a pickle: only
            load what you trust.
        dtype: data type of the weights.
        device: where the drafter goes.
        target: folder, hub name or .gguf file of the target that it is for, which is checked.

    Raises:
        ExportError: as `read_drafter`.
    """
    source = read_drafter(path, target)
    drafter = Drafter(source.config)
    drafter.load_state_dict(source.weights)
    return drafter.eval().requires_grad_(False).to(device=device, dtype=dtype)


def check_fits_target(source: DrafterSource, target: str) -> None:
    """Refuse a drafter that was made for another target: by shape, mask token and, where it is known, fingerprint.

    Args:
        target: folder, hub name or .gguf file.

    Raises:
        ExportError: listing every field that differs.
    """
    text_config = target_text_config(target)
    _check_shape(source.config, text_config)
    stop_ids = stop_token_ids(load_generation_config(target), load_tokenizer(target))
    check_mask_token(source.config, TokenIds.from_target(text_config), stop_ids)
    if source.provenance is None:
        return
    trained, given = source.provenance.target, target_identity(target)
    fingerprints = {
        "other weights": "weights_sha256",
        "another tokenizer": "tokenizer_sha256",
        "another chat template": "chat_template_sha256",
    }
    differing = [what for what, field in fingerprints.items() if getattr(trained, field) != getattr(given, field)]
    if differing:
        raise ExportError(
            f"The target at {target} isn't the one that the drafter was trained for ({trained.name}): it has "
            f"{' and '.join(differing)}. Give that one. To use the drafter with this one all the same, take "
            f"{METADATA_FILE} out of a copy of its exported folder."
        )


def _check_shape(config: DrafterConfig, target: PreTrainedConfig) -> None:
    """Refuse a drafter whose features, tables or depth aren't those of the target. Raises ExportError."""
    theirs = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_hidden_layers,
    }
    differing = [
        f"{field} is {getattr(config, field)}, the target's is {value}"
        for field, value in theirs.items()
        if getattr(config, field) != value
    ]
    if differing:
        raise ExportError(
            f"The drafter was made for another target: {'; '.join(differing)}. Give the target that it was trained for."
        )


def check_mask_token(config: DrafterConfig, tokens: TokenIds, stop_ids: Iterable[int] = ()) -> None:
    """Refuse a mask token that means something else to the target.

    Args:
        stop_ids: of its generation defaults and its tokenizer.

    Raises:
        ExportError: naming what it means.
    """
    eos = tokens.eos if isinstance(tokens.eos, list) else [tokens.eos]
    roles = {**dict.fromkeys(stop_ids, "stop"), tokens.bos: "bos", tokens.pad: "pad", **dict.fromkeys(eos, "eos")}
    if config.mask_token_id in roles:
        raise ExportError(
            f"The drafter's mask token {config.mask_token_id} is the target's {roles[config.mask_token_id]} token, "
            "which servers treat as such. Train with another mask_token_id."
        )


def _read_folder(path: Path, target: str | None) -> DrafterSource:
    """An exported folder, whoever wrote it."""
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (path / name).is_file()]
    if missing:
        raise ExportError(
            f"{path} is not a drafter: it has no {' and no '.join(missing)}. Expected a folder that `export` wrote, or "
            "a training checkpoint (`X.ckpt`)."
        )
    values = read_json(path / CONFIG_FILE)
    form = next((form for form in FORMATS.values() if form.recognises(values)), None)
    if form is None:
        raise ExportError(
            f"{path} is not a drafter: its config.json is of model type {values.get('model_type')!r} and of none of "
            f"the formats {', '.join(FORMATS)}."
        )
    if target is not None:
        values.setdefault("num_target_layers", target_text_config(target).num_hidden_layers)
    try:
        config, tokens = form.read_config(values)
    except ExportError as error:
        raise ExportError(f"{path} can't be read as a drafter of format {form.name}: {error}") from error
    try:
        stored = load_file(path / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{path / WEIGHTS_FILE} can't be read: {error}. Export or download it again.") from error
    tables = [stored.pop(name) for name in form.tables if name in stored]
    check_tables(tables, config, str(path / WEIGHTS_FILE))
    original = {theirs: ours for ours, theirs in form.renamed.items()}
    weights = {original.get(name, name): tensor for name, tensor in stored.items() if name not in form.ignored}
    check_tensors(weights, config, str(path / WEIGHTS_FILE))
    verifier = Verifier(*form.read_verifier(values), *tables) if len(tables) == 2 else None
    known = read_json(path / METADATA_FILE) if (path / METADATA_FILE).is_file() else {}
    if "drafter" in known:
        _check_record(path, config, DrafterConfig.from_dict(known["drafter"]))
    return DrafterSource(
        config,
        weights,
        TokenIds(**known["target_tokens"]) if "target_tokens" in known else tokens,
        Provenance.from_dict(known),
        target_path=None,
        form=form,
        verifier=verifier,
        original_card=_original_card(path),
    )


def _check_record(path: Path, config: DrafterConfig, exported: DrafterConfig) -> None:
    """Refuse a `config.json` that was changed after the export, but for a smaller block."""
    found, expected = (asdict(replace(c, rope_parameters=rope_parameters(c))) for c in (config, exported))
    differing = {name for name in found if found[name] != expected[name]}
    if config.block_size < exported.block_size:
        differing -= {"block_size"}
    if differing:
        lines = "".join(f"\n  {name}: {found[name]}, exported with {expected[name]}" for name in sorted(differing))
        raise ExportError(
            f"{path / CONFIG_FILE} isn't what was exported ({METADATA_FILE} beside it says so):{lines}\nExport again, "
            "or put the exported values back."
        )


def _original_card(path: Path) -> bytes | None:
    kept, own = path / ORIGINAL_CARD_FILE, path / CARD_FILE
    if kept.is_file():
        return kept.read_bytes()
    return own.read_bytes() if own.is_file() and not (path / METADATA_FILE).is_file() else None


def read_json(path: Path, advice: str = "Export or download it again.") -> dict[str, Any]:
    """A JSON object in a file. Raises ExportError with advice if it is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{path} is not valid JSON ({error}). {advice}") from error
    if not isinstance(values, dict):
        raise ExportError(f"{path} holds a {type(values).__name__}; expected a JSON object. {advice}")
    return values
