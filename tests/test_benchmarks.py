"""Every benchmark runs, at tiny size: a figure that nobody can make again is none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capture_helpers import capture_arguments, random_texts, write_texts
from export_helpers import TOKENS
from helpers import load_tiny, make_drafter
from prepare_helpers import write_rows

from dflash_lightning.cache.storage import STORAGES
from dflash_lightning.cli import run
from dflash_lightning.export import export_drafter

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def benchmark(name: str, *arguments) -> str:
    command = [sys.executable, str(BENCHMARKS / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=BENCHMARKS.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def data(llama_folder, tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("benchmarks") / "data", llama_folder, random_texts(24))


@pytest.fixture(scope="module")
def plain_cache(data, llama_folder):
    cache = data.parent / "cache"
    layers = ("--target-layer-ids", "[0, 1, 2, 3, 4]", "--shard-tokens", "300")
    run(capture_arguments(llama_folder, data, cache, *layers))
    return cache


@pytest.mark.slow
def test_storage(plain_cache, tmp_path):
    benchmark("storage.py", "--cache", plain_cache, "--output", tmp_path / "results")
    results = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert {result["storage"] for result in results} == set(STORAGES)
    exact = [result for result in results if result["storage"] == "bfloat16"]
    assert all(error == 0 for result in exact for error in result["error"])
    by_bits = [result["error"][2] for result in results if result["compression"] == "none"]
    assert by_bits == sorted(by_bits)


@pytest.mark.slow
def test_packing_steps(plain_cache):
    assert benchmark("packing_steps.py", "--cache", plain_cache).count("and turned (as stored)") == 2


@pytest.mark.slow
def test_storage_tau(plain_cache, llama_folder, tmp_path):
    arguments = ("--target", llama_folder, "--cache", plain_cache, "--output", tmp_path / "results", "--seeds", 0)
    size = ("--steps", 2, "--prompts", 2, "--negatives")
    benchmark("storage_tau.py", *arguments, *size, 16, "--storages", "bfloat16", "2bit")
    benchmark("storage_tau.py", *arguments, *size, 16, "--storages", "2bit", "1bit")
    benchmark("storage_tau.py", *arguments, *size, 0, "--storages", "bfloat16")
    results = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert [result["storage"] for result in results] == ["bfloat16", "2bit", "1bit", "bfloat16"]
    assert all(1 <= result["tau"] <= 8 for result in results)


@pytest.mark.slow
def test_capture_overlap(data, llama_folder):
    assert benchmark(
        *("capture_overlap.py", "--target", llama_folder, "--data", data, "--rounds", 1, "--target-layer-ids", 0, 1)
    )


@pytest.mark.slow
def test_cache_open():
    assert benchmark("cache_open.py", "--samples", 2000)


@pytest.fixture(scope="module")
def decoding(qwen3_folder, tmp_path_factory):
    """Arguments of the benchmarks that decode."""
    folder = tmp_path_factory.mktemp("decoding")
    drafter = make_drafter(load_tiny(qwen3_folder), scale=3.0)
    export_drafter(
        drafter.state_dict(), drafter.config, folder / "drafter", "transformers", tokens=TOKENS, dtype=torch.float32
    )
    prompts = write_rows(folder / "prompts.jsonl", [{"prompt": "hi"}, {"prompt": "one, two, three"}])
    return ("--target", qwen3_folder, "--drafter", folder / "drafter", "--prompts", prompts, "--max-new-tokens", 16)


@pytest.mark.slow
def test_decode(decoding):
    lines = [json.loads(line) for line in benchmark("decode.py", *decoding, "--repeats", 1).splitlines()]
    plain, ours, transformers = lines
    assert [line["decoder"] for line in lines] == ["plain", "ours", "transformers"]
    assert all(line["texts_equal_to_plain"] == line["prompts"] == 2 for line in lines)
    assert ours["tau"] == transformers["tau"] >= 1
    assert plain["draft_ms"] == 0 < min(ours["draft_ms"], transformers["draft_ms"])
    for line in lines:
        parts = line["draft_ms"] + line["verify_ms"] + line["rest_ms"]
        assert line["round_ms"] == pytest.approx(parts)
        assert 0 < line["rest_share"] < 1


@pytest.mark.slow
def test_proposals(decoding):
    output = benchmark("proposals.py", *decoding, "--repeats", 2, "--temperatures", 0.9, "--dtype", "float32")
    argmax, sampled, difference = (json.loads(line) for line in output.splitlines())
    assert (argmax["proposals"], sampled["proposals"]) == ("argmax", "sampled")
    assert difference["sampled_minus_argmax"] == pytest.approx(sampled["tau"] - argmax["tau"])
    assert difference["low"] <= difference["sampled_minus_argmax"] <= difference["high"]
