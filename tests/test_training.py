"""The gradient doesn't depend on how a step is cut, and a resumed run is the uninterrupted one (spec.md 5.4)."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import MASK_TOKEN_ID, load_tiny, make_drafter
from training_helpers import (
    GivenSample,
    Job,
    Outcome,
    random_sample,
    write_cache,
)

from dflash_lightning.config import DrafterSettings
from dflash_lightning.losses import LossSettings
from dflash_lightning.module import OptimizerSettings

TESTS = Path(__file__).parent
BLOCK_SIZE, LAYERS, HIDDEN = 4, [1, 3], 32
GAMMA, CLIP = 2.5, 0.5
# A large eps makes Adam's step depend on the size of the gradient, so that a wrong scale can't hide.
OPTIMIZER = OptimizerSettings(lr=0.05, eps=0.01, warmup_ratio=0.0)
# Anchors of each step's 4 samples. On 2 ranks x 2 micro-batches the odd ones are rank 1's: in step 1 it has an empty
# micro-batch, in step 2 nothing at all. Some blocks are cut short by the end of their text.
ANCHORS_OF_STEPS = [
    [[5, 9, 14], [4], [3, 20, 21, 22], [10, 11]],
    [[6], [], [3, 4, 5], [12]],
    [[8, 22], [], [2, 18], []],
    [[4, 7], [9], [10], [11, 13, 15]],
]

pytestmark = pytest.mark.slow


def given_steps() -> list[list[GivenSample]]:
    steps = []
    for number, step in enumerate(ANCHORS_OF_STEPS):
        samples = [
            random_sample(f"{number}-{i}", 24 + 3 * i, 2, len(LAYERS) * HIDDEN, seed=10 * number + i) for i in range(4)
        ]
        steps.append([GivenSample(s, np.array(a, dtype=np.int64)) for s, a in zip(samples, step, strict=True)])
    return steps


@pytest.fixture(scope="module")
def job(llama_folder) -> Job:
    return Job(
        target=str(llama_folder),
        drafter=DrafterSettings(
            num_layers=2, block_size=BLOCK_SIZE, target_layer_ids=LAYERS, mask_token_id=MASK_TOKEN_ID
        ),
        loss=LossSettings(gamma=GAMMA),
        optimizer=OPTIMIZER,
        initial=make_drafter(load_tiny(llama_folder), block_size=BLOCK_SIZE, scale=3.0).state_dict(),
        steps=given_steps(),
        max_steps=len(ANCHORS_OF_STEPS),
        clip=CLIP,
    )


def naive_objective(drafter, table, step: list[GivenSample]) -> torch.Tensor:
    """The loss straight from spec.md section 3, one block at a time, each with the context it would have at decode
    time: no attention mask, no padding, no batch."""
    total, anchors = 0.0, 0
    weights = [np.exp(-(k - 1) / GAMMA) for k in range(1, BLOCK_SIZE)]
    for given in step:
        tokens, features = given.sample.input_ids.tolist(), given.sample.features.double()
        for anchor in given.anchors.tolist():
            anchors += 1
            block = [tokens[anchor]] + [MASK_TOKEN_ID] * (BLOCK_SIZE - 1)
            context = drafter.context_key_values(features[None, :anchor], torch.arange(anchor)[None])
            hidden = drafter(table[block][None], torch.arange(anchor, anchor + BLOCK_SIZE)[None], context)[0]
            for k in range(1, BLOCK_SIZE):
                if anchor + k < len(tokens):
                    entropy = -torch.log_softmax(hidden[k] @ table.T, dim=-1)[tokens[anchor + k]]
                    total = total + weights[k - 1] * entropy
    return total / (anchors * sum(weights))


@pytest.fixture(scope="module")
def naive(job, llama_folder) -> Outcome:
    """A plain loop in float64."""
    target = load_tiny(llama_folder)
    table = target.get_input_embeddings().weight.double()
    drafter = make_drafter(target, block_size=BLOCK_SIZE)
    drafter.load_state_dict(job.initial)
    drafter.double()
    optimizer = torch.optim.AdamW(drafter.parameters(), eps=OPTIMIZER.eps, weight_decay=0.0)
    reported, norms = [], []
    for number, step in enumerate(job.steps):
        for group in optimizer.param_groups:
            # No warm-up to speak of: one step at the peak, then a cosine to zero.
            progress = max(0, number - 1) / (len(job.steps) - 1)
            group["lr"] = OPTIMIZER.lr * 0.5 * (1 + np.cos(np.pi * progress))
        optimizer.zero_grad()
        loss = naive_objective(drafter, table, step)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(drafter.parameters(), CLIP)))
        optimizer.step()
        reported.append(loss.item())
    assert max(norms) > CLIP  # clipping is part of what is compared
    return Outcome(drafter.state_dict(), reported, norms, [])


def assert_same(outcome: Outcome, naive: Outcome, initial: dict[str, torch.Tensor]) -> None:
    if outcome.reported:  # rank 0 has the logger
        assert outcome.reported == pytest.approx(naive.reported, rel=1e-5)
    if outcome.gradient_norms and naive.gradient_norms:  # only DeepSpeed keeps them
        assert outcome.gradient_norms == pytest.approx(naive.gradient_norms, rel=1e-5)
    assert outcome.weights.keys() == naive.weights.keys()
    for name, expected in naive.weights.items():
        update = (expected - initial[name]).norm()
        assert update > 1e-3, name
        assert (outcome.weights[name] - expected).norm() < 1e-5 * initial[name].norm() + 1e-4 * update, name


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("strategy", "accumulation"), [("plain", 4), ("plain", 1), ("zero2", 4), ("zero2", 1)])
def test_one_process_equals_the_naive_loop(job, naive, strategy, accumulation):
    outcome = replace(job, strategy=strategy, accumulation=accumulation).run()
    assert_same(outcome, naive, job.initial)
    assert len(outcome.reported) == job.max_steps
    assert len(outcome.gradient_norms) == (job.max_steps if strategy == "zero2" else 0)


def torchrun(jobs: dict[tuple, Job], folder: Path) -> list[dict[tuple, Outcome]]:
    """Outcomes by job, for each of two ranks."""
    torch.save(jobs, folder / "jobs.pt")
    worker = [str(TESTS / "train_worker.py"), str(folder / "jobs.pt"), str(folder)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *worker]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def cache(llama_folder, tmp_path_factory) -> Path:
    samples = [random_sample(f"s{i}", 14 + i, 3, len(LAYERS) * HIDDEN, seed=i) for i in range(17)]
    path = tmp_path_factory.mktemp("cache") / "cache"
    return write_cache(path, samples, target=llama_folder, layer_ids=LAYERS, hidden_size=HIDDEN)


@pytest.fixture(scope="module")
def from_cache(job, cache) -> Job:
    """Six steps of 4 micro-batches of one or two samples, planned by the data module, 3 steps an epoch; the one sample
    held back is one batch of validation after each epoch."""
    data = {"cache": str(cache), "batch_tokens": 78, "num_anchors": 3, "validation_fraction": 0.1}
    return replace(job, steps=None, data=data, accumulation=4, max_steps=6)


GIVEN = [("ddp", 2), ("zero2", 2), ("zero2", 1), ("zero1", 2)]
DRAWN = ["zero2", "zero3"]


@pytest.fixture(scope="module")
def two_ranks(job, from_cache, tmp_path_factory) -> list[dict[tuple, Outcome]]:
    """Every job of two ranks, in one launch."""
    jobs = {}
    for name, accumulation in GIVEN:
        jobs["given", name, accumulation] = replace(job, strategy=name, accumulation=accumulation, devices=2)
    for name in DRAWN:
        jobs["drawn", name] = replace(from_cache, strategy=name, accumulation=2, devices=2)
    return torchrun(jobs, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("strategy", "accumulation"), GIVEN)
def test_two_ranks_equal_the_naive_loop(two_ranks, job, naive, strategy, accumulation):
    first, second = (outcomes["given", strategy, accumulation] for outcomes in two_ranks)
    for outcome in (first, second):
        assert_same(outcome, naive, job.initial)
    assert len(first.reported) == job.max_steps
    assert all(torch.equal(first.weights[key], second.weights[key]) for key in first.weights)


@pytest.fixture(scope="module")
def drawn_by_one(from_cache) -> Outcome:
    return from_cache.run()


@pytest.mark.parametrize("strategy", DRAWN)
def test_two_ranks_of_the_data_module_equal_one(two_ranks, from_cache, drawn_by_one, strategy):
    """Down to the metrics of a validation in which one rank has nothing to do."""
    first, second = (outcomes["drawn", strategy] for outcomes in two_ranks)
    assert len(drawn_by_one.validation) == 2
    for outcome in (first, second):
        if strategy != "zero3":  # which keeps but a part of the weights on each rank
            assert_same(outcome, drawn_by_one, from_cache.initial)
    # Rank 0 has the logger.
    assert first.reported == pytest.approx(drawn_by_one.reported, rel=1e-5)
    for found, expected in zip(first.validation, drawn_by_one.validation, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, nan_ok=True)


@pytest.mark.usefixtures("process_group")
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(from_cache, tmp_path):
    # Seven steps of 2 micro-batches of one to three samples, 4 steps an epoch, with a checkpoint after each.
    cut = from_cache.data | {"batch_tokens": 110, "validation_fraction": 0.0}
    job = replace(from_cache, data=cut, max_steps=7, strategy="zero2", accumulation=2)
    # A resumed run must take its weights from the checkpoint.
    stranger = replace(job, initial={name: torch.zeros_like(tensor) for name, tensor in job.initial.items()})

    cuts = {
        "middle of the first epoch": "whole/step=2.ckpt",
        "the same epoch again": "middle of the first epoch/step=3.ckpt",
        "end of the epoch": "whole/step=4.ckpt",
        "middle of the second epoch": "whole/step=6.ckpt",
    }

    whole = replace(job, save_to=tmp_path / "whole").run()
    assert len(whole.gradient_norms) == 7
    for name, checkpoint in cuts.items():
        resumed = replace(stranger, resume=tmp_path / checkpoint, save_to=tmp_path / name).run()
        done = int(checkpoint.removesuffix(".ckpt")[-1])
        assert resumed.gradient_norms == whole.gradient_norms[done:], name
        assert resumed.reported == whole.reported[done:], name
        for key, weight in whole.weights.items():
            assert torch.equal(resumed.weights[key], weight), (name, key)


def test_a_run_resumed_on_another_number_of_ranks_goes_on_with_the_same_steps(from_cache, drawn_by_one, tmp_path):
    """In the middle of an epoch and at its end; from one rank to two, and back again."""
    replace(from_cache, save_to=tmp_path / "one").run()
    stranger = replace(from_cache, initial={name: torch.zeros_like(t) for name, t in from_cache.initial.items()})
    cuts = {done: tmp_path / "one" / f"step={done}.ckpt" for done in (2, 3)}
    jobs = {
        done: replace(
            stranger, strategy="ddp", accumulation=2, devices=2, resume=checkpoint, save_to=tmp_path / f"{done}"
        )
        for done, checkpoint in cuts.items()
    }
    by_two = torchrun(jobs, tmp_path)
    for done in cuts:
        back = replace(stranger, resume=tmp_path / f"{done}" / f"step={done + 2}.ckpt").run()
        for outcome, steps_before in ((by_two[0][done], done), (by_two[1][done], done), (back, done + 2)):
            assert_same(replace(outcome, reported=[]), drawn_by_one, from_cache.initial)
            if outcome.reported:  # rank 0 has the logger
                assert outcome.reported == pytest.approx(drawn_by_one.reported[steps_before:], rel=1e-5)
