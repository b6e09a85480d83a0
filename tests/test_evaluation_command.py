"""The command `evaluate`: conversations, samples, and the same report after a kill and on any number of ranks."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command_client import command_server, kill
from export_helpers import save_checkpoint
from helpers import load_tiny, make_drafter
from page_commands import command_line, commands_run_by
from prepare_helpers import write_rows

from dflash_lightning.decoding.decode import plain_decode
from dflash_lightning.errors import ConfigError, DataError
from dflash_lightning.evaluation import job as evaluation_job
from dflash_lightning.evaluation.command import evaluate, journal_folder
from dflash_lightning.export import export, read_drafter
from dflash_lightning.target import load_tokenizer

TIMES = ("tokens_per_second", "baseline_tokens_per_second", "speedup", "seconds_to_first_token")
ROWS = [{"prompt": f"Say {'very ' * (i % 5)}{i}", "family": "ab"[i % 2]} for i in range(20)]
ROWS += [{"turns": [f"Name {i} things.", "And one more?", "Why?"]} for i in range(4)]


@pytest.fixture(scope="module")
def drafter(llama_folder, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("drafter") / "drafter.ckpt"
    save_checkpoint(path, make_drafter(load_tiny(llama_folder), scale=3.0), llama_folder)
    return path


@pytest.fixture(scope="module")
def settings(llama_folder, drafter) -> dict:
    prompts = write_rows(drafter.parent / "prompts.jsonl", ROWS)
    return {
        **{"target": str(llama_folder), "drafter": drafter, "prompts": str(prompts)},
        **{"max_new_tokens": 12, "dtype": "float32", "device": "cpu"},
    }


@pytest.fixture(scope="module")
def whole(settings, drafter) -> Path:
    """The report of all prompts, by one process from first to last."""
    report = drafter.parent / "whole.json"
    evaluate(**settings, json=report)
    return report


def command(settings: dict) -> list[str]:
    return ["evaluate", *(f"--{name.replace('_', '-')}={value}" for name, value in settings.items())]


def figures_of(report: Path) -> dict:
    """A report without times."""
    report = json.loads(report.read_text())
    return {name: value for name, value in report.items() if name.removeprefix("plain_") not in TIMES}


def texts_of(report: Path) -> list[dict]:
    """Texts in the journals of a report, without times, in order."""
    lines = [line for path in journal_folder(report).iterdir() for line in path.read_text().splitlines()[1:]]
    entries = [entry for entry in map(json.loads, lines) if "prompt" in entry]
    assert len({entry["prompt"] for entry in entries}) == len(entries), "a prompt was decoded twice"
    texts = [text for entry in sorted(entries, key=lambda entry: entry["prompt"]) for text in entry["texts"]]
    return [{name: value for name, value in text.items() if "seconds" not in name} for text in texts]


def test_each_turn_follows_the_reply_to_the_one_before(llama_folder, settings, tmp_path):
    """Against a loop that knows nothing of drafters."""
    rows = [*ROWS[:2], *ROWS[-2:]]
    prompts = write_rows(tmp_path / "few.jsonl", rows)
    report = evaluate(**{**settings, "prompts": str(prompts)}, json=tmp_path / "report.json")
    target, tokenizer, expected = load_tiny(llama_folder), load_tokenizer(str(llama_folder)), []
    for row in rows:
        text = ""
        for question in row.get("turns") or [row["prompt"]]:
            text += f"<|start|>user\n{question}<|end|><|start|>assistant\n"
            ids = tokenizer(text, add_special_tokens=False).input_ids
            reply = plain_decode(target, ids, max_new_tokens=12, stop_ids=(2,)).token_ids
            expected.append((ids, reply))
            text += tokenizer.decode(reply, skip_special_tokens=True) + "<|end|>"
    found = texts_of(tmp_path / "report.json")
    assert [(text["prompt"]["token_ids"], text["token_ids"]) for text in found] == expected
    assert [text["prompt"]["turn"] for text in found] == [0, 0, 0, 1, 2, 0, 1, 2]
    assert (report["prompts"], report["texts"], report["prompt_set"]) == (4, 8, "few.jsonl")
    assert report["lossless"] == {"prompts": 4, "identical": 4, "ties": 0, "differing": 0}
    assert sum(report["histogram"].values()) == report["rounds"] == sum(len(text["committed"]) for text in found)
    [folder] = export(settings["drafter"], tmp_path, "zlab", evaluations=[tmp_path / "report.json"], verify=False)
    assert read_drafter(folder).provenance.evaluations == [{**report, "prompt_set": "report"}]


def test_sampled_texts_follow_from_seed_and_prompt_alone(settings, tmp_path):
    rows = [*ROWS[:6], *ROWS[-2:]]

    def texts(rows, **sampling):
        report = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        prompts = write_rows(tmp_path / "few.jsonl", rows)
        found = evaluate(**{**settings, "prompts": str(prompts)}, temperature=1.0, **sampling, json=report)
        assert found["lossless"] is None
        assert {name: found["settings"][name] for name in sampling} == sampling
        return {(text["prompt"]["id"], text["prompt"]["turn"]): text["token_ids"] for text in texts_of(report)}

    first = texts(rows, top_k=50, seed=3)
    assert texts(rows[::-1], top_k=50, seed=3) == first
    other = texts(rows, top_k=50, seed=4)
    assert all(other[key] != text for key, text in first.items() if key[1] == 0)


def test_other_work_is_refused_by_field_and_the_same_is_not_done_again(
    settings, llama_folder, qwen3_folder, tmp_path, monkeypatch, capsys
):
    settings = {**settings, "json": tmp_path / "report.json", "limit": 3}
    report = evaluate(**settings)
    other = tmp_path / "other.ckpt"
    save_checkpoint(other, make_drafter(load_tiny(llama_folder), scale=3.0, seed=1), llama_folder)
    qwen3 = tmp_path / "qwen3.ckpt"
    save_checkpoint(qwen3, make_drafter(load_tiny(qwen3_folder)), qwen3_folder)
    for change, message in (
        ({"drafter": other}, r"drafter\.weights_sha256: there '"),
        ({"target": str(qwen3_folder), "drafter": qwen3}, r"target\.weights_sha256: there '"),
        ({"limit": 4}, r"prompts\.rows: there 3, asked for 4; prompts\.sha256"),
        ({"max_new_tokens": 9, "temperature": 0.5}, r"max_new_tokens: there 12, asked for 9; settings\.temperature"),
    ):
        with pytest.raises(DataError, match=message):
            evaluate(**{**settings, **change})
    monkeypatch.setattr(evaluation_job, "load_target", None)
    moved = tmp_path / "moved.ckpt"
    moved.write_bytes(Path(settings["drafter"]).read_bytes())
    assert evaluate(**{**settings, "drafter": moved, "plot": tmp_path / "new" / "plot.png"}) == report
    assert "3 of 3 prompts finished before" in capsys.readouterr().err
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 3}, "temperature is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; expected at least 1"),
        ({"plot": Path("x.bmp")}, r"plot is x\.bmp; expected a name that ends with \.png"),
        (
            {"max_new_tokens": 250},
            r"line 21: 3 turns .* may have \d+ tokens before the last answer, .* has 512 positions",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_loaded(settings, monkeypatch, change, message):
    monkeypatch.setattr(evaluation_job, "load_target", None)
    with pytest.raises(ConfigError, match=message):
        evaluate(**{**settings, **change})


def test_a_bad_family_is_refused_before_any_work_and_leaves_no_report(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_job, "load_target", None)
    prompts = write_rows(tmp_path / "bad.jsonl", [{"prompt": "Hi", "family": 3}])
    with pytest.raises(DataError, match="line 1: `family` is 3, expected text"):
        evaluate(**{**settings, "prompts": str(prompts)}, json=tmp_path / "report.json")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


@pytest.mark.slow
def test_killed_and_continued_is_the_same_report(settings, whole, tmp_path):
    killed = {**settings, "json": tmp_path / "killed.json"}
    server = command_server()
    process = server.start(*command(killed))
    journal = journal_folder(killed["json"]) / "rank-0.jsonl"
    deadline = time.monotonic() + 600
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 5):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    kill([process])
    assert server.wait([process]) == [-signal.SIGKILL], "it ended before it could be killed"
    assert 4 <= len(journal.read_bytes().splitlines()) - 2 < len(ROWS)
    with journal.open("ab") as file:
        file.write(b'{"prompt": 23, "texts": [{"torn')
    report = evaluate(**killed)
    assert json.loads(killed["json"].read_text()) == report
    assert figures_of(killed["json"]) == figures_of(whole)
    assert texts_of(killed["json"]) == texts_of(whole)


@pytest.mark.slow
def test_two_ranks_report_what_one_does(settings, whole, tmp_path, capsys):
    shared = {**settings, "json": tmp_path / "shared.json"}
    [launch] = commands_run_by(__file__)
    words = command_line(launch, {"8": ["2"], "...": command(shared)[1:]})
    subprocess.run(words, check=True, timeout=600)
    assert {path.name for path in journal_folder(shared["json"]).iterdir()} == {"rank-0.jsonl", "rank-1.jsonl"}
    assert figures_of(shared["json"]) == figures_of(whole)
    assert texts_of(shared["json"]) == texts_of(whole)
    # One process goes on with what two have left.
    second = journal_folder(shared["json"]) / "rank-1.jsonl"
    second.write_bytes(b"".join(second.read_bytes().splitlines(keepends=True)[:-2]))
    evaluate(**shared)
    assert figures_of(shared["json"]) == figures_of(whole)
    assert texts_of(shared["json"]) == texts_of(whole)
    assert "22 of 24 prompts finished before" in capsys.readouterr().err
