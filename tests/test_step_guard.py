"""A step whose loss or gradient isn't finite changes nothing on any rank, is counted, and is named."""

from dataclasses import replace
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from helpers import MASK_TOKEN_ID
from training_helpers import GivenSample, Job, random_sample, run_on_ranks

from dflash_lightning.config import DrafterSettings
from dflash_lightning.errors import ConfigError, TrainingError
from dflash_lightning.training.gathering import gather_drafter
from dflash_lightning.training.losses import LossSettings
from dflash_lightning.training.module import DFlashModule, OptimizerSettings
from dflash_lightning.training.step_guard import StepGuard, spoil_gradients_of_nonfinite

DRAFTER = DrafterSettings(num_layers=1, block_size=4, target_layer_ids=[1, 3], mask_token_id=MASK_TOKEN_ID)
STRATEGIES = ["ddp", "zero0", "zero1", "zero2", "zero3"]
BFLOAT16 = ["zero0", "zero1", "zero2", "zero3"]


class Snapshots(L.Callback):
    """Saves what the optimizer holds on this rank after each step: weights that it updates, moments, learning rate."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, _outputs, _batch, batch_index):
        if (batch_index + 1) % trainer.accumulate_grad_batches:
            return
        optimizer = trainer.optimizers[0]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # inside of DeepSpeed's
        state = {
            "weights": list(gather_drafter(pl_module.drafter).state_dict().values()),
            "updated": [parameter.data for group in optimizer.param_groups for parameter in group["params"]],
            "moments": [list(of_parameter.values()) for of_parameter in optimizer.state.values()],
            "lr": [group["lr"] for group in optimizer.param_groups],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(
            {"state": state, "skipped": pl_module.step_guard.skipped_steps},
            self.folder / f"rank{trainer.global_rank}-step{trainer.global_step}.pt",
        )


def snapshot(folder: Path, step: int, rank: int = 0) -> dict:
    return torch.load(folder / f"rank{rank}-step{step}.pt", weights_only=False)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def step_of(number: int) -> list[GivenSample]:
    return [
        GivenSample(random_sample(f"s{number}-{i}", 20, 3, 64, seed=4 * number + i), np.array([4, 9])) for i in range(4)
    ]


@pytest.fixture
def job(llama_folder) -> Job:
    """Four steps of 4 micro-batches. Sample 1 of step 2, which goes to rank 1 of 2, has a NaN among its features."""
    module = DFlashModule(str(llama_folder), DRAFTER)
    torch.manual_seed(0)
    module.configure_model()
    steps = [step_of(number) for number in range(4)]
    steps[1][1].sample.features[2, 5] = float("nan")
    return Job(
        target=str(llama_folder),
        drafter=DRAFTER,
        loss=LossSettings(),
        optimizer=OptimizerSettings(lr=0.01, warmup_ratio=0.0),
        initial=module.drafter.state_dict(),
        steps=steps,
        max_steps=4,
        clip=1.0,
    )


def without_the_bad_step(job: Job) -> Job:
    return replace(job, steps=[job.steps[0], job.steps[2], job.steps[3], step_of(4)])


def check_left_out(folder: Path, reference: Path, ranks: int) -> None:
    for rank in range(ranks):
        before, bad, after, last = (snapshot(folder, step, rank) for step in (1, 2, 3, 4))
        assert (before["skipped"], last["skipped"]) == (0, 1)
        assert same(bad["state"], before["state"])
        assert not same(after["state"]["weights"], before["state"]["weights"])
        # As if the bad step had never been there, learning rate included.
        assert same(after["state"], snapshot(reference, 2, rank)["state"])
        assert same(last["state"], snapshot(reference, 3, rank)["state"])


def test_one_process_leaves_out_a_bad_step_and_names_its_samples(job, tmp_path):
    with pytest.warns(UserWarning, match="step 2 was left out: its loss isn't finite. Samples: 's1-1'. Left out so"):
        outcome = replace(job, accumulation=4, callbacks=(Snapshots(tmp_path / "bad"),)).run()
    replace(without_the_bad_step(job), accumulation=4, callbacks=(Snapshots(tmp_path / "good"),)).run()
    check_left_out(tmp_path / "bad", tmp_path / "good", ranks=1)
    assert np.isfinite(outcome.gradient_norms).tolist() == [True, False, True, True]


@pytest.mark.slow
def test_two_ranks_leave_out_a_bad_step_together(job, tmp_path):
    """Every strategy; bfloat16 weights with float32 masters too."""
    variants = [(name, "32-true") for name in STRATEGIES] + [(name, "bf16-mixed") for name in BFLOAT16]
    jobs = {}
    for name, precision in variants:
        for kind, given in (("bad", job), ("good", without_the_bad_step(job))):
            folder = tmp_path / name / precision / kind
            jobs[name, precision, kind] = replace(
                given, strategy=name, precision=precision, accumulation=2, devices=2, callbacks=(Snapshots(folder),)
            )
    run_on_ranks(2, jobs, tmp_path)
    for name, precision in variants:
        check_left_out(tmp_path / name / precision / "bad", tmp_path / name / precision / "good", ranks=2)
    named = "optimizer step 2 was left out: its loss isn't finite. Samples: 's1-1'. Left out so far: 1."
    assert named in (tmp_path / "log.txt").read_text()


def test_one_bad_step_too_many_stops_the_run(job):
    with pytest.raises(TrainingError, match=r"step 2 was left out.*'s1-1'.* makes 1, and max_skipped_steps is 0"):
        replace(job, accumulation=4, max_skipped_steps=0).run()


def test_the_count_goes_on_after_a_resume(job, tmp_path):
    with pytest.warns(UserWarning, match="Left out so far: 1"):
        replace(job, accumulation=4, save_to=tmp_path).run()
    again = replace(job, accumulation=4, max_steps=6, max_skipped_steps=1, resume=tmp_path / "step=4.ckpt")
    with pytest.raises(TrainingError, match=r"step 6 was left out.* makes 2, and max_skipped_steps is 1"):
        again.run()


def test_a_loss_that_is_not_finite_spoils_every_gradient_and_another_none():
    weight = torch.tensor([0.3, -2.0], requires_grad=True)
    for value in (1.5, 0.0, -1e37):
        loss = (weight * value).sum()
        assert torch.equal(spoil_gradients_of_nonfinite(loss), loss)
        (gradient,) = torch.autograd.grad(spoil_gradients_of_nonfinite(loss), weight)
        assert torch.equal(gradient, torch.full((2,), value))
    for value in (float("inf"), -float("inf"), float("nan")):
        spoiled = spoil_gradients_of_nonfinite((weight * 2).sum() + value)
        assert spoiled.isnan()
        (gradient,) = torch.autograd.grad(spoiled, weight)
        assert gradient.isnan().all()


def test_a_negative_limit_is_refused():
    with pytest.raises(ConfigError, match="max_skipped_steps is -1"):
        StepGuard(-1)
