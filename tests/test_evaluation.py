"""One prompt decoded and compared: ties told from differences, teacher forcing counted again by drafting."""

from types import SimpleNamespace

import pytest
import torch
from helpers import load_tiny, make_drafter

from dflash_lightning.decoding.context import Context
from dflash_lightning.decoding.decode import plain_decode, speculative_decode
from dflash_lightning.decoding.ties import is_tie
from dflash_lightning.errors import DataError
from dflash_lightning.evaluation.prompt_results import Prompt, evaluate_prompt, load_prompts
from dflash_lightning.evaluation.teacher_forcing import teacher_forced_lengths
from dflash_lightning.target import load_tokenizer


class GivenLogits:
    """A target whose next-token logits are given."""

    device = torch.device("cpu")

    def __init__(self, logits):
        self.logits, self.seen = logits, None

    def __call__(self, ids, **_):
        self.seen = ids[0].tolist()
        return SimpleNamespace(logits=self.logits[None, None])


@pytest.mark.parametrize(("gap", "expected"), [(0.0, True), (0.25, True), (0.5, True), (0.625, False), (3.0, False)])
def test_a_tie_is_a_gap_of_at_most_four_units_in_the_last_place(gap, expected):
    # bf16 has 8 bits of mantissa: between 16 and 32 its unit is 0.125.
    target = GivenLogits(torch.tensor([0.0, 17.0, 17.0 - gap, 1.0], dtype=torch.bfloat16))
    assert is_tie(target, [9, 9], [5, 1, 3], [5, 2, 2]) is expected
    assert target.seen == [9, 9, 5]


def test_texts_of_which_one_goes_on_are_no_tie():
    assert is_tie(GivenLogits(torch.zeros(4)), [9], [1, 2], [1, 2, 3]) is False


@pytest.mark.parametrize("block_size", [3, 4])
def test_teacher_forced_lengths_equal_drafts_at_every_anchor(llama_folder, block_size):
    """Independent count: draft at each position from the features before it, and compare with the text."""
    target = load_tiny(llama_folder)
    drafter = make_drafter(target, block_size=block_size, scale=3.0)
    prompt = Prompt("p", tuple(range(10, 18)))
    text = plain_decode(target, prompt.token_ids, max_new_tokens=20, stop_ids=()).token_ids
    run = speculative_decode(target, drafter, prompt.token_ids, max_new_tokens=20, stop_ids=(), keep_features=True)
    tokens = [*prompt.token_ids, *text]
    expected = []
    with torch.no_grad():
        states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
        for anchor in range(len(prompt.token_ids), len(tokens) - 1):
            context = Context(target, drafter, [tokens[:anchor]])
            context.extend_drafter(features[:, :anchor])
            (proposals,) = context.draft(torch.tensor([tokens[anchor]])).argmax(dim=-1).tolist()
            length = 1
            for proposal, token in zip(proposals, tokens[anchor + 1 :], strict=False):
                if proposal != token:
                    break
                length += 1
            expected.append(length)
    found = teacher_forced_lengths(target, drafter, prompt.token_ids, text, run.features, sample_id=prompt.id)
    assert list(found) == expected


def test_one_prompt_is_evaluated_against_its_plain_run(llama_folder):
    target = load_tiny(llama_folder)
    drafter = make_drafter(target, scale=3.0)
    prompt = Prompt("p", (5, 6, 7), "family")
    plain = plain_decode(target, prompt.token_ids, max_new_tokens=9, stop_ids=())
    found = evaluate_prompt(target, drafter, prompt, plain, max_new_tokens=9, stop_ids=())
    assert found.identical
    assert not found.tie
    assert sum(found.committed) == 8
    plain.token_ids[4] = (plain.token_ids[4] + 1) % 272
    found = evaluate_prompt(target, drafter, prompt, plain, max_new_tokens=9, stop_ids=())
    assert not found.identical
    assert not found.tie


def test_prompts_keep_their_family_and_ignore_answers(llama_folder, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "x", "prompt": "hi", "family": "f", "response": "yes yes"}\n{"prompt": "ho"}\n')
    tokenizer = load_tokenizer(str(llama_folder))
    first, second = load_prompts(path, tokenizer)
    assert (first.id, first.family, second.family) == ("x", "f", None)
    assert tokenizer.decode(first.token_ids) == "<|start|>user\nhi<|end|><|start|>assistant\n"
    path.write_text('{"turns": ["hi", "ho"]}\n')
    with pytest.raises(DataError, match="only `evaluate` can ask"):
        load_prompts(path, tokenizer)
