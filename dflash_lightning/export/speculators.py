"""Format `speculators`: that of vLLM's package of the same name (0.9.0), which vLLM serves.

The only format that carries the target's embedding table and LM head. A drafter of ours never owns them, so they come
from the target when a folder is written, and are left aside when one is read.
"""

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from dflash_lightning.config import DrafterConfig
from dflash_lightning.errors import ExportError
from dflash_lightning.export.format import (
    ConfigJson,
    Format,
    TokenIds,
    Verifier,
    drafter_config,
    token_ids,
    whole_head_rope,
)
from dflash_lightning.export.zlab import ZLAB

MODEL_TYPE, VERSION = "dflash", "0.9.0"
# Keys of format zlab that aren't about the layers; the package's own converter leaves them out too.
NOT_OF_THE_LAYERS = ("architectures", "block_size", "dflash_config", "num_target_layers")
USAGE = """\
vLLM:

```bash
vllm serve {target} --speculative-config \\
    '{{"method": "dflash", "model": "DIR", "num_speculative_tokens": {num_proposals}}}'
```

The package `speculators`:

```python
from speculators import SpeculatorModel

drafter = SpeculatorModel.from_pretrained("DIR")
```
"""


def _recognises(values: ConfigJson) -> bool:
    return values.get("speculators_model_type") == MODEL_TYPE


def _write_config(config: DrafterConfig, tokens: TokenIds, verifier: Verifier | None) -> ConfigJson:
    if verifier is None:
        raise ExportError(
            "Format speculators carries the target's embedding table and LM head, and the target isn't known here. "
            "Name it by --target."
        )
    whole_head_rope(config, "speculators")
    layers = {k: v for k, v in ZLAB.write_config(config, tokens, None).items() if k not in NOT_OF_THE_LAYERS}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": MODEL_TYPE,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": MODEL_TYPE,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        "transformer_layer_config": layers | {"pad_token_id": tokens.pad},
        # The package counts the embedding's output as 0.
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "tie_word_embeddings": False,
        # Not asked for by the package, but by the other formats.
        "num_target_layers": config.num_target_layers,
    }


def _read_config(values: ConfigJson) -> tuple[DrafterConfig, TokenIds]:
    layers = _layer_config(values)
    if values.get("sample_from_anchor"):
        raise ExportError("it proposes a token at the anchor too (sample_from_anchor), which a DFlash drafter doesn't.")
    if values.get("draft_vocab_size") != layers["vocab_size"]:
        raise ExportError(
            f"it proposes from {values.get('draft_vocab_size')} of the target's {layers['vocab_size']} tokens "
            "(draft_vocab_size); only drafters of the whole vocabulary are supported."
        )
    if "aux_hidden_state_layer_ids" not in values:
        raise ExportError("its config.json has no key 'aux_hidden_state_layer_ids'.")
    dflash = {k: values[k] for k in ("block_size", "mask_token_id") if k in values}
    dflash["target_layer_ids"] = [layer - 1 for layer in values["aux_hidden_state_layer_ids"]]
    merged = {**layers, **{k: values[k] for k in ("num_target_layers",) if k in values}}
    return drafter_config(merged, layers["rope_parameters"], dflash), token_ids(layers)


def _layer_config(values: ConfigJson) -> dict[str, Any]:
    """`transformer_layer_config`, with what the package leaves out when it saves: all that is transformers' default."""
    stored = values.get("transformer_layer_config")
    if not isinstance(stored, dict):
        raise ExportError("its config.json has no transformer_layer_config.")
    try:
        complete = AutoConfig.for_model(**{"model_type": "qwen3", **stored}).to_dict()
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ExportError(f"its transformer_layer_config isn't one that transformers reads: {reason}") from error
    return {**complete, **stored, "rope_parameters": stored.get("rope_parameters") or complete["rope_parameters"]}


def _read_verifier(values: ConfigJson) -> tuple[str | None, tuple[str, ...]]:
    verifier = (values.get("speculators_config") or {}).get("verifier") or {}
    return verifier.get("name_or_path"), tuple(verifier.get("architectures") or ())


SPECULATORS = Format(
    "speculators",
    _recognises,
    _write_config,
    _read_config,
    renamed={},
    usage=USAGE,
    tables=("embed_tokens.weight", "lm_head.weight"),
    read_verifier=_read_verifier,
    # Older versions of the package saved more of the target.
    ignored=("verifier_lm_head.weight", "verifier_norm.weight"),
)
