"""The gradient doesn't depend on how a step is cut (spec.md 5.4)."""

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
    run_on_ranks,
    write_cache,
)

from dflash_lightning.config import DrafterSettings
from dflash_lightning.training.losses import LossSettings
from dflash_lightning.training.module import OptimizerSettings

BLOCK_SIZE, LAYERS, HIDDEN = 4, [1, 3], 32
GAMMA, CLIP = 2.5, 0.5
# A large eps makes Adam's step depend on the size of the gradient, so that a wrong scale can't hide.
OPTIMIZER = OptimizerSettings(lr=0.05, eps=0.01, warmup_ratio=0.0)
SHOWN_LR, SHOWN_EPS = 1e8, 1e6
# Anchors of each step's 4 samples. On 2 ranks x 2 micro-batches the odd ones are rank 1's: in step 1 it has an empty
# micro-batch, in step 2 nothing at all. On 4 ranks one or two of them have nothing then. Some blocks are cut short by
# the end of their text.
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


def job_of_given_steps(target: Path, optimizer: OptimizerSettings, clip: float) -> Job:
    return Job(
        target=str(target),
        drafter=DrafterSettings(
            num_layers=2, block_size=BLOCK_SIZE, target_layer_ids=LAYERS, mask_token_id=MASK_TOKEN_ID
        ),
        loss=LossSettings(gamma=GAMMA),
        optimizer=optimizer,
        initial=make_drafter(load_tiny(target), block_size=BLOCK_SIZE, scale=3.0).state_dict(),
        steps=given_steps(),
        max_steps=len(ANCHORS_OF_STEPS),
        clip=clip,
    )


@pytest.fixture(scope="module")
def job(llama_folder) -> Job:
    return job_of_given_steps(llama_folder, OPTIMIZER, CLIP)


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
        assert outcome.gradient_norms == pytest.approx(naive.gradient_norms, rel=1e-5)
    assert outcome.weights.keys() == naive.weights.keys()
    for name, expected in naive.weights.items():
        update = (expected - initial[name]).norm()
        assert update > 1e-3, name
        assert (outcome.weights[name] - expected).norm() < 1e-5 * expected.norm(), name


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("strategy", "accumulation"), [("plain", 4), ("plain", 1), ("zero2", 4), ("zero0", 1)])
def test_one_process_equals_the_naive_loop(job, naive, naive_gradient, strategy, accumulation):
    cut = replace(job, strategy=strategy, accumulation=accumulation)
    outcome = cut.run()
    assert_same(outcome, naive, job.initial)
    assert_same_gradient(showing_the_gradient(cut).run(), naive_gradient, job.initial)
    assert len(outcome.reported) == len(outcome.gradient_norms) == job.max_steps


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


# Ranks, strategy, accumulation steps: 4 samples a step.
GIVEN = [
    *((2, strategy, 2) for strategy in ("ddp", "zero0", "zero1", "zero2", "zero3")),
    (2, "zero2", 1),
    (2, "zero2+offload", 2),
    *((4, strategy, 1) for strategy in ("ddp", "zero0", "zero1", "zero2", "zero3")),
]
DRAWN = ["zero2", "zero3"]


def given(job: Job, ranks: int) -> dict[tuple, Job]:
    """The whole training, and one step that shows the gradient, in every cut for so many ranks."""
    jobs = {}
    for count, name, accumulation in GIVEN:
        if count == ranks:
            cut = replace(job, strategy=name, accumulation=accumulation, devices=ranks)
            jobs[count, name, accumulation] = cut
            jobs["gradient", count, name, accumulation] = showing_the_gradient(cut)
    return jobs


def showing_the_gradient(job: Job) -> Job:
    """One step of the samples of which rank 1 of 2 has no anchor. With an eps this large Adam's first step is
    SHOWN_LR / SHOWN_EPS times the gradient."""
    optimizer = OptimizerSettings(lr=SHOWN_LR, eps=SHOWN_EPS, warmup_ratio=0.0)
    return replace(job, optimizer=optimizer, steps=[job.steps[2]], max_steps=1, clip=0.0)


@pytest.fixture(scope="module")
def naive_gradient(job, llama_folder) -> dict[str, torch.Tensor]:
    target = load_tiny(llama_folder)
    drafter = make_drafter(target, block_size=BLOCK_SIZE)
    drafter.load_state_dict(job.initial)
    drafter.double()
    naive_objective(drafter, target.get_input_embeddings().weight.double(), job.steps[2]).backward()
    return {name: parameter.grad for name, parameter in drafter.named_parameters()}


def assert_same_gradient(outcome: Outcome, expected: dict[str, torch.Tensor], initial: dict[str, torch.Tensor]) -> None:
    for name, gradient in expected.items():
        shown = (initial[name].double() - outcome.weights[name]) * (SHOWN_EPS / SHOWN_LR)
        assert (shown - gradient).norm() < 1e-5 * gradient.norm(), name


@pytest.fixture(scope="module")
def two_ranks(job, from_cache, tmp_path_factory) -> list[dict[tuple, Outcome]]:
    """Every job of two ranks, in one launch."""
    drawn = {("drawn", name): replace(from_cache, strategy=name, accumulation=2, devices=2) for name in DRAWN}
    return run_on_ranks(2, given(job, 2) | drawn, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def four_ranks(job, tmp_path_factory) -> list[dict[tuple, Outcome]]:
    return run_on_ranks(4, given(job, 4), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("ranks", "strategy", "accumulation"), GIVEN)
def test_ranks_equal_the_naive_loop(request, job, naive, ranks, strategy, accumulation):
    """Loss, gradient norm, clipped step and weights; empty micro-batches and ranks without any anchor included."""
    outcomes = [
        of_rank[ranks, strategy, accumulation]
        for of_rank in request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    ]
    assert len(outcomes[0].reported) == len(outcomes[0].gradient_norms) == job.max_steps
    for outcome in outcomes:
        assert_same(outcome, naive, job.initial)
        assert all(torch.equal(outcome.weights[key], weight) for key, weight in outcomes[0].weights.items())


@pytest.mark.parametrize(("ranks", "strategy", "accumulation"), GIVEN)
def test_the_gradient_of_ranks_is_the_naive_one(request, job, naive_gradient, ranks, strategy, accumulation):
    for of_rank in request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks]):
        assert_same_gradient(of_rank["gradient", ranks, strategy, accumulation], naive_gradient, job.initial)


@pytest.fixture(scope="module")
def drawn_by_one(from_cache) -> Outcome:
    return from_cache.run()


@pytest.mark.parametrize("strategy", DRAWN)
def test_two_ranks_of_the_data_module_equal_one(two_ranks, from_cache, drawn_by_one, strategy):
    """Down to the metrics of a validation in which one rank has nothing to do."""
    first, second = (outcomes["drawn", strategy] for outcomes in two_ranks)
    assert len(drawn_by_one.validation) == 2
    for outcome in (first, second):
        assert_same(outcome, drawn_by_one, from_cache.initial)
    for found, expected in zip(first.validation, drawn_by_one.validation, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, nan_ok=True)


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
    by_two = run_on_ranks(2, jobs, tmp_path)
    for done in cuts:
        back = replace(stranger, resume=tmp_path / f"{done}" / f"step={done + 2}.ckpt").run()
        for outcome, steps_before in ((by_two[0][done], done), (by_two[1][done], done), (back, done + 2)):
            rest = replace(
                drawn_by_one,
                reported=drawn_by_one.reported[steps_before:],
                gradient_norms=drawn_by_one.gradient_norms[steps_before:],
            )
            assert_same(outcome, rest, from_cache.initial)
