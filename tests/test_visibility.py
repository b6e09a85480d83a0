"""The visibility rule against the sentence it stands for, and its two forms against each other (spec.md 5.3)."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dflash_lightning import visibility
from dflash_lightning.visibility import Layout, attend, compile_for_all_shapes, dense_mask, flex_mask

# rows, documents' lengths in each row (padding follows), context length, blocks, block size
SHAPES = {
    "one token": ([[1]], 1, 1, 2),
    "one block": ([[9]], 9, 1, 4),
    "blocks of 3, odd context": ([[31], [17]], 31, 5, 3),
    "more than 128 queries, no multiple": ([[70], [70], [41]], 70, 19, 7),
    "exactly 128 queries": ([[33]], 33, 8, 16),
    "more than 128 keys of context": ([[150], [129]], 150, 3, 5),
    "several documents and padding": ([[5, 9, 1, 12], [20, 3], [2]], 27, 6, 4),
    "a row of padding only": ([[12], []], 12, 3, 4),
    "block size 64": ([[40]], 40, 3, 64),
}


def make_layout(name: str) -> Layout:
    """Random anchors within each row, also in its padding, as padded blocks have them."""
    documents, length, blocks, block_size = SHAPES[name]
    document_ids = torch.full((len(documents), length), -1)
    for row, lengths in enumerate(documents):
        start = 0
        for number, tokens in enumerate(lengths):
            document_ids[row, start : start + tokens] = number
            start += tokens
    generator = torch.Generator().manual_seed(len(name))
    anchors = torch.randint(0, length, (len(documents), blocks), generator=generator).sort(dim=1).values
    return Layout(anchors=anchors, document_ids=document_ids, block_size=block_size)


def visible(layout: Layout, row: int, block: int, key: tuple) -> bool:
    """Context strictly before the own anchor in the same document, and every slot of the own block."""
    if key[0] == "slot":
        return key[1] == block
    anchor = int(layout.anchors[row, block])
    document = int(layout.document_ids[row, anchor])
    return key[1] < anchor and int(layout.document_ids[row, key[1]]) == document


def naive_mask(layout: Layout) -> torch.Tensor:
    rows, blocks = layout.anchors.shape
    keys = [("context", j) for j in range(layout.document_ids.shape[1])]
    keys += [("slot", b, k) for b in range(blocks) for k in range(layout.block_size)]
    return torch.tensor(
        [
            [[visible(layout, row, b, key) for key in keys] for b in range(blocks) for k in range(layout.block_size)]
            for row in range(rows)
        ]
    )


@pytest.mark.parametrize("name", SHAPES)
def test_the_rule_equals_the_naive_double_loop(name):
    layout = make_layout(name)
    mask = dense_mask(layout)
    assert mask.shape == (len(layout.anchors), 1, layout.num_queries, layout.num_keys)
    assert torch.equal(mask[:, 0], naive_mask(layout))


@pytest.mark.parametrize("name", SHAPES)
def test_no_query_is_fully_masked(name):
    layout = make_layout(name)
    assert dense_mask(layout).sum(dim=-1).min() >= layout.block_size


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", SHAPES)
def test_flex_attention_equals_sdpa_and_naive_attention(name):
    layout = make_layout(name)
    generator = torch.Generator().manual_seed(1)
    rows, heads, kv_heads, size = len(layout.anchors), 4, 2, 16
    query = torch.randn(rows, heads, layout.num_queries, size, generator=generator)
    key, value = torch.randn(2, rows, kv_heads, layout.num_keys, size, generator=generator)
    with torch.no_grad():
        dense = attend(query, key, value, dense_mask(layout))
        flex = attend(query, key, value, flex_mask(layout))
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)

    scores = query.double() @ key.double().repeat_interleave(heads // kv_heads, dim=1).mT / size**0.5
    scores[~naive_mask(layout)[:, None].expand_as(scores)] = -torch.inf
    naive = scores.softmax(dim=-1) @ value.double().repeat_interleave(heads // kv_heads, dim=1)
    torch.testing.assert_close(dense.double(), naive, rtol=1e-5, atol=1e-5)


def test_without_a_mask_every_query_sees_every_key():
    query, key, value = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(2))
    naive = (query @ key.mT / 8**0.5).softmax(dim=-1) @ value
    torch.testing.assert_close(attend(query, key, value, None), naive, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@torch.compiler.set_stance("default")
def test_flex_attention_is_compiled_once_for_all_lengths(monkeypatch):
    """As on CUDA, but for the code that the compiler makes: FlexAttention's has no backward on CPU."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    attention = compile_for_all_shapes(flex_attention)
    monkeypatch.setattr(visibility, "create_block_mask", compile_for_all_shapes(create_block_mask))
    torch._dynamo.reset()
    counters.clear()
    compiled = []
    for rows, blocks, length in [(2, 24, 100), (3, 24, 230), (4, 20, 300), (2, 17, 160), (8, 32, 256), (4, 24, 700)]:
        anchors = (
            torch.randint(0, length, (rows, blocks), generator=torch.Generator().manual_seed(length)).sort().values
        )
        layout = Layout(anchors, torch.zeros(rows, length, dtype=torch.long), block_size=8)
        query = torch.randn(rows, 4, layout.num_queries, 16)
        key, value = torch.randn(2, rows, 2, layout.num_keys, 16)
        with torch.no_grad():
            found = attention(query, key, value, block_mask=flex_mask(layout), enable_gqa=True)
        torch.testing.assert_close(found, attend(query, key, value, dense_mask(layout)), rtol=1e-5, atol=1e-5)
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled == [2] * 6  # the mask and the attention, in the first batch
