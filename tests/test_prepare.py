"""Prompts to answers to tokens: greedy decoding, the data folder, and its refusals."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer
from prepare_helpers import PROMPTS, SETTINGS, folder_bytes, write_rows

from dflash_lightning.errors import ConfigError, DataError
from dflash_lightning.prepare import command as prepare_module
from dflash_lightning.prepare.command import load_data, prepare
from dflash_lightning.prepare.greedy import greedy_answers
from dflash_lightning.progress import track
from dflash_lightning.prompts.rows import read_prompts
from dflash_lightning.target import load_target


def naive_greedy(model, prompt: list[int], stop_ids, max_new_tokens: int) -> list[int]:
    """One row, no cache, no padding: a full forward for every token."""
    ids = list(prompt)
    while len(ids) - len(prompt) < max_new_tokens:
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def test_batched_answers_equal_a_naive_loop_whatever_the_padding(target_folder):
    model = load_target(str(target_folder), dtype=torch.float32)
    prompts = [byte_tokenizer()(p, add_special_tokens=False).input_ids for p in PROMPTS]
    free = [naive_greedy(model, prompt, (), 40) for prompt in prompts]
    stop_ids = (free[0][5], free[1][20], free[2][0])  # so that rows stop early, late, at once, and perhaps never
    answers = greedy_answers(model, prompts, stop_ids=stop_ids, max_new_tokens=40)
    assert [a.token_ids for a in answers] == [naive_greedy(model, prompt, stop_ids, 40) for prompt in prompts]
    assert [a.finish_reason == "stop" for a in answers] == [a.token_ids[-1] in stop_ids for a in answers]
    assert len(answers[2].token_ids) == 1
    assert len({len(a.token_ids) for a in answers}) > 2


def test_greedy_ignores_the_generation_defaults_of_the_target(llama_folder):
    model = load_target(str(llama_folder), dtype=torch.float32)
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=9.0)
    prompt = byte_tokenizer()("Hello there", add_special_tokens=False).input_ids
    answers = greedy_answers(model, [prompt], stop_ids=(2,), max_new_tokens=16)
    assert answers[0].token_ids == naive_greedy(model, prompt, (2,), 16)


def test_prepared_data_holds_prompt_answer_and_mask(target_folder, prompts_file, tmp_path):
    done = prepare(str(target_folder), prompts_file, tmp_path / "data", **SETTINGS)
    info, samples = load_data(tmp_path / "data")
    assert info == done.info
    assert [sample.question for sample in samples] == [{"prompt": p} for p in PROMPTS]
    assert done.generated_now == info.counts["generated"] == len(samples) == len(PROMPTS)
    assert info.generation["mode"] == "chat"
    model, tokenizer = load_target(str(target_folder), dtype=torch.float32), byte_tokenizer()
    for sample in samples:
        text = f"<|start|>user\n{sample.question['prompt']}<|end|><|start|>assistant\n"
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        assert sample.input_ids[: sample.response_start] == prompt
        assert sample.input_ids[sample.response_start :] == naive_greedy(model, prompt, (2,), 24)
        assert sample.loss_mask == [int(i >= len(prompt)) for i in range(len(sample.input_ids))]
        assert (sample.source, sample.extra) == ("generated", {"family": sample.question["prompt"][0]})
        assert (sample.input_ids[-1] == 2) == (sample.finish_reason == "stop")
    assert info.counts["tokens"] == sum(len(sample.input_ids) for sample in samples)
    assert info.counts["response_tokens"] == sum(sum(sample.loss_mask) for sample in samples)
    assert sorted(folder_bytes(tmp_path / "data")) == ["data.json", "samples.jsonl", "skipped.jsonl"]


def test_given_answers_are_used_as_they_are_and_need_no_model(llama_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "load_target", None)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
    rows = [
        {"id": "whole", "prompt": "Hi", "response": "hello"},
        {"id": "cut", "messages": turns, "response": "dark re", "finish_reason": "length"},
        {"id": "closed", "prompt": "Hi", "response": "hello<|end|>"},
    ]
    prepare(str(llama_folder), write_rows(tmp_path / "in.jsonl", rows), tmp_path / "data", **SETTINGS)
    info, samples = load_data(tmp_path / "data")
    tokenizer = byte_tokenizer()
    answers = [sample.input_ids[sample.response_start :] for sample in samples]
    assert answers[0] == [*tokenizer("hello", add_special_tokens=False).input_ids, 2] == answers[2]
    assert answers[1] == tokenizer("dark re", add_special_tokens=False).input_ids
    assert samples[1].question == {"messages": turns}
    assert "system\nBe brief." in tokenizer.decode(samples[1].input_ids)
    assert info.counts == {
        "samples": 3,
        "given": 3,
        "generated": 0,
        "skipped": 0,
        "tokens": sum(len(sample.input_ids) for sample in samples),
        "response_tokens": sum(len(a) for a in answers),
    }


def test_generated_answers_given_back_make_the_same_tokens(llama_folder, prompts_file, tmp_path, monkeypatch):
    texts = ["Hello  there.", "naïve — 東京", "a<|mask|>b", " two\nlines ", "end"]

    def answer(_, prompts, **__):
        ids = [byte_tokenizer()(texts.pop(), add_special_tokens=False).input_ids for _ in prompts]
        return [
            prepare_module.GreedyAnswer([*i, 2] if len(i) > 3 else i, "stop" if len(i) > 3 else "length") for i in ids
        ]

    monkeypatch.setattr(prepare_module, "greedy_answers", answer)
    prepare(str(llama_folder), prompts_file, tmp_path / "first", **SETTINGS)
    lines = (tmp_path / "first" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [{key: json.loads(line)[key] for key in ("id", "prompt", "response", "finish_reason")} for line in lines]
    prepare(str(llama_folder), write_rows(tmp_path / "kept.jsonl", kept), tmp_path / "second", **SETTINGS)
    first, second = (load_data(tmp_path / name)[1] for name in ("first", "second"))
    assert [(sample.id, sample.input_ids) for sample in first] == [(sample.id, sample.input_ids) for sample in second]
    assert {sample.finish_reason for sample in first} == {"stop", "length"}


def test_finished_data_is_told_of_in_a_folder_that_is_read_only(llama_folder, prompts_file, tmp_path, monkeypatch):
    first = prepare(str(llama_folder), prompts_file, tmp_path / "data", **SETTINGS)

    def refuse(*_, **__):
        raise ConfigError("read only")

    monkeypatch.setattr(prepare_module, "check_writable", refuse)
    assert prepare(str(llama_folder), prompts_file, tmp_path / "data", **SETTINGS).info == first.info
    with pytest.raises(ConfigError, match="read only"):
        prepare(str(llama_folder), prompts_file, tmp_path / "other", **SETTINGS)


def test_a_target_without_chat_template_gets_the_bare_prompt(llama_folder, tmp_path):
    folder = Path(shutil.copytree(llama_folder, tmp_path / "plain"))
    (folder / "chat_template.jinja").unlink()
    prepare(str(folder), write_rows(tmp_path / "in.jsonl", [{"prompt": "Once upon"}]), tmp_path / "data", **SETTINGS)
    info, (sample,) = load_data(tmp_path / "data")
    assert info.generation["mode"] == "plain"
    assert byte_tokenizer().decode(sample.input_ids[: sample.response_start]) == "Once upon"
    chat = write_rows(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}])
    with pytest.raises(DataError, match="line 1: turns need a chat template"):
        prepare(str(folder), chat, tmp_path / "other", **SETTINGS)


def test_too_long_prompts_and_too_short_answers_are_skipped_with_a_reason(llama_folder, tmp_path, monkeypatch):
    def short(_, prompts, **limits):
        assert limits == {"stop_ids": (2,), "max_new_tokens": 24}
        return [prepare_module.GreedyAnswer([7, 2] if i else [7, 8, 2], "stop") for i in range(len(prompts))]

    monkeypatch.setattr(prepare_module, "greedy_answers", short)
    rows = [{"id": "long", "prompt": "x" * 90}, {"id": "short", "prompt": "a"}, {"id": "fine", "prompt": "abc"}]
    path = write_rows(tmp_path / "in.jsonl", rows)
    prepare(str(llama_folder), path, tmp_path / "data", max_prompt_tokens=60, **SETTINGS)
    info, (sample,) = load_data(tmp_path / "data")
    assert sample.id == "fine"
    skipped = [json.loads(line) for line in (tmp_path / "data" / "skipped.jsonl").read_text().splitlines()]
    assert [(row["id"], row["reason"].split(",")[0]) for row in skipped] == [
        ("long", "the prompt has 108 tokens"),
        ("short", "the answer has 1 token"),
    ]
    assert (info.counts["samples"], info.counts["skipped"]) == (1, 2)


def test_rows_that_are_all_skipped_are_an_error_and_leave_nothing_behind(llama_folder, tmp_path):
    path = write_rows(tmp_path / "in.jsonl", [{"id": "a", "prompt": "x" * 90}, {"id": "b", "prompt": "y" * 91}])
    with pytest.raises(
        DataError, match=r"in\.jsonl: all 2 rows are skipped, the first one \(a\) because the prompt has"
    ):
        prepare(str(llama_folder), path, tmp_path / "data", max_prompt_tokens=60, **SETTINGS)
    assert list((tmp_path / "data").iterdir()) == []
    prepare(str(llama_folder), path, tmp_path / "data", max_prompt_tokens=110, **SETTINGS)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "the file is empty"),
        ("\n\n", "the file is empty"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ('{"prompt": "a"}\n\n[1]\n', "line 3: found a list"),
        ('{"text": "a"}\n', "line 1: found none of prompt, messages, turns; expected one"),
        ('{"prompt": "a", "messages": []}\n', "line 1: found prompt and messages of"),
        ('{"prompt": "  "}\n', "line 1: the prompt is empty"),
        ('{"prompt": 5}\n', "line 1: `prompt` is a int"),
        ('{"messages": []}\n', "line 1: `messages` is \\[\\]"),
        ('{"messages": ["hi"]}\n', "line 1: a turn is 'hi'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "line 1: the last turn is of role 'assistant'"),
        ('{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}\n', "line 2: id 'x' stands on .*line 1 already"),
        ('{"id": 3, "prompt": "a"}\n', "line 1: `id` is 3"),
        ('{"prompt": "a", "response": "b"}\n', "line 1: `response` has 1 token, expected 2 or more"),
        ('{"prompt": "a", "response": ""}\n', "line 1: `response` has 0 tokens"),
        ('{"prompt": "a", "response": "bcd", "finish_reason": "eos"}\n', "line 1: `finish_reason` is 'eos'"),
    ],
)
def test_malformed_input_is_refused_before_anything_is_written(llama_folder, tmp_path, lines, message):
    (tmp_path / "in.jsonl").write_text(lines)
    with pytest.raises(DataError, match=message) as caught:
        prepare(str(llama_folder), tmp_path / "in.jsonl", tmp_path / "data", **SETTINGS)
    assert str(tmp_path / "in.jsonl") in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_settings_out_of_range_are_refused(llama_folder, prompts_file, tmp_path):
    for wrong, message in (
        ({"max_new_tokens": 1}, "max_new_tokens is 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"limit": 0}, "limit is 0"),
        ({"max_new_tokens": 512}, "max_new_tokens is 512, and the target's context holds 512 tokens.*fewer than 512"),
        ({"max_prompt_tokens": 489}, "max_prompt_tokens is 489; expected 1 to 488"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens is 0; expected 1 to 488"),
        ({"thinking": True}, "no `enable_thinking` switch"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(str(llama_folder), prompts_file, tmp_path / "data", **{**SETTINGS, **wrong})
    with pytest.raises(DataError, match="no such file"):
        prepare(str(llama_folder), tmp_path / "absent.jsonl", tmp_path / "data", **SETTINGS)


def test_of_several_processes_the_first_alone_shows_progress(capsys, monkeypatch):
    places = {"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with track(1, f"rank {rank}") as progress:
            progress.advance()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rank 0: 1/1, ")
    assert progress.done == 1


def test_progress_without_a_terminal_is_plain_lines_on_stderr(capsys):
    with track(3, "Answers", "tokens") as progress:
        progress.advance(1, 10)
        progress.advance(2, 30)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Answers: 3/3, ")
    assert progress.done == 40


def test_prompts_come_from_a_data_set_too(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "one?"}\n{"question": "two?"}\n')
    (tmp_path / "chats.jsonl").write_text(json.dumps({"talk": [{"role": "user", "content": "hi"}]}) + "\n")
    named = f"hf:{tmp_path}"
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n"
        "- {config_name: ask, data_files: train.jsonl}\n- {config_name: talk, data_files: chats.jsonl}\n---\n"
    )
    rows = read_prompts(f"{named},config=ask,column=question")
    assert [row.prompt for row in rows] == ["one?", "two?"]
    assert rows[1].place.endswith("row 2")
    (row,) = read_prompts(f"{named},config=talk,column=talk")
    assert (row.prompt, row.bare) == ("hi", False)
    with pytest.raises(DataError, match="no column 'prompt'; the columns are question"):
        read_prompts(f"{named},config=ask")
    with pytest.raises(DataError, match=r"option 'colum=x' found; expected hf:NAME"):
        read_prompts(f"{named},colum=x")
    with pytest.raises(DataError, match="can't be loaded"):
        read_prompts(f"{named},config=ask,split=test")
    with pytest.raises(DataError, match="can't be loaded"):
        read_prompts(f"hf:{tmp_path / 'nothing'}")
