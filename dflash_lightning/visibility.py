"""Which keys a slot may see: the one rule, and the two forms in which attention takes it.

Queries are the slots of all blocks, ``[block 0 | block 1 | ...]``; keys are ``[context features | the same slots]``.
A slot sees the context strictly before its own anchor, in the same document, and every slot of its own block. Nothing
else: not the anchor's own feature (at decode time the target hasn't processed the anchor yet), no other block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as symbolic_shapes_config
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

AttentionMask = Tensor | BlockMask | None


@dataclass(frozen=True)
class Layout:
    """Where the blocks of a batch stand.

    Attributes:
        anchors: [R, N] row index of each block's anchor in its context; padded blocks may hold any index in range.
        document_ids: [R, S] document of each context token, -1 for padding.
        block_size: slots in a block.
    """

    anchors: Tensor
    document_ids: Tensor
    block_size: int

    @property
    def num_queries(self) -> int:
        return self.anchors.shape[1] * self.block_size

    @property
    def num_keys(self) -> int:
        return self.document_ids.shape[1] + self.num_queries


def visibility_rule(layout: Layout) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule as ``rule(row, head, query, key) -> bool`` on index tensors: FlexAttention's ``mask_mod``."""
    anchors, documents, block_size = layout.anchors, layout.document_ids, layout.block_size
    num_blocks, context_length = anchors.shape[1], documents.shape[1]
    anchor_documents = documents.gather(1, anchors)

    def rule(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # FlexAttention rounds the number of queries and keys up to 128, hence the clamps.
        block = (query // block_size).clamp(max=num_blocks - 1)
        position = key.clamp(max=context_length - 1)
        in_context = key < context_length
        before_anchor = position < anchors[row, block]
        same_document = documents[row, position] == anchor_documents[row, block]
        own_block = (key - context_length) // block_size == block
        return (in_context & before_anchor & same_document) | (~in_context & own_block)

    return rule


def dense_mask(layout: Layout) -> Tensor:
    """The rule as a boolean mask [R, 1, Q, KV] for scaled_dot_product_attention."""
    device = layout.anchors.device
    row = torch.arange(layout.anchors.shape[0], device=device)[:, None, None]
    query = torch.arange(layout.num_queries, device=device)[None, :, None]
    key = torch.arange(layout.num_keys, device=device)[None, None, :]
    return visibility_rule(layout)(row, row, query, key).unsqueeze(1)


def compile_for_all_shapes(function: Callable) -> Callable:
    """``function`` compiled with sizes as symbols: batches of other lengths don't compile it again.

    A size of 1 is always a case of its own (batches of one row, say). Two sizes that happen to be equal aren't, as they
    would be by default. Too many cases raise an error; without ``fullgraph`` it would silently run uncompiled.
    """
    compiled = torch.compile(function, dynamic=True, fullgraph=True)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with symbolic_shapes_config.patch(use_duck_shape=False):
            return compiled(*args, **kwargs)

    return call


_compiled_create_block_mask = compile_for_all_shapes(create_block_mask)
_compiled_flex_attention = compile_for_all_shapes(flex_attention)


def flex_mask(layout: Layout) -> BlockMask:
    """The rule as a FlexAttention block mask, built once a batch and shared by all layers and heads."""
    # Uncompiled it would hold the dense mask, and int64 indices of that size.
    create = _compiled_create_block_mask if layout.anchors.is_cuda else create_block_mask
    return create(
        visibility_rule(layout),
        B=layout.anchors.shape[0],
        H=None,
        Q_LEN=layout.num_queries,
        KV_LEN=layout.num_keys,
        device=layout.anchors.device,
    )


def attention_mask(layout: Layout) -> AttentionMask:
    """The form that suits the device: FlexAttention on CUDA; elsewhere a dense mask, as FlexAttention has no backward
    on CPU (torch 2.13)."""
    return flex_mask(layout) if layout.anchors.is_cuda else dense_mask(layout)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
    """Attention of ``query`` [R, heads, Q, d] over ``key``, ``value`` [R, kv_heads, KV, d]; without a mask each query
    sees every key."""
    if isinstance(mask, BlockMask):
        attention = _compiled_flex_attention if query.is_cuda else flex_attention
        return attention(query, key, value, block_mask=mask, enable_gqa=True)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
