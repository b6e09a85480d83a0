"""Format `transformers`: a drafter that transformers (>= 5.15) generates with by itself, for any target class."""

from dflash_lightning.config import DrafterConfig
from dflash_lightning.export.format import (
    ConfigJson,
    Format,
    TokenIds,
    Verifier,
    drafter_config,
    shared_keys,
    token_ids,
    whole_head_rope,
)

MODEL_TYPE = "muse_glimmer_assistant"
USAGE = """\
transformers:

```python
from transformers import AutoModel, AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto")
drafter = AutoModel.from_pretrained("DIR", dtype=target.dtype)
target.generate(**inputs, assistant_model=drafter, speculation_type="dflash", do_sample=False)
```
"""


def _recognises(values: ConfigJson) -> bool:
    return values.get("model_type") == MODEL_TYPE


def _write_config(config: DrafterConfig, tokens: TokenIds, _verifier: Verifier | None) -> ConfigJson:
    # This model type accepts a single eos id. It is never used: generation goes by the target's.
    eos = next(iter(tokens.eos), None) if isinstance(tokens.eos, list) else tokens.eos
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": MODEL_TYPE,
        **shared_keys(config),
        "bos_token_id": tokens.bos,
        "eos_token_id": eos,
        "pad_token_id": tokens.pad,
        "rope_parameters": whole_head_rope(config, "transformers"),
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }


def _read_config(values: ConfigJson) -> tuple[DrafterConfig, TokenIds]:
    return drafter_config(values, values.get("rope_parameters") or {}, values), token_ids(values)


TRANSFORMERS = Format(
    "transformers",
    _recognises,
    _write_config,
    _read_config,
    renamed={"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"},
    usage=USAGE,
)
