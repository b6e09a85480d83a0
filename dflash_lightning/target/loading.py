"""Load a frozen target, or only its tokenizer or its configuration."""

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dflash_lightning.errors import TargetError
from dflash_lightning.target.files import TargetFiles, find_target, loading
from dflash_lightning.target.placement import Placement

ARCHITECTURE_FACTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "vocab_size",
    "rope_parameters",
    "max_position_embeddings",
    "initializer_range",
)


def load_target(name: str, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Load a target for inference: SDPA attention, evaluation mode, no gradients.

    Args:
        name: A transformers folder, a hub name, or the path of a `.gguf` file (dequantised to `dtype`: packed
            weights would be unpacked at every matmul).
        dtype: Data type of the weights.
        device: Where the model goes.

    Raises:
        TargetError: The files are missing, or their architecture isn't supported.
    """
    return _load(AutoModelForCausalLM, find_target(name), dtype=dtype, device_map={"": device})


def load_placed_target(name: str, *, dtype: torch.dtype, placement: Placement, local_rank: int = 0) -> PreTrainedModel:
    """Load a target as `load_target` does, placed by `placement`, whose check has passed.

    Raises:
        TargetError: As `load_target`.
        ConfigError: There is no such device.
    """
    return _load(AutoModelForCausalLM, find_target(name), dtype=dtype, **placement.arguments(local_rank))


def load_first_layers(
    name: str, num_layers: int, *, dtype: torch.dtype, placement: Placement, local_rank: int = 0
) -> PreTrainedModel:
    """Load the part of a target that computes its first `num_layers` decoder layers, as `load_target` loads all of it.

    The weights of later layers and of the LM head are neither kept in memory nor, in a transformers folder, read.

    Args:
        name: As in `load_target`.
        num_layers: How many decoder layers.
        dtype: Data type of the weights.
        placement: Where they go. `Placement.check` has passed, and processes that share a target have formed groups.
        local_rank: Number of this process on its node.

    Raises:
        TargetError: As `load_target`.
        ConfigError: There is no such device.
    """
    files = find_target(name)
    config = config_of(files)
    config.get_text_config().num_hidden_layers = num_layers
    return _load(AutoModel, files, dtype=dtype, config=config, **placement.arguments(local_rank))


def _load(auto_class: type[AutoModel | AutoModelForCausalLM], files: TargetFiles, **arguments: Any) -> PreTrainedModel:
    if files.gguf is not None:
        arguments["quantization_config"] = GgufConfig(dequantize=True)
    with loading("weights", files):
        model, info = auto_class.from_pretrained(
            **files.pretrained, attn_implementation="sdpa", output_loading_info=True, **arguments
        )
    if info["missing_keys"]:
        raise TargetError(
            f"Target {files.name!r}: {len(info['missing_keys'])} weights are missing, such as "
            f"{min(info['missing_keys'])}. Expected every weight of a {model.config.model_type} model; fetch the "
            "target again."
        )
    if type(model.get_input_embeddings()) is not torch.nn.Embedding:
        raise TargetError(
            f"target {files.name!r} has {type(model.get_input_embeddings()).__name__} for embeddings, which does more "
            "than look up rows (it scales them, for example). A drafter is trained on the plain rows; choose another "
            "target."
        )
    return model.eval().requires_grad_(False)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a target's tokenizer. Raises `TargetError` if there is none."""
    return tokenizer_of(find_target(name))


def load_generation_config(name: str) -> GenerationConfig:
    """Read a target's generation defaults (its stop ids) without its weights.

    A target that ships none gets what follows from its configuration, as transformers does.
    """
    files = find_target(name)
    if (files.folder / "generation_config.json").is_file() and files.gguf is None:
        with loading("generation configuration", files):
            return GenerationConfig.from_pretrained(str(files.folder))
    return GenerationConfig.from_model_config(config_of(files))


def target_text_config(name: str) -> PreTrainedConfig:
    """Read the configuration of a target's language model, without its weights.

    The drafter copies the target's width, heads and rotary embedding, so every field in `ARCHITECTURE_FACTS` is
    present in what is returned; head counts that a configuration leaves out are filled in.

    Raises:
        TargetError: The configuration can't be read, or leaves out a fact that can't be derived.
    """
    files = find_target(name)
    config = config_of(files).get_text_config()
    if getattr(config, "num_key_value_heads", None) is None:
        config.num_key_value_heads = getattr(config, "num_attention_heads", None)
    if getattr(config, "head_dim", None) is None and getattr(config, "num_attention_heads", None):
        config.head_dim = config.hidden_size // config.num_attention_heads
    missing = [fact for fact in ARCHITECTURE_FACTS if getattr(config, fact, None) is None]
    if missing:
        raise TargetError(
            f"Target {files.name!r}: its configuration (model type {config.model_type!r}) has no {', '.join(missing)}. "
            "Expected a decoder with RMSNorm and rotary embeddings, such as Llama or Qwen3."
        )
    return config


def config_of(files: TargetFiles) -> PreTrainedConfig:
    """The whole configuration of a target that was found, vision and audio parts included."""
    with loading("configuration", files):
        return AutoConfig.from_pretrained(**files.pretrained)


def tokenizer_of(files: TargetFiles) -> PreTrainedTokenizerBase:
    """The tokenizer of a target that was found."""
    with loading("tokenizer", files):
        return AutoTokenizer.from_pretrained(**files.pretrained)
