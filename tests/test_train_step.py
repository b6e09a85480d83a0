"""The training step against a straightforward PyTorch step, and the memory of its loss."""

import json
import re
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from benchmark_helpers import BENCHMARKS, benchmark, name_of
from page_commands import commands_run_by

from dflash_lightning.training import losses
from dflash_lightning.training.losses import linear_cross_entropy

MB = 1e6


@pytest.fixture
def step_cases(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step_cases

    return step_cases


def test_ours_and_a_straightforward_implementation_give_the_same_gradient(step_cases, tmp_path):
    shape = step_cases.SHAPES["tiny"]
    cache = step_cases.write_random_cache(tmp_path / "cache", shape)
    options = Namespace(dtype="float32", device="cpu", clock="wall")
    ours, reference = (step_cases.make_training(case, shape, cache, options) for case in ("ours", "reference"))
    with torch.no_grad():  # weights large enough for logits and attention that aren't all alike
        for weights in zip(ours.drafter.parameters(), reference.drafter.parameters(), strict=True):
            for weight in weights:
                weight.mul_(5 if weight.dim() > 1 else 1)
        ours.table.mul_(50)
        reference.table.mul_(50)
    for first in (0, 4):
        indices = list(range(first, first + shape.rows))
        labels = [training.add_gradient(indices, step_cases.Seconds()) for training in (ours, reference)]
        assert labels[0] == labels[1] > shape.rows * shape.anchors
        expected = dict(reference.drafter.named_parameters())
        for name, parameter in ours.drafter.named_parameters():
            difference = (parameter.grad - expected[name].grad).norm()
            assert difference < 1e-5 * expected[name].grad.norm(), name


def test_activation_checkpointing_gives_the_same_gradient_bit_for_bit_from_less(step_cases, tmp_path):
    shape = step_cases.SHAPES["tiny"]
    cache = step_cases.write_random_cache(tmp_path / "cache", shape)
    options = Namespace(dtype="bfloat16", device="cpu", clock="wall")
    gradients, kept = [], []
    for activation_checkpointing in (False, True):
        training = step_cases.make_training("ours", shape, cache, options)
        training.drafter.activation_checkpointing = activation_checkpointing
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: (saved.append(t.numel()), t)[1], lambda t: t
        ):
            training.add_gradient([0, 1], step_cases.Seconds())
        gradients.append([parameter.grad for parameter in training.drafter.parameters()])
        kept.append(sum(saved))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert kept[1] < kept[0] / 2


def results_of(command: str, folder: Path, *more: str) -> list[dict]:
    output = folder / "results"
    benchmark(command, folder, "--output", str(output), *more)
    return [json.loads(line) for line in output.read_text().splitlines()]


COMMANDS = commands_run_by(__file__)
[LOSS] = [command for command in COMMANDS if name_of(command) == "linear_cross_entropy"]
STEPS = [command for command in COMMANDS if name_of(command) == "train_step"]


@pytest.mark.slow
@pytest.mark.parametrize("command", STEPS)
def test_the_benchmarks_of_the_pages_run_and_name_what_they_measured(command, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("train_step.GROWTH", {"anchors": [2, 4], "layers": [1]})
    monkeypatch.setattr("train_step.get_context", lambda _: get_context("fork"))  # its figures aren't looked at
    # Another size than the pages', and the second of two comparisons doesn't start a process for the reference too.
    cases = ["ours", "reference"] if "--size quickstart" in command else ["ours"]
    results = results_of(command, tmp_path, "--size", "tiny", "--steps", "2", "--cases", *cases)
    for result in results:
        measured = ("data_wait_share", "share_of_floor", "gradient_seconds", "optimizer_seconds", "step_seconds")
        assert all(result[name] > 0 for name in measured)
    if " growth " in command:
        grown = [(result["grows"], result["value"]) for result in results]
        assert grown == [("anchors", 2), ("anchors", 4), ("layers", 1)]
    else:
        assert [result["case"] for result in results] == cases
        assert all(result["peak_memory_mb"] > 0 for result in results)


def resident(name: str) -> int:
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def rise_of_peak_memory(slots: int, chunk_slots: int) -> float:
    """MB above inputs and outputs; to be called in a fresh process. In float32, which every CPU multiplies fast."""
    losses.CHUNK_SLOTS = chunk_slots
    hidden = torch.randn(slots, 16).requires_grad_()
    head, labels = torch.randn(151_936, 16), torch.arange(slots)
    linear_cross_entropy(hidden[:2].detach(), head, labels[:2])  # what the first call of a matmul sets up
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    entropy, _ = linear_cross_entropy(hidden, head, labels)
    entropy.sum().backward()
    return (resident("VmHWM") - before) / MB


@pytest.mark.slow
def test_peak_memory_of_the_loss_grows_with_the_chunk_and_not_with_the_slots():
    processes = get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=processes, max_tasks_per_child=1) as pool:
        few, many, half = pool.map(rise_of_peak_memory, (2048, 8192, 2048), (2048, 2048, 1024))
    chunk = 2048 * losses.CHUNK_VOCABULARY * (4 + 4) / MB  # 67 MB; the whole logits would be 4,979
    assert 0.9 * chunk < many < 1.3 * chunk
    assert many < few + 5
    assert half < few - 0.4 * chunk


@pytest.mark.slow
def test_the_benchmark_of_the_loss_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(
        "linear_cross_entropy.get_context", lambda _: get_context("fork")
    )  # its figures aren't looked at
    results = results_of(LOSS, tmp_path, "--slots", "8", "--hidden", "32", "--vocab", "272", "--turns", "1")
    assert [result["form"] for result in results] == ["ours", "torch", "whole"]
