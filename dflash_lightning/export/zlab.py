"""Format `zlab`: the official checkpoints', read by vLLM, SGLang, llama.cpp's converter and the package `dflash`."""

from typing import Any

from dflash_lightning.config import DrafterConfig
from dflash_lightning.errors import ExportError
from dflash_lightning.export.format import (
    ConfigJson,
    Format,
    TokenIds,
    Verifier,
    drafter_config,
    rope_parameters,
    shared_keys,
    token_ids,
)

USAGE = """\
vLLM:

```bash
vllm serve {target} --speculative-config \\
    '{{"method": "dflash", "model": "DIR", "num_speculative_tokens": {num_proposals}}}'
```

SGLang:

```bash
python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
    --speculative-draft-model-path DIR --speculative-num-draft-tokens {block_size}
```
"""


def _recognises(values: ConfigJson) -> bool:
    return "dflash_config" in values


def _write_config(config: DrafterConfig, tokens: TokenIds, _verifier: Verifier | None) -> ConfigJson:
    rope = rope_parameters(config)
    # Three spellings of one thing. transformers 5 reads and writes rope_parameters; engines on transformers 4 read
    # rope_theta and rope_scaling, and the partial factor at the top.
    older = {k: v for k, v in rope.items() if k in ("rope_theta", "partial_rotary_factor")}
    if rope["rope_type"] != "default":
        older["rope_scaling"] = {k: v for k, v in rope.items() if k not in older}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **shared_keys(config),
        "attention_bias": False,
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "use_sliding_window": False,
        "sliding_window": None,
        "is_causal": False,
        "rope_parameters": rope,
        **older,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
    }


def _rope(values: ConfigJson) -> dict[str, Any]:
    """Rotary parameters, from the older spelling too (`rope_theta` and `rope_scaling`)."""
    if values.get("rope_parameters"):
        return values["rope_parameters"]
    scaling = values.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    rest = {name: value for name, value in scaling.items() if name != "type"}
    return {**rest, "rope_type": kind, "rope_theta": values.get("rope_theta")}


def _read_config(values: ConfigJson) -> tuple[DrafterConfig, TokenIds]:
    # The block size may stand at the top only.
    dflash = {**({"block_size": values["block_size"]} if "block_size" in values else {}), **values["dflash_config"]}
    if values.get("block_size", dflash.get("block_size")) != dflash.get("block_size"):
        raise ExportError(
            f"block_size is {values['block_size']!r} in its config.json, and {dflash['block_size']!r} in dflash_config "
            "there; servers read one or the other. Set both to the same."
        )
    return drafter_config(values, _rope(values), dflash), token_ids(values)


ZLAB = Format("zlab", _recognises, _write_config, _read_config, renamed={}, usage=USAGE)
