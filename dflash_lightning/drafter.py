"""The drafter: Qwen3-style decoder layers whose keys and values also come from the target's features.

Shapes: R rows (sequences), S context tokens, Q slots (blocks x block size), H hidden size, K tapped layers, d head dim.
Parameter names are those of the official checkpoints, so that nothing is renamed at export.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from dflash_lightning.config import DrafterConfig
from dflash_lightning.rope import RotaryEmbedding, rotate
from dflash_lightning.visibility import AttentionMask, attend

KeyValue = tuple[Tensor, Tensor]


class Linear(nn.Linear):
    """A matrix without bias, N(0, initializer_range).

    It is initialised as it is made: under ZeRO-3 the weights are partitioned right after, out of reach of a later pass
    over the modules.
    """

    def __init__(self, in_features: int, out_features: int, config: DrafterConfig):
        self._std = config.initializer_range
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self._std)


class Attention(nn.Module):
    """Queries from the slots; keys and values from context and slots through the same projections."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim, config)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim, config)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim, config)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, config)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def key_value(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> KeyValue:
        """Keys and values [R, kv_heads, L, d] of ``x`` [R, L, H]: fused context, or normed slots."""
        key = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        return rotate(key, *rotary), self._heads(self.v_proj(x)).transpose(1, 2)

    def forward(self, x: Tensor, context: KeyValue, rotary: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        query = rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), *rotary)
        key, value = (torch.cat(pair, dim=2) for pair in zip(context, self.key_value(x, rotary), strict=True))
        return self.o_proj(attend(query, key, value, mask).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, config)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, config)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, h: Tensor, context: KeyValue, rotary: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        h = h + self.self_attn(self.input_layernorm(h), context, rotary, mask)
        return h + self.mlp(self.post_attention_layernorm(h))


class Drafter(nn.Module):
    """Block-diffusion drafter without own embedding or head: both are the target's, applied by the caller.

    Attributes:
        activation_checkpointing: keep only the input of each layer for the backward, which computes the rest again.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config, self.activation_checkpointing = config, False
        self.fc = Linear(config.feature_size, config.hidden_size, config)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config)

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def context_key_values(self, features: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of the context for each layer: fused once, projected by every layer.

        They depend on features and positions alone, so decoding keeps them from round to round.

        Args:
            features: [R, S, K*H] tapped target features, concatenated in the order of ``target_layer_ids``.
            positions: [R, S] absolute positions.

        Returns:
            One (key, value) pair [R, kv_heads, S, d] a layer.
        """
        context = self.hidden_norm(self.fc(features))
        rotary = self.rotary(positions)
        return [layer.self_attn.key_value(context, rotary) for layer in self.layers]

    def forward(
        self, block_embeddings: Tensor, positions: Tensor, context: list[KeyValue], mask: AttentionMask = None
    ) -> Tensor:
        """Final hidden states [R, Q, H] of the slots; the target's head turns them into logits.

        Args:
            block_embeddings: [R, Q, H] target embeddings of anchors and mask tokens.
            positions: [R, Q] absolute positions, anchor + slot.
            context: the result of ``context_key_values``.
            mask: which keys each slot sees; none when decoding, where a single block sees the whole context.
        """
        h = block_embeddings
        rotary = self.rotary(positions)
        for layer, key_value in zip(self.layers, context, strict=True):
            if self.activation_checkpointing:
                # No dropout: there is no random state to bring back.
                h = checkpoint(layer, h, key_value, rotary, mask, use_reentrant=False, preserve_rng_state=False)
            else:
                h = layer(h, key_value, rotary, mask)
        return self.norm(h)
