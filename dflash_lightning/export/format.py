"""What an exported format is: a way to write, and to read back, `config.json` and the names of the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from dflash_lightning.config import DrafterConfig
from dflash_lightning.errors import ConfigError, ExportError

ConfigJson = dict[str, Any]


@dataclass(frozen=True)
class TokenIds:
    """The target's special token ids, which servers expect in a drafter's configuration too."""

    bos: int | None
    eos: int | list[int] | None
    pad: int | None = None

    @classmethod
    def from_target(cls, target: PreTrainedConfig) -> "TokenIds":
        return cls(target.bos_token_id, target.eos_token_id, target.pad_token_id)


@dataclass(frozen=True)
class Verifier:
    """The target, for a format that carries a part of it.

    Attributes:
        name: by which the hub knows it; None if it doesn't: nobody's folders are published.
        architectures: names of its classes in transformers.
        embedding, head: [V, H] the two tables that the drafter shares; one tensor if the head is tied.
    """

    name: str | None
    architectures: tuple[str, ...]
    embedding: Tensor
    head: Tensor


@dataclass(frozen=True)
class Format:
    """A layout of a folder that somebody else's code loads.

    Attributes:
        name: as in `--format`; also the name of the folder that `export` makes.
        recognises: whether a `config.json` is of this format.
        write_config: the `config.json` of a drafter, but for `dtype`; ExportError if the format can't express it. The
            verifier is asked for by formats with `tables` only.
        read_config: the inverse.
        renamed: weights that have another name in the file than in `Drafter`.
        usage: how to serve it, in Markdown; `{target}`, `{num_proposals}` and `{block_size}` are filled in.
        tables: names of the target's embedding table and LM head in the file; none if it doesn't hold them.
        read_verifier: the target's name and architectures in a `config.json`, if the format tells them.
        ignored: what others' files may hold besides, and nobody needs.
    """

    name: str
    recognises: Callable[[ConfigJson], bool]
    write_config: Callable[[DrafterConfig, TokenIds, Verifier | None], ConfigJson]
    read_config: Callable[[ConfigJson], tuple[DrafterConfig, TokenIds]]
    renamed: dict[str, str]
    usage: str
    tables: tuple[str, ...] = ()
    read_verifier: Callable[[ConfigJson], tuple[str | None, tuple[str, ...]]] | None = None
    ignored: tuple[str, ...] = ()


def shared_keys(config: DrafterConfig) -> ConfigJson:
    """The keys that all formats have in common, under the names that transformers gave them."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * config.num_layers,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
    }


def rope_parameters(config: DrafterConfig) -> dict[str, Any]:
    """The rotary parameters, without a partial factor that says nothing."""
    return {k: v for k, v in config.rope_parameters.items() if (k, v) != ("partial_rotary_factor", 1.0)}


def whole_head_rope(config: DrafterConfig, form: str) -> dict[str, Any]:
    """The rotary parameters for a format whose software always rotates whole heads.

    Raises:
        ExportError: the drafter rotates a part of each head.
    """
    rope = rope_parameters(config)
    if "partial_rotary_factor" in rope:
        raise ExportError(
            f"Format {form} can't express this drafter: it rotates {rope['partial_rotary_factor']} of each head "
            "(partial_rotary_factor, from its target), and the software of this format always rotates whole heads. "
            "Export zlab only."
        )
    return rope


def drafter_config(values: ConfigJson, rope: dict[str, Any], dflash: dict[str, Any]) -> DrafterConfig:
    """A drafter's configuration from a `config.json`.

    Args:
        rope: its rotary parameters.
        dflash: what holds its block size, mask token and tapped layers.

    Raises:
        ExportError: a key is missing, or the drafter is of a kind that we don't have.
    """
    kinds = set(values.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ExportError(f"its layers are of type {', '.join(sorted(kinds))}; only full_attention is supported.")
    try:
        return DrafterConfig(
            num_layers=values["num_hidden_layers"],
            block_size=dflash["block_size"],
            mask_token_id=dflash["mask_token_id"],
            target_layer_ids=tuple(dflash["target_layer_ids"]),
            num_target_layers=values["num_target_layers"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_heads=values["num_attention_heads"],
            num_kv_heads=values["num_key_value_heads"],
            head_dim=values["head_dim"],
            vocab_size=values["vocab_size"],
            max_position_embeddings=values["max_position_embeddings"],
            rms_norm_eps=values["rms_norm_eps"],
            initializer_range=values["initializer_range"],
            rope_parameters=rope,
        )
    except KeyError as error:
        hint = " Name its target (--target), which says it." if error.args == ("num_target_layers",) else ""
        raise ExportError(f"its config.json has no key {error}.{hint}") from error
    except ConfigError as error:
        raise ExportError(f"its config.json doesn't describe a drafter that works: {error}") from error


def token_ids(values: ConfigJson) -> TokenIds:
    """The special token ids of a `config.json`; None where it names none."""
    return TokenIds(values.get("bos_token_id"), values.get("eos_token_id"), values.get("pad_token_id"))
