"""Batches of prompts of unequal length: every row gets what it would get alone."""

import itertools

import pytest
import torch
from helpers import load_tiny, make_drafter
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_lightning.decoding.context import Context
from dflash_lightning.decoding.decode import plain_decode, speculative_decode, speculative_decode_batch
from dflash_lightning.errors import ConfigError

LENGTHS = [1, 17, 4, 4, 30]


def random_prompts(lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, 272, (length,), generator=generator).tolist() for length in lengths]


def tell(monkeypatch, prompts, texts, wrong) -> None:
    """Let the drafter propose what plain decoding gives, but for each index where ``wrong(prompt, index)``."""
    draft = Context.draft

    def informed(context, anchors):
        logits = torch.zeros_like(draft(context, anchors))
        for row, (length, anchor) in enumerate(zip(context.lengths.tolist(), anchors.tolist(), strict=True)):
            prompt = next(
                i
                for i, text in enumerate(texts)
                if 0 <= length - len(prompts[i]) < len(text) and text[length - len(prompts[i])] == anchor
            )
            for slot in range(logits.shape[1]):
                index = length - len(prompts[prompt]) + 1 + slot
                token = 3 if wrong(prompt, index) or index >= len(texts[prompt]) else texts[prompt][index]
                logits[row, slot, token] = 1.0
        return logits

    monkeypatch.setattr(Context, "draft", informed)


@pytest.mark.parametrize("block_size", [2, 5])
def test_rows_advance_each_by_its_own_acceptance(target_folder, block_size, monkeypatch):
    target, prompts = load_tiny(target_folder), random_prompts()
    drafter = make_drafter(target, block_size=block_size, scale=3.0)
    limits = {"max_new_tokens": 40, "stop_ids": range(4, 272, 20)}
    texts = [plain_decode(target, prompt, **limits).token_ids for prompt in prompts]
    tell(monkeypatch, prompts, texts, wrong=lambda prompt, index: index % (prompt + 2) == 0)
    seen = [[] for _ in prompts]
    together = speculative_decode_batch(
        target, drafter, prompts, keep_features=True, on_commit=lambda i, tokens: seen[i].extend(tokens), **limits
    )
    alone = [speculative_decode(target, drafter, prompt, keep_features=True, **limits) for prompt in prompts]
    assert len({len(text) for text in texts}) > 2  # some end early, at different lengths
    assert max(max(run.committed, default=0) for run in alone) > 1
    for batched, single, text, told in zip(together, alone, texts, seen, strict=True):
        assert batched.token_ids == single.token_ids == text == told
        assert batched.committed == single.committed
        torch.testing.assert_close(batched.features, single.features, rtol=1e-4, atol=1e-4)


def test_holes_are_squeezed_out(llama_folder, monkeypatch):
    """A row that accepts nothing beside one that accepts everything leaves holes; they never make up more than half."""
    target, prompts = load_tiny(llama_folder), random_prompts([3, 20])
    drafter = make_drafter(target, block_size=7, scale=3.0)
    limits = {"max_new_tokens": 60, "stop_ids": ()}
    texts = [plain_decode(target, prompt, **limits).token_ids for prompt in prompts]
    tell(monkeypatch, prompts, texts, wrong=lambda prompt, _index: prompt == 1)
    squeeze, seen = Context.squeeze, []

    def watched(context):
        squeeze(context)
        seen.append((context.valid.shape[1], int(context.lengths.max())))

    monkeypatch.setattr(Context, "squeeze", watched)
    runs = speculative_decode_batch(target, drafter, prompts, **limits)
    assert [run.token_ids for run in runs] == texts
    assert runs[0].committed == [7] * 8 + [3]
    assert runs[1].committed.count(1) > 50
    assert all(width < 2 * longest for width, longest in seen)
    assert any(later < earlier for (earlier, _), (later, _) in itertools.pairwise(seen))


def test_each_row_ends_with_the_targets_last_position(llama_folder):
    target = load_tiny(llama_folder)
    drafter = make_drafter(target, block_size=7, scale=3.0)
    prompts = random_prompts([509, 3, 511, 480])
    limits = {"max_new_tokens": 24, "stop_ids": ()}
    runs = speculative_decode_batch(target, drafter, prompts, **limits)
    assert [len(run.token_ids) for run in runs] == [3, 24, 1, 24]
    for prompt, run in zip(prompts, runs, strict=True):
        assert run.token_ids == plain_decode(target, prompt, **limits).token_ids
    with pytest.raises(ConfigError, match="prompt 2 of 2 has 512 tokens"):
        speculative_decode_batch(target, drafter, [[5], [5] * 512], **limits)


def test_a_batch_for_sliding_windows_is_refused():
    config = Qwen3Config(
        **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 6, "head_dim": 8},
        **{"num_attention_heads": 2, "num_key_value_heads": 1},
        layer_types=["full_attention", "sliding_attention"] * 3,
        use_sliding_window=True,
        sliding_window=8,
    )
    target = Qwen3ForCausalLM(config).eval()
    drafter = make_drafter(target)
    with pytest.raises(ConfigError, match="sliding_attention; a batch of prompts needs full_attention"):
        speculative_decode_batch(target, drafter, [[5], [6]], max_new_tokens=4, stop_ids=())
    prompt = [5, 6, 7] * 5
    run = speculative_decode(target, drafter, prompt, max_new_tokens=20, stop_ids=())
    assert run.token_ids == plain_decode(target, prompt, max_new_tokens=20, stop_ids=()).token_ids
