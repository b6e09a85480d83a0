"""The quickstart: its prompts and answers, its stages, and the shortened form of `make quickstart` for real."""

import json
import re
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import yaml
from page_commands import ROOT, commands_run_by, recipe

from dflash_lightning.decoding.ties import is_tie
from dflash_lightning.prepare.greedy import greedy_answers
from dflash_lightning.prompts.rows import prompt_token_ids, read_prompts
from dflash_lightning.quickstart.__main__ import write_training_config
from dflash_lightning.quickstart.prompts import FAMILIES, HELD_OUT_PER_FAMILY, TRAIN_PER_FAMILY, make_prompts
from dflash_lightning.quickstart.runner import StageFailed, StageRunner
from dflash_lightning.target import load_target, load_tokenizer, stop_token_ids

ANSWERS = files("dflash_lightning.quickstart") / "answers.jsonl"


def test_held_out_prompts_are_never_trained_on_and_take_turns():
    train, held_out = make_prompts()
    assert (len(train), len(held_out)) == (TRAIN_PER_FAMILY * 6, HELD_OUT_PER_FAMILY * 6)
    prompts = [row["prompt"] for row in train + held_out]
    assert len(set(prompts)) == len(prompts)
    assert [row["family"] for row in held_out[:6]] == list(FAMILIES)
    assert make_prompts() == (train, held_out)


def test_committed_answers_belong_to_the_training_prompts():
    train, _ = make_prompts()
    expected = {row["id"]: row["prompt"] for row in train}
    rows = read_prompts(Path(str(ANSWERS)))
    assert len(rows) > 700
    assert all(row.response and expected[row.id] == row.prompt for row in rows)


@pytest.mark.real
@pytest.mark.slow
def test_committed_answers_are_what_the_target_says(smollm2_folder):
    """One prompt of each family, answered again: the same text, or one that parts from it at a tie, as the batch is
    another one."""
    rows = [row for row in read_prompts(Path(str(ANSWERS))) if row.id.endswith("-007")]
    assert len(rows) >= 5
    tokenizer = load_tokenizer(str(smollm2_folder))
    target = load_target(str(smollm2_folder), dtype=torch.bfloat16)
    prompts = [prompt_token_ids(row, tokenizer) for row in rows]
    stop_ids = stop_token_ids(target, tokenizer)
    answers = greedy_answers(target, prompts, stop_ids=stop_ids, max_new_tokens=32)
    same = 0
    for row, prompt, answer in zip(rows, prompts, answers, strict=True):
        committed = tokenizer(row.response, add_special_tokens=False).input_ids
        committed += [tokenizer.eos_token_id] if row.finish_reason == "stop" else []
        committed = committed[:32]
        if list(answer.token_ids) == committed:
            same += 1
        else:
            assert is_tie(target, prompt, committed, answer.token_ids), row.id
    assert same > 0


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "bf16-mixed"), ("float32", "32-true")])
def test_the_training_computes_in_the_dtype_that_the_cpu_is_fast_in(tmp_path, dtype, precision):
    lengths = {"max_steps": 8, "held_out": 2, "max_new_tokens": 40}
    written = write_training_config(ROOT / "conf/quickstart.yaml", tmp_path, dtype, **lengths)
    trainer = yaml.safe_load(written.read_text())["trainer"]
    decoding = trainer["callbacks"][0]["init_args"]
    assert (decoding["limit"], decoding["max_new_tokens"]) == (2, 40)
    assert (trainer["precision"], trainer["max_steps"], trainer["val_check_interval"]) == (precision, 8, 2)


def test_stages_run_once_and_go_on_after_a_failure(tmp_path):
    calls = []

    def fail():
        calls.append("fails")
        raise StageFailed("second", 3)

    def go(second):
        stages = StageRunner(tmp_path)
        stages.call("first", [1], lambda: calls.append("first"))
        stages.call("second", [1], second)
        stages.call("third", [1], lambda: calls.append("third"))
        return stages

    with pytest.raises(StageFailed, match="stage second failed with exit code 3"):
        go(fail)
    stages = go(lambda: calls.append("second"))
    assert set(stages.seconds) == {"first", "second", "third"}
    go(lambda: calls.append("again"))
    assert calls == ["first", "fails", "second", "third"]
    # Another key runs a stage again, and those after it.
    stages = StageRunner(tmp_path)
    stages.call("first", [2], lambda: calls.append("first"))
    stages.call("second", [1], lambda: calls.append("second"))
    assert calls[-2:] == ["first", "second"]


@pytest.mark.real
@pytest.mark.slow
def test_the_shortened_quickstart_makes_a_drafter_that_decodes(tmp_path):
    """Every stage on the real target with a minute of training, as a user would run it; then once more."""
    run = tmp_path / "run"
    assert commands_run_by(__file__) == ["make quickstart"]
    command = [*recipe("quickstart"), "--output", str(run), "--max-steps", "40"]
    command += ["--train-per-family", "8", "--held-out", "3", "--max-new-tokens", "16"]
    subprocess.run(command, check=True, cwd=ROOT)
    summary = json.loads((run / "summary.json").read_text())
    validation, check = summary["validation"], summary["transformers_check"]
    lossless = validation["lossless"]
    assert {"target", "seconds", "cache", "train", "validation", "transformers_check"} <= set(summary)
    assert validation["tau"] > 1.1
    assert validation["tau"] > validation["tau_before"]
    assert lossless["identical"] + lossless["ties"] == lossless["prompts"] == 3
    assert validation["lossless_float32"] == {"prompts": 3, "identical": 3, "ties": 0, "differing": 0}
    assert (check["identical"], check["prompts"]) == (3, 3)
    assert check["tau"] == pytest.approx(check["tau_ours"])
    assert summary["train"]["loss_last"] < summary["train"]["loss_first"]
    assert summary["train"]["steps"] == 40
    for place in ("data", "cache", "checkpoints", "export/zlab", "export/transformers", "logs"):
        assert (run / place).is_dir()
    assert list((run / "logs").glob("events.out.tfevents.*"))
    again = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert len(re.findall("done before", again.stdout)) == len(summary["seconds"])
