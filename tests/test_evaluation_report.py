"""The report of an evaluation: each figure counted again by hand or by the official benchmark; tables and picture."""

from types import SimpleNamespace

import numpy as np
import pytest
from dflash.benchmark import _print_decode_summary

from dflash_lightning.decoding.tau import tau_interval
from dflash_lightning.evaluation.plot import draw_report
from dflash_lightning.evaluation.prompt_results import Prompt, PromptResult
from dflash_lightning.evaluation.report import summarize
from dflash_lightning.evaluation.table import print_report


def result(
    committed,
    *,
    name="p",
    turn=0,
    family=None,
    identical=True,
    tie=False,
    mask_tokens=0,
    forced=(),
    tokens=5,
    seconds=1.0,
    plain_seconds=2.0,
    prefill_seconds=0.1,
    plain_prefill_seconds=0.2,
):
    return PromptResult(
        prompt=Prompt(name, (1,), family, turn),
        token_ids=(7,) * tokens,
        plain_token_ids=(7,) * tokens,
        committed=tuple(committed),
        accepted_teacher_forced=tuple(forced),
        identical=identical,
        tie=tie,
        mask_tokens=mask_tokens,
        seconds=seconds,
        plain_seconds=plain_seconds,
        prefill_seconds=prefill_seconds,
        plain_prefill_seconds=plain_prefill_seconds,
    )


def test_a_report_pools_rounds_and_counts_texts():
    report = summarize(
        [
            result([4, 4, 1], name="x", family="a", forced=[2, 4], tokens=10, prefill_seconds=0.1),
            result([2], name="y", family="b", identical=False, tie=True, forced=[3], tokens=3, seconds=0.5),
            result([], name="z", family="b", identical=False, tokens=1, seconds=0.5, prefill_seconds=0.4),
        ],
        block_size=4,
    )
    assert report["tau"] == pytest.approx(11 / 4)
    assert report["rounds"] == 4
    assert report["teacher_forced_tau"] == pytest.approx(3.0)
    assert report["by_family"] == {"a": 3.0, "b": 2.0}
    assert report["histogram"] == {"1": 1, "2": 1, "3": 0, "4": 2}
    assert report["teacher_forced_histogram"] == {"1": 0, "2": 1, "3": 1, "4": 1}
    assert report["lossless"] == {"prompts": 3, "identical": 1, "ties": 1, "differing": 1}
    assert (report["prompts"], report["texts"]) == (3, 3)
    assert report["tau_mean"] == pytest.approx((3 + 2) / 2)  # a text without a round has no tau
    assert (report["seconds_to_first_token"], report["plain_seconds_to_first_token"]) == (0.1, 0.2)
    assert report["tokens_per_second"] == pytest.approx(14 / 2.0)
    assert report["baseline_tokens_per_second"] == pytest.approx(14 / 6.0)
    assert report["speedup"] == pytest.approx(3.0)


def test_the_speed_up_is_quoted_against_the_fastest_plain_decoding():
    report = summarize([result([2, 2], tokens=10, seconds=1.0, plain_seconds=5.0)], 4, baseline_tokens_per_second=8.0)
    assert report["baseline_tokens_per_second"] == 8.0
    assert report["speedup"] == pytest.approx(10 / 8)


def test_a_report_without_any_round_has_no_tau():
    report = summarize([result([], tokens=1)], block_size=4)
    for key in ("tau", "tau_mean"):
        assert (report[key], report[f"{key}_low"], report[f"{key}_high"]) == (None, None, None)
    assert report["acceptance_by_slot"] == report["conditional_acceptance_by_slot"] == [None, None, None]


def test_the_interval_holds_the_mean_of_most_samples():
    """95 % of intervals from samples of a known distribution hold its mean (here: at least 88 of 100)."""
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(100):
        committed = [rng.integers(1, 5, size=6).tolist() for _ in range(40)]
        low, high = tau_interval(committed, seed=trial)
        hits += low <= 2.5 <= high
    assert 88 <= hits <= 100


def conversations(seed=0, count=30, block_size=8):
    """Texts of one to three turns, prompts that are accepted well and badly."""
    rng = np.random.default_rng(seed)
    texts = []
    for number in range(count):
        chance = rng.uniform(0.2, 0.9)
        for turn in range(rng.integers(1, 4)):
            rounds = np.minimum(rng.geometric(1 - chance, size=rng.integers(1, 20)), block_size).tolist()
            texts.append(result(rounds, name=f"p{number}", turn=turn, forced=[1, 2, 3]))
    return texts


def test_tau_and_histogram_are_those_of_the_official_benchmark(capsys):
    texts = conversations()
    report = summarize(texts, block_size=8)
    times = {1: SimpleNamespace(time_per_output_token=1.0)}
    spoken = [{**times, 8: SimpleNamespace(time_per_output_token=1.0, acceptance_lengths=t.committed)} for t in texts]
    _print_decode_summary(spoken, 8)
    printed = capsys.readouterr().out
    assert f"Average Acceptance length: {report['tau_mean']:.2f}" in printed
    shares = [f"{100 * count / report['rounds']:.1f}%" for count in (0, *report["histogram"].values())]
    assert f"Acceptance length histogram: {shares}" in printed
    assert abs(report["tau_mean"] - report["tau"]) > 0.1  # or this would not tell them apart


def test_acceptance_by_slot_adds_up_to_tau_and_its_conditions_multiply_to_it():
    texts = conversations()
    report = summarize(texts, block_size=8)
    rounds = [n for text in texts for n in text.committed]
    assert report["acceptance_by_slot"] == [sum(n > k for n in rounds) / len(rounds) for k in range(1, 8)]
    assert report["tau"] == pytest.approx(1 + sum(report["acceptance_by_slot"]))
    assert np.cumprod(report["conditional_acceptance_by_slot"]) == pytest.approx(report["acceptance_by_slot"])


def test_whole_conversations_are_drawn_for_the_intervals():
    """Turns that repeat what the first one says make no interval narrower."""
    once = [result(text.committed, name=text.prompt.id) for text in conversations() if text.prompt.turn == 0]
    thrice = [result(text.committed, name=text.prompt.id, turn=turn) for text in once for turn in range(3)]
    first, second = summarize(once, 8), summarize(thrice, 8)
    assert (second["prompts"], second["texts"]) == (30, 90)
    for key in ("tau", "tau_low", "tau_high", "tau_mean", "tau_mean_low", "tau_mean_high"):
        assert second[key] == pytest.approx(first[key])
    assert first["tau_mean_low"] < first["tau_mean"] < first["tau_mean_high"]


def test_a_conversation_is_identical_only_if_all_its_turns_are():
    texts = [
        *(result([1], name="same", turn=turn) for turn in range(2)),
        result([1], name="tie", turn=0, mask_tokens=2),
        result([1], name="tie", turn=1, identical=False, tie=True, mask_tokens=2),
        result([1], name="other", turn=0, identical=False, tie=True),
        result([1], name="other", turn=1, identical=False),
    ]
    report = summarize(texts, block_size=4)
    assert report["lossless"] == {"prompts": 3, "identical": 1, "ties": 1, "differing": 1}
    assert report["mask_token_prompts"] == 1


def test_of_sampled_texts_losslessness_is_not_counted(capsys):
    report = summarize([result([1, 3], identical=None, mask_tokens=2)], block_size=4)
    assert report["lossless"] is None
    assert report["mask_token_prompts"] == 1
    print_report({**report, "prompt_set": "x.jsonl"})
    assert "not counted: sampled texts needn't be equal" in capsys.readouterr().out


@pytest.mark.parametrize("texts", [conversations(block_size=16), [result([])]], ids=["many", "none"])
def test_the_tables_fit_80_columns_and_the_picture_shows_the_report(capsys, texts):
    report = {
        **summarize(texts, block_size=16, baseline_tokens_per_second=12345.6),
        "prompt_set": "gsm8k, 128 of 1,319",
    }
    report["by_family"] = {"a rather long name of a family of prompts": report["tau"]}
    print_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert len(lines) == 8 + 1 + 1 + 17  # no line is broken in two
    assert f"16  {report['histogram']['16']:>6}" in lines[-1]
    slots, rounds = draw_report(report, "title").axes
    assert [bar.get_height() for bar in rounds.patches][:16] == list(report["histogram"].values())
    decoded, forced, conditional = (line.get_ydata() for line in slots.lines)
    for shown, key in ((decoded, "acceptance_by_slot"), (conditional, "conditional_acceptance_by_slot")):
        np.testing.assert_array_equal(shown, [np.nan if share is None else share for share in report[key]])
    np.testing.assert_allclose(forced, [2 / 3, 1 / 3, *[0] * 13] if len(texts) > 1 else [np.nan] * 15)
