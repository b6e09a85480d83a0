"""Every benchmark runs as the docs give it, at tiny size: a figure that nobody can make again is none."""

import json
import re
from pathlib import Path

import pytest
import torch
from benchmark_helpers import BENCHMARKS, benchmark, name_of
from capture_helpers import random_texts, write_texts
from export_helpers import TOKENS
from helpers import load_tiny, make_drafter
from page_commands import ROOT, commands_run_by
from prepare_helpers import write_rows

from dflash_lightning.cache.storage import STORAGES
from dflash_lightning.capture import command as capture_module
from dflash_lightning.cli import run
from dflash_lightning.export import export_drafter

# Sizes, turned down by what is added to a command.
SMALL = {
    "storage": ["--output", "results"],
    "storage_tau": ["--steps", "2", "--prompts", "2", "--seeds", "0", "--negatives", "16"],
    "capture_overlap": ["--rounds", "1"],
    "cache_open": ["--samples", "2000"],
    "decode": ["--repeats", "1", "--max-new-tokens", "16"],
    "proposals": ["--temperatures", "0.9", "--max-new-tokens", "16"],
    "train_step": ["--steps", "2", "--output", "steps"],
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workspace(like_qwen3_8b, tmp_path_factory) -> Path:
    """A folder with what the benchmarks' commands name, small; a finished quickstart among it."""
    folder = tmp_path_factory.mktemp("benchmarks")
    quickstart = folder / "runs" / "quickstart"
    (quickstart / "data").mkdir(parents=True)
    (quickstart / "target").symlink_to(like_qwen3_8b)
    (folder / "TARGET").symlink_to(like_qwen3_8b)
    data = write_texts(quickstart / "data" / "train", like_qwen3_8b, random_texts(24))
    (folder / "DATA").symlink_to(data)
    write_rows(quickstart / "heldout.jsonl", [{"prompt": "hi"}, {"prompt": "one, two, three"}])
    drafter = make_drafter(load_tiny(like_qwen3_8b), scale=3.0, target_layer_ids=[1, 3, 5, 7, 9])
    for form in ("zlab", "transformers"):
        place = quickstart / "export" / form
        export_drafter(drafter.state_dict(), drafter.config, place, form, tokens=TOKENS, dtype=torch.float32)
    capture = ["capture", "--target", str(like_qwen3_8b), "--data", str(data), "--shard-tokens", "300", "--cache"]
    run([*capture, str(folder / "runs" / "plain"), "--storage", "bfloat16"])
    run([*capture, str(quickstart / "cache")])
    (folder / "conf").symlink_to(ROOT / "conf")
    return folder


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("storage_tau.MAX_NEW_TOKENS", 8)


def lines_of(output: str) -> list[dict]:
    return [json.loads(line) for line in output.splitlines()]


def check_storage(_output: str, folder: Path) -> None:
    results = lines_of((folder / "results").read_text())
    assert {result["storage"] for result in results} == set(STORAGES)
    exact = [result for result in results if result["storage"] == "bfloat16"]
    assert all(error == 0 for result in exact for error in result["error"])
    by_bits = [result["error"][2] for result in results if result["compression"] == "none"]
    assert by_bits == sorted(by_bits)


def check_packing_steps(output: str, _folder: Path) -> None:
    assert output.count("and turned (as stored)") == 2


def check_storage_tau(_output: str, folder: Path) -> None:
    results = lines_of((folder / "storage_tau.jsonl").read_text())
    assert [result["storage"] for result in results] == ["bfloat16", "4bit", "2bit"]
    assert all(1 <= result["tau"] <= 8 for result in results)


def check_storage_tau_plot(_output: str, folder: Path) -> None:
    assert (folder / "storage_tau.png").read_bytes().startswith(b"\x89PNG")


def check_capture_overlap(output: str, _folder: Path) -> None:
    assert "stored bytes the same in all 2 captures: True" in output


def check_cache_open(output: str, _folder: Path) -> None:
    assert [line["samples"] for line in lines_of(output)] == [2000] * 3


def check_padding(output: str, _folder: Path) -> None:
    page = (ROOT / "docs" / "cache.md").read_text()
    [row] = re.findall(r"^\| padding, `batch_tokens` 16,384 \|(.*)\|$", page, flags=re.MULTILINE)
    on_page = row.replace(" ", "").split("|")
    assert len(on_page) == 6
    assert re.findall(r"\d+\.\d%", output) == on_page


def check_decode(output: str, _folder: Path) -> None:
    lines = lines_of(output)
    plain, ours, transformers = lines
    assert [line["decoder"] for line in lines] == ["plain", "ours", "transformers"]
    assert all(line["texts_equal_to_plain"] == line["prompts"] == 2 for line in lines)
    assert ours["tau"] == transformers["tau"] >= 1
    assert plain["draft_ms"] == 0 < min(ours["draft_ms"], transformers["draft_ms"])
    for line in lines:
        parts = line["draft_ms"] + line["verify_ms"] + line["rest_ms"]
        assert line["round_ms"] == pytest.approx(parts)
        assert 0 < line["rest_share"] < 1


def check_proposals(output: str, _folder: Path) -> None:
    argmax, sampled, difference = lines_of(output)
    assert (argmax["proposals"], sampled["proposals"]) == ("argmax", "sampled")
    assert difference["sampled_minus_argmax"] == pytest.approx(sampled["tau"] - argmax["tau"])
    assert difference["low"] <= difference["sampled_minus_argmax"] <= difference["high"]


def check_train_step(_output: str, folder: Path) -> None:
    [result] = lines_of((folder / "steps").read_text())
    assert result["case"] == "fit"
    assert result["label_tokens_per_second"] > 0


CHECKS = {
    "storage": check_storage,
    "packing_steps": check_packing_steps,
    "storage_tau": check_storage_tau,
    "storage_tau_plot": check_storage_tau_plot,
    "capture_overlap": check_capture_overlap,
    "cache_open": check_cache_open,
    "padding": check_padding,
    "decode": check_decode,
    "proposals": check_proposals,
    "train_step": check_train_step,
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("command", commands_run_by(__file__), ids=name_of)
def test_a_benchmark_of_the_pages(workspace, command, monkeypatch, capfd):
    # capture_overlap puts others in its place.
    monkeypatch.setattr(capture_module, "BackgroundWriter", capture_module.BackgroundWriter)
    output = benchmark(command, workspace, *SMALL.get(name_of(command), []))
    CHECKS[name_of(command)](output + capfd.readouterr().out, workspace)  # what processes of its own have printed, too


def test_storage_tau_skips_what_is_done_and_takes_the_whole_vocabulary(workspace, tmp_path):
    command = "python benchmarks/storage_tau.py --target TARGET --cache runs/plain --seeds 0 --steps 2 --prompts 2"
    command += f" --output {tmp_path / 'results'}"
    benchmark(command, workspace, "--negatives", "16", "--storages", "2bit")
    benchmark(command, workspace, "--negatives", "16", "--storages", "2bit", "1bit")
    benchmark(command, workspace, "--negatives", "0", "--storages", "bfloat16")
    results = lines_of((tmp_path / "results").read_text())
    assert [result["storage"] for result in results] == ["2bit", "1bit", "bfloat16"]
