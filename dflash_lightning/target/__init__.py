"""Everything that touches a frozen target's files: finding, loading, identifying and reading parts of it.

A target is named by a folder, a model name on the Hugging Face hub, or the path of a `.gguf` file.
"""

from dflash_lightning.target.convert import convert_gguf
from dflash_lightning.target.identity import target_identity
from dflash_lightning.target.loading import (
    load_first_layers,
    load_generation_config,
    load_placed_target,
    load_target,
    load_tokenizer,
    target_text_config,
)
from dflash_lightning.target.placement import Placement
from dflash_lightning.target.special_tokens import resolve_mask_token_id, stop_token_ids
from dflash_lightning.target.tables import load_tables

__all__ = [
    "Placement",
    "convert_gguf",
    "load_first_layers",
    "load_generation_config",
    "load_placed_target",
    "load_tables",
    "load_target",
    "load_tokenizer",
    "resolve_mask_token_id",
    "stop_token_ids",
    "target_identity",
    "target_text_config",
]
