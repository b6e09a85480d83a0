"""What a training begins with: a new drafter, or one that exists already (fine-tuning)."""

from pathlib import Path

from torch import Tensor

from dflash_lightning.config import DrafterConfig, DrafterSettings
from dflash_lightning.errors import ConfigError
from dflash_lightning.export.format import TokenIds
from dflash_lightning.export.loading import check_mask_token, read_drafter
from dflash_lightning.target import (
    load_generation_config,
    load_tokenizer,
    resolve_mask_token_id,
    stop_token_ids,
    target_text_config,
)

# What settings decide. All else in the configuration of a drafter is its own, like its rotary parameters.
CHOSEN = ("num_layers", "block_size", "target_layer_ids", "mask_token_id", "intermediate_size")


def choose_drafter(
    target: str, settings: DrafterSettings | None, start_from: Path | None
) -> tuple[DrafterConfig, dict[str, Tensor] | None]:
    """Configuration of the drafter to train, and the weights to begin with; None where they are drawn at random.

    Args:
        target: folder, hub name or .gguf file.
        settings: default: those of the drafter to start from, or of `DrafterSettings`.
        start_from: a folder of any exported format, or a training checkpoint (a pickle).

    Raises:
        ConfigError: settings that don't fit the target, or describe another drafter than the one to start from; each
            field that differs is listed with both values.
        ExportError: what to start from can't be read, or was made for another target.
    """
    if start_from is None:
        return _resolve(settings or DrafterSettings(), target), None
    initial = read_drafter(start_from, target)
    config = initial.config
    own = DrafterSettings(**{name: getattr(config, name) for name in CHOSEN})
    wanted = _resolve(settings or own, target)
    if differing := [name for name in CHOSEN if getattr(wanted, name) != getattr(config, name)]:
        lines = "".join(
            f"\n  {name}: there {getattr(config, name)}, here {getattr(wanted, name)}" for name in differing
        )
        raise ConfigError(
            f"model.drafter describes another drafter than the one to start from, {start_from}:{lines}\n"
            "Leave model.drafter out to train that drafter as it is, or model.start_from to train a new one."
        )
    return config, initial.weights


def _resolve(settings: DrafterSettings, target: str) -> DrafterConfig:
    """The settings for this target, with the mask token checked or chosen."""
    text_config, tokenizer = target_text_config(target), load_tokenizer(target)
    mask_token_id = resolve_mask_token_id(
        settings.mask_token_id,
        tokenizer,
        embedding_rows=text_config.vocab_size,
        stop_ids=stop_token_ids(load_generation_config(target), tokenizer),
    )
    config = DrafterConfig.from_target(settings, text_config, mask_token_id=mask_token_id)
    check_mask_token(config, TokenIds.from_target(text_config))
    return config
