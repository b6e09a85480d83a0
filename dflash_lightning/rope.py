"""Rotary position embedding in float32, with the target's own frequencies."""

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_lightning.config import DrafterConfig


class RotaryEmbedding:
    """Cosines and sines of absolute positions.

    Not a module on purpose: a buffer would be cast to bf16 together with the weights, and positions beyond 256 would
    then blur. The scaling types come from transformers, so that every server computes the same frequencies.
    """

    def __init__(self, config: DrafterConfig):
        rope = config.rope_parameters
        if rope["rope_type"] == "default":
            self.rotary_dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
            self.inverse_frequencies, self.scaling = 1.0 / rope["rope_theta"] ** exponents, 1.0
        else:
            reference = Qwen3Config(
                head_dim=config.head_dim,
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_heads,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(rope),
            )
            self.inverse_frequencies, self.scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](reference, device="cpu")
            self.rotary_dim = 2 * len(self.inverse_frequencies)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, float32 ``[..., 1, L, rotary_dim]``, for integer ``positions`` ``[..., L]``."""
        if self.inverse_frequencies.device != positions.device:
            with torch.inference_mode(False):  # training may come after the decoding that came first
                self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions[..., None].float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(-3)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``rotary_dim`` channels of ``x`` ``[..., heads, L, head_dim]``; the others pass unchanged."""
    rotary_dim = cos.shape[-1]
    turned, passed = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(x.dtype), passed), dim=-1)
