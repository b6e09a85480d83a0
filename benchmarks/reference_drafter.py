"""A straightforward PyTorch implementation of the drafter's training step, to measure ours against and to check it.

One sequence at a time, a dense mask, the logits of all slots whole, transformers' own Qwen3 parts. Nothing of
dflash_lightning but the shape of the drafter; the parameters have the same names.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, scaled_dot_product_attention
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from dflash_lightning.config import DrafterConfig


class ReferenceAttention(nn.Module):
    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.head_dim, self.groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, slots: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        def heads(x: Tensor) -> Tensor:
            return x.view(1, x.shape[1], -1, self.head_dim)

        everything = torch.cat((context, slots), dim=1)
        query = self.q_norm(heads(self.q_proj(slots))).transpose(1, 2)
        key = self.k_norm(heads(self.k_proj(everything))).transpose(1, 2)
        value = heads(self.v_proj(everything)).transpose(1, 2)
        num_slots = slots.shape[1]
        query, _ = apply_rotary_pos_emb(query, query, cos[:, -num_slots:], sin[:, -num_slots:])
        key, _ = apply_rotary_pos_emb(key, key, cos, sin)
        key, value = repeat_kv(key, self.groups), repeat_kv(value, self.groups)
        return self.o_proj(scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2))


class ReferenceLayer(nn.Module):
    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = ReferenceAttention(config)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def forward(self, h: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        h = h + self.self_attn(self.input_layernorm(h), context, cos, sin, mask)
        return h + self.mlp(self.post_attention_layernorm(h))


class ReferenceDrafter(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        shape = Qwen3Config(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(ReferenceLayer(shape) for _ in range(config.num_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # A list keeps it out of the module, so that .to(bfloat16) leaves its float32 frequencies alone.
        self.rotary = [Qwen3RotaryEmbedding(shape)]

    def loss(
        self, features: Tensor, input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, table: Tensor, head: Tensor
    ) -> tuple[Tensor, int]:
        """Sum over the blocks of one sequence of decay-weighted cross entropy, and the number of supervised slots.

        Args:
            features: [S, K*H].
            input_ids, loss_mask: [S].
            anchors: [N].
            table, head: [V, H] the target's embedding and head.
        """
        device, block_size = features.device, self.config.block_size
        length, num_blocks = len(input_ids), len(anchors)
        slots = torch.arange(block_size, device=device)
        positions = (anchors[:, None] + slots).flatten()
        tokens = torch.full((num_blocks, block_size), self.config.mask_token_id, device=device)
        tokens[:, 0] = input_ids[anchors]

        block = torch.arange(num_blocks, device=device).repeat_interleave(block_size)
        sees_context = torch.arange(length, device=device)[None] < anchors[block][:, None]
        sees_slots = block[:, None] == block[None]
        mask = torch.cat((sees_context, sees_slots), dim=1)[None, None]

        h = embedding(tokens.flatten(), table)[None]
        context = self.hidden_norm(self.fc(features.to(table.dtype)))[None]
        self.rotary[0].to(device)
        cos, sin = self.rotary[0](h, torch.cat((torch.arange(length, device=device), positions))[None])
        for layer in self.layers:
            h = layer(h, context, cos, sin, mask)
        logits = (self.norm(h)[0] @ head.T).float()

        labels = torch.full((num_blocks, block_size), -100, device=device)
        for number, anchor in enumerate(anchors.tolist()):
            for slot in range(1, block_size):
                if anchor + slot >= length or not loss_mask[anchor + slot]:
                    break
                labels[number, slot] = input_ids[anchor + slot]
        decay = torch.exp(-(slots[1:] - 1) / (block_size / 2))  # the paper's gamma of a block of 8
        weights = torch.cat((torch.zeros(1, device=device), decay / decay.sum())).repeat(num_blocks)
        entropy = cross_entropy(logits, labels.flatten(), reduction="none")
        return (weights * entropy).sum(), int((labels >= 0).sum())
