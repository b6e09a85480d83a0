"""What a drafter is: the settings a user chooses, and the complete configuration that follows from the target."""

from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PretrainedConfig

from dflash_lightning.errors import ConfigError
from dflash_lightning.wording import counted

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 2, 64
# Rotary types whose frequencies are fixed. "dynamic" and "longrope" change them with the sequence length, so that
# training and decoding would see different positions.
FIXED_ROPE_TYPES = ("default", "linear", "yarn", "llama3")


def default_target_layer_ids(num_target_layers: int, num_tapped_layers: int) -> tuple[int, ...]:
    """Tapped layers, spread evenly from the second to the third-to-last (paper section 4, official `dflash` package).

    Ids are 0-based decoder layers whose *output* is tapped: Hugging Face's ``hidden_states[id + 1]``.
    """
    if num_tapped_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_tapped_layers - 1)) for i in range(num_tapped_layers))


def check_target_layer_ids(layer_ids: tuple[int, ...], num_target_layers: int) -> None:
    """Refuse ids that are out of range, repeated, or the last layer, whose output is read before or after the final
    norm depending on the server.

    Raises:
        ConfigError: naming the ids found, the range expected and what to do.
    """
    last_usable = num_target_layers - 2
    expected = f"expected distinct ids in 0..{last_usable} for a target of {counted(num_target_layers, 'layer')}"
    if not layer_ids:
        raise ConfigError(f"target_layer_ids is empty; {expected}. Leave it out to get the default.")
    if len(set(layer_ids)) != len(layer_ids):
        raise ConfigError(f"target_layer_ids {list(layer_ids)} repeats a layer; {expected}.")
    if num_target_layers - 1 in layer_ids:
        raise ConfigError(
            f"target_layer_ids {list(layer_ids)} contains the last layer ({num_target_layers - 1}), which servers read "
            f"before or after the final norm; {expected}. Use {last_usable} instead."
        )
    if outside := [i for i in layer_ids if not 0 <= i <= last_usable]:
        raise ConfigError(f"target_layer_ids {outside} out of range; {expected}.")


def check_block_size(block_size: int) -> None:
    """Refuse a block without a slot to predict, or one longer than any drafter fills. Raises ConfigError."""
    if not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        raise ConfigError(
            f"block_size is {block_size}; expected {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE} "
            "(one anchor and at least one slot to predict)."
        )


@dataclass(frozen=True)
class DrafterSettings:
    """The choices a user makes; everything else about the drafter follows from the target."""

    num_layers: int = 5
    """Decoder layers of the drafter."""
    block_size: int = 16
    """Slots in a block, the anchor included (2 to 64)."""
    target_layer_ids: list[int] | None = None
    """Target layers whose outputs are the context features, 0-based. Default: spread evenly over the target."""
    num_tapped_layers: int | None = None
    """How many layers to tap when target_layer_ids is left out. Default: as many as the drafter has layers."""
    mask_token_id: int | None = None
    """Token of the empty slots. Default: the tokenizer's mask token, else the first unused row of the table."""
    intermediate_size: int | None = None
    """Width of the drafter's MLP. Default: the target's."""

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        for name in ("num_layers", "num_tapped_layers", "intermediate_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} is {value}; expected at least 1.")
        if self.target_layer_ids is not None and self.num_tapped_layers not in (None, len(self.target_layer_ids)):
            raise ConfigError(
                f"num_tapped_layers is {self.num_tapped_layers} but target_layer_ids lists "
                f"{len(self.target_layer_ids)}; give one of the two."
            )

    def resolve_target_layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        """The tapped layers for a target of so many layers, checked."""
        if self.target_layer_ids is not None:
            layer_ids = tuple(self.target_layer_ids)
        else:
            count = self.num_tapped_layers or self.num_layers
            layer_ids = default_target_layer_ids(num_target_layers, count)
            if len(set(layer_ids)) < count:
                raise ConfigError(
                    f"{counted(count, 'tapped layer')} can't be spread over a target of "
                    f"{counted(num_target_layers, 'layer')}; use fewer num_tapped_layers, or name target_layer_ids."
                )
        check_target_layer_ids(layer_ids, num_target_layers)
        return layer_ids


@dataclass(frozen=True)
class DrafterConfig:
    """Everything needed to build a drafter and to export it: the settings resolved against one target."""

    num_layers: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    rope_parameters: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        check_target_layer_ids(self.target_layer_ids, self.num_target_layers)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id is {self.mask_token_id}; expected a row of the target's embedding table, "
                f"0..{self.vocab_size - 1}."
            )
        rope_type = self.rope_parameters.get("rope_type")
        if rope_type not in FIXED_ROPE_TYPES:
            raise ConfigError(
                f"the target's rope_type is {rope_type!r}; supported are {', '.join(FIXED_ROPE_TYPES)} "
                "(types that depend on the sequence length would differ between training and decoding)."
            )

        theta = self.rope_parameters.get("rope_theta")
        if not isinstance(theta, int | float) or not theta > 0:
            raise ConfigError(f"rope_theta is {theta!r}; expected a positive number among the rotary parameters.")

    @property
    def feature_size(self) -> int:
        """Width of a token's context features: tapped layers x hidden size (the input of ``fc``)."""
        return len(self.target_layer_ids) * self.hidden_size

    @classmethod
    def from_target(cls, settings: DrafterSettings, target: PretrainedConfig, *, mask_token_id: int) -> "DrafterConfig":
        """Resolve ``settings`` against the text config of a target.

        Raises:
            ConfigError: for layer ids, mask token or rotary type that can't work with this target.
        """
        heads = target.num_attention_heads
        rope = {k: v for k, v in target.rope_parameters.items() if not k.startswith("mrope")}
        return cls(
            num_layers=settings.num_layers,
            block_size=settings.block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=settings.resolve_target_layer_ids(target.num_hidden_layers),
            num_target_layers=target.num_hidden_layers,
            hidden_size=target.hidden_size,
            intermediate_size=settings.intermediate_size or target.intermediate_size,
            num_heads=heads,
            num_kv_heads=getattr(target, "num_key_value_heads", None) or heads,
            head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
            vocab_size=target.vocab_size,
            max_position_embeddings=target.max_position_embeddings,
            rms_norm_eps=target.rms_norm_eps,
            initializer_range=target.initializer_range,
            rope_parameters=rope,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for checkpoints and manifests; ``from_dict`` is the inverse."""
        return {**asdict(self), "target_layer_ids": list(self.target_layer_ids)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DrafterConfig":
        return cls(**{**values, "target_layer_ids": tuple(values["target_layer_ids"])})
