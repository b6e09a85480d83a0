"""Lossless decoding, and the parity of the training forward with the decoding forward (spec.md 5.1, 5.6)."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import load_tiny, make_drafter

from dflash_lightning.blocks import build_blocks
from dflash_lightning.decoding.context import Context
from dflash_lightning.decoding.decode import plain_decode, speculative_decode
from dflash_lightning.errors import ConfigError
from dflash_lightning.visibility import dense_mask


def naive_greedy(target, prompt, count):
    """Full forward for every token, no cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def test_training_forward_equals_decoding_forward(target_folder):
    target = load_tiny(target_folder)
    drafter = make_drafter(target, scale=5.0)
    torch.manual_seed(3)
    length, block_size = 40, drafter.config.block_size
    input_ids = torch.randint(4, 272, (2, length))
    features = torch.randn(2, length, drafter.config.feature_size)
    loss_mask = torch.ones_like(input_ids)
    document_ids = torch.zeros_like(input_ids)
    anchors = torch.tensor([[1, 7, 8, 20, 38], [3, 4, 5, 30, 0]])
    valid = torch.tensor([[True] * 5, [True] * 4 + [False]])
    blocks = build_blocks(
        input_ids=input_ids,
        loss_mask=loss_mask,
        document_ids=document_ids,
        anchors=anchors,
        valid=valid,
        block_size=block_size,
        mask_token_id=drafter.config.mask_token_id,
    )
    positions = torch.arange(length).expand(2, -1)
    hidden = drafter(
        target.get_input_embeddings()(blocks.input_ids.flatten(1)),
        blocks.positions.flatten(1),
        drafter.context_key_values(features, positions),
        dense_mask(blocks.layout),
    )
    logits = target.get_output_embeddings()(hidden).view(2, 5, block_size, -1)
    for row, column in zip(*torch.nonzero(valid, as_tuple=True), strict=True):
        anchor = int(anchors[row, column])
        # The context arrives in two pieces, as it does from round to round.
        context = Context(target, drafter, [[0] * (anchor // 2)])
        context.extend_drafter(features[row : row + 1, : anchor // 2])
        context.valid = torch.ones(1, anchor, dtype=torch.bool)
        context.extend_drafter(features[row : row + 1, anchor // 2 : anchor])
        (decoded,) = context.draft(input_ids[row, anchor][None])
        torch.testing.assert_close(decoded, logits[row, column, 1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_size", [2, 4, 7])
@pytest.mark.parametrize("prompt_length", [1, 2, 33, 400])
def test_speculative_text_equals_plain_greedy(target_folder, block_size, prompt_length):
    target = load_tiny(target_folder)
    drafter = make_drafter(target, block_size=block_size, scale=3.0)
    prompt = torch.randint(4, 272, (prompt_length,), generator=torch.Generator().manual_seed(7)).tolist()
    expected = naive_greedy(target, prompt, 21)
    assert plain_decode(target, prompt, max_new_tokens=21, stop_ids=()).token_ids == expected
    seen = []
    result = speculative_decode(
        target, drafter, prompt, max_new_tokens=21, stop_ids=(), keep_features=True, on_commit=seen.extend
    )
    assert result.token_ids == expected == seen
    assert 1 + sum(result.committed) == 21
    assert all(1 <= n <= block_size for n in result.committed)
    full = target(torch.tensor([prompt + expected]), output_hidden_states=True).hidden_states
    features = torch.cat([full[i + 1][0] for i in drafter.config.target_layer_ids], dim=-1)
    length = len(result.features)
    assert length == prompt_length + 20
    torch.testing.assert_close(result.features, features[:length], rtol=1e-4, atol=1e-4)


class PerfectDrafter(torch.nn.Module):
    """Knows the text: proposes the target's own continuation, wrong at chosen positions."""

    def __init__(self, drafter, target, prompt_length, text, wrong=()):
        super().__init__()
        self.config, self.context_key_values = drafter.config, drafter.context_key_values
        self.text, self.prompt_length, self.wrong = text, prompt_length, wrong
        # Rows of the pseudo-inverse would do; a head solved by least squares maps exactly for V > H only in argmax.
        self.head = target.get_output_embeddings().weight
        self.device = drafter.device

    def forward(self, embeddings, positions, context, mask=None):  # noqa: ARG002
        hidden = torch.zeros(1, positions.shape[1], self.head.shape[1])
        for slot, position in enumerate(positions[0].tolist()):
            index = position - self.prompt_length
            token = self.text[index] if index < len(self.text) else 5
            if index in self.wrong:
                token = (token + 1) % 200 + 4
            hidden[0, slot] = self.head[token] / self.head[token].norm() ** 2 * 1e3
        return hidden


def perfect_setup(folder, **options):
    target = load_tiny(folder)
    # Argmax of the head must give back the token that a row stands for: rows of one length.
    head = target.get_output_embeddings().weight
    head /= head.norm(dim=1, keepdim=True)
    prompt = [9, 8, 7, 50, 60]
    text = naive_greedy(target, prompt, 30)
    return target, prompt, text, PerfectDrafter(make_drafter(target), target, len(prompt), text, **options)


def test_whole_blocks_are_accepted_when_every_proposal_is_right(qwen3_folder):
    target, prompt, text, drafter = perfect_setup(qwen3_folder)
    result = speculative_decode(target, drafter, prompt, max_new_tokens=22, stop_ids=())
    assert result.token_ids == text[:22]
    assert result.committed == [4, 4, 4, 4, 4, 1]  # the length limit cuts the last block


def test_a_wrong_proposal_ends_the_round_with_the_targets_own_token(qwen3_folder):
    target, prompt, text, drafter = perfect_setup(qwen3_folder, wrong={2, 6})
    result = speculative_decode(target, drafter, prompt, max_new_tokens=14, stop_ids=())
    assert result.token_ids == text[:14]
    # Anchors at 0, 2, 6, 10: slots 1.. of the first block propose 1 (right), 2 (wrong) -> 1 accepted + bonus.
    assert result.committed == [2, 4, 4, 3]


@pytest.mark.parametrize("slot", [1, 2, 3, 4])
def test_the_first_of_several_stop_tokens_in_an_accepted_block_ends_the_text(qwen3_folder, slot):
    """At every place of a block that is accepted whole, the bonus (slot 4) included."""
    target, prompt, text, drafter = perfect_setup(qwen3_folder)
    position = next(i for i in range(slot, 26, 4) if text[i] not in text[:i])
    later = set(text[position + 1 :]) - set(text[:position])
    limits = {"max_new_tokens": 30, "stop_ids": (*later, text[position])}
    result = speculative_decode(target, drafter, prompt, **limits)
    assert result.token_ids == text[: position + 1] == plain_decode(target, prompt, **limits).token_ids
    # Blocks of 4 from the anchors 0, 4, 8...: what the stop token cuts off isn't counted.
    assert result.committed == [4] * ((position - 1) // 4) + [slot]


@pytest.mark.parametrize("limit", range(1, 11))
def test_the_length_limit_is_exact(qwen3_folder, limit):
    target, prompt, text, drafter = perfect_setup(qwen3_folder)
    result = speculative_decode(target, drafter, prompt, max_new_tokens=limit, stop_ids=())
    assert result.token_ids == text[:limit]
    assert sum(result.committed) == limit - 1


def test_a_text_ends_with_the_targets_last_position(target_folder):
    """Prompt, answer and block together may be more than the target's 512 positions: the block, not the answer, hangs
    over."""
    target = load_tiny(target_folder)
    drafter = make_drafter(target, block_size=7, scale=3.0)
    generator = torch.Generator().manual_seed(7)
    for room in (1, 2, 9):
        prompt = torch.randint(4, 272, (512 - room,), generator=generator).tolist()
        expected = naive_greedy(target, prompt, room)
        for run in (plain_decode, partial(speculative_decode, drafter=drafter)):
            assert run(target, prompt_ids=prompt, max_new_tokens=40, stop_ids=()).token_ids == expected


def test_mask_tokens_that_the_target_says_are_counted(qwen3_folder):
    target, prompt, text, drafter = perfect_setup(qwen3_folder)
    assert speculative_decode(target, drafter, prompt, max_new_tokens=9, stop_ids=()).mask_tokens == 0
    drafter.config = replace(drafter.config, mask_token_id=text[5])
    result = speculative_decode(target, drafter, prompt, max_new_tokens=9, stop_ids=())
    assert result.token_ids == text[:9]
    assert result.mask_tokens == text[:9].count(text[5]) > 0


def test_a_first_token_that_stops_needs_no_round(qwen3_folder):
    target, prompt, text, drafter = perfect_setup(qwen3_folder)
    result = speculative_decode(target, drafter, prompt, max_new_tokens=30, stop_ids=(text[0],), keep_features=True)
    assert (result.token_ids, result.committed) == ([text[0]], [])
    assert len(result.features) == len(prompt)


@pytest.mark.parametrize(
    ("prompt_length", "max_new_tokens", "message"),
    [
        (0, 4, "the prompt has no tokens"),
        (1, 0, "max_new_tokens is 0"),
        (512, 4, r"the prompt has 512 tokens, and the target has 512 positions .* Shorten"),
        (600, 4, "the prompt has 600 tokens"),
    ],
)
def test_no_prompt_and_no_room_are_refused(llama_folder, prompt_length, max_new_tokens, message):
    target = load_tiny(llama_folder)
    limits = {"max_new_tokens": max_new_tokens, "stop_ids": ()}
    for run in (plain_decode, partial(speculative_decode, drafter=make_drafter(target))):
        with pytest.raises(ConfigError, match=message):
            run(target, prompt_ids=[5] * prompt_length, **limits)
