"""The figures of a report, each counted again by hand; ties told from differences."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import load_tiny, make_drafter

from dflash_lightning.context import Context
from dflash_lightning.decoding import plain_decode, speculative_decode
from dflash_lightning.evaluation import (
    Prompt,
    PromptResult,
    evaluate_prompt,
    is_tie,
    load_prompts,
    summarize,
    tau_interval,
    teacher_forced_lengths,
)
from dflash_lightning.target import load_tokenizer


def result(committed, *, family=None, identical=True, tie=False, forced=(), tokens=5, seconds=1.0, plain_seconds=2.0):
    return PromptResult(
        prompt=Prompt("p", (1,), family),
        token_ids=(7,) * tokens,
        plain_token_ids=(7,) * tokens,
        committed=tuple(committed),
        accepted_teacher_forced=tuple(forced),
        identical=identical,
        tie=tie,
        seconds=seconds,
        plain_seconds=plain_seconds,
    )


def test_a_report_pools_rounds_and_counts_texts():
    report = summarize(
        [
            result([4, 4, 1], family="a", forced=[2, 4], tokens=10, seconds=1.0),
            result([2], family="b", identical=False, tie=True, forced=[3], tokens=3, seconds=0.5),
            result([], family="b", identical=False, tokens=1, seconds=0.5),
        ],
        block_size=4,
    )
    assert report["tau"] == pytest.approx(11 / 4)
    assert report["rounds"] == 4
    assert report["teacher_forced_tau"] == pytest.approx(3.0)
    assert report["by_family"] == {"a": 3.0, "b": 2.0}
    assert report["histogram"] == {"1": 1, "2": 1, "3": 0, "4": 2}
    assert report["lossless"] == {"prompts": 3, "identical": 1, "ties": 1}
    assert report["tokens_per_second"] == pytest.approx(14 / 2.0)
    assert report["baseline_tokens_per_second"] == pytest.approx(14 / 6.0)
    assert report["speedup"] == pytest.approx(3.0)


def test_the_speed_up_is_quoted_against_the_fastest_plain_decoding():
    report = summarize([result([2, 2], tokens=10, seconds=1.0, plain_seconds=5.0)], 4, baseline_tokens_per_second=8.0)
    assert report["baseline_tokens_per_second"] == 8.0
    assert report["speedup"] == pytest.approx(10 / 8)


def test_a_report_without_any_round_has_no_tau():
    report = summarize([result([], tokens=1)], block_size=4)
    assert (report["tau"], report["tau_low"], report["tau_high"]) == (None, None, None)


def test_the_interval_holds_the_mean_of_most_samples():
    """95 % of intervals from samples of a known distribution hold its mean (here: at least 88 of 100)."""
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(100):
        committed = [rng.integers(1, 5, size=6).tolist() for _ in range(40)]
        low, high = tau_interval(committed, seed=trial)
        hits += low <= 2.5 <= high
    assert 88 <= hits <= 100


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
    assert list(teacher_forced_lengths(target, drafter, prompt, text, run.features)) == expected


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
