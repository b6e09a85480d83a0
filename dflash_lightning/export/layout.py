"""The tensors of a drafter, by name and shape: 3 + 11 n of them.

Some servers ignore unknown tensors and leave missing ones random, so that a wrong set would only show as a drafter that
proposes nonsense. Hence the full set is checked on every way in and out.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from dflash_lightning.config import DrafterConfig
from dflash_lightning.errors import ExportError
from dflash_lightning.wording import counted


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight, named as in `Drafter`."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    return {
        "fc.weight": (hidden, config.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        **{f"layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()},
    }


def check_tensors(weights: Mapping[str, Tensor], config: DrafterConfig, where: str) -> None:
    """Refuse weights that are not exactly the drafter's, or aren't finite.

    Args:
        weights: tensors, named as in `Drafter`.
        where: what holds them, for the message.

    Raises:
        ExportError: naming missing and unexpected tensors, and those of another shape or with NaN or infinity.
    """
    expected = tensor_shapes(config)
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"missing {', '.join(missing)}")
    if unexpected := sorted(found.keys() - expected.keys()):
        problems.append(f"unexpected {', '.join(unexpected)}")
    problems += [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise ExportError(
            f"{where} doesn't hold the weights of its own configuration: {'; '.join(problems)}. Expected "
            f"{len(expected)} tensors of a drafter of {counted(config.num_layers, 'layer')}."
        )
    if broken := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
        raise ExportError(
            f"{where} holds NaN or infinity: {', '.join(broken)}. Its training diverged; take an earlier checkpoint."
        )


def check_tables(tables: Sequence[Tensor], config: DrafterConfig, where: str) -> None:
    """Refuse tables of a target that aren't [V, H]. Raises ExportError."""
    expected = (config.vocab_size, config.hidden_size)
    if wrong := [list(table.shape) for table in tables if table.shape != expected]:
        raise ExportError(
            f"{where} holds tables of the target of shape {wrong}; expected {list(expected)}, rows of the vocabulary."
        )
