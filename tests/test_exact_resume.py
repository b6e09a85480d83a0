"""k steps, a stop, a resume: the same as all steps in one go, on the same number of ranks bit for bit."""

from dataclasses import replace

import lightning as L
import pytest
import torch
from resume_helpers import TracedOutcome, make_job, stranger, write_random_cache
from training_helpers import Job, run_on_ranks

from dflash_lightning.errors import CheckpointError

pytestmark = pytest.mark.slow
STEPS, STEPS_AN_EPOCH = 7, 4


def assert_bitwise(resumed: TracedOutcome, whole: TracedOutcome, done: int, case: str) -> None:
    """`resumed` did what `whole` did after `done` steps."""
    rest = [micro_batch for micro_batch in whole.micro_batches if micro_batch["step"] >= done]
    assert resumed.micro_batches == rest, case  # samples, anchors, learning rate, random numbers
    assert resumed.reported == whole.reported[done:], case
    assert resumed.gradient_norms == whole.gradient_norms[done:], case
    for found, expected in ((resumed.weights, whole.weights), (resumed.moments, whole.moments)):
        assert found.keys() == expected.keys()
        for key in expected:
            assert torch.equal(found[key], expected[key]), (case, key)


@pytest.fixture(scope="module")
def job(llama_folder, tmp_path_factory):
    """Seven steps of 2 micro-batches of one to three samples, 4 steps an epoch."""
    cache = write_random_cache(tmp_path_factory.mktemp("cache") / "cache", llama_folder, 17)
    data = {"cache": str(cache), "batch_tokens": 110, "num_anchors": 3, "validation_fraction": 0.0}
    return make_job(llama_folder, data=data, max_steps=STEPS, strategy="zero2", accumulation=2)


@pytest.mark.usefixtures("process_group")
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(job, tmp_path):
    whole = replace(job, save_to=tmp_path / "whole").run()
    assert len(whole.reported) == STEPS
    assert whole.micro_batches[2 * STEPS_AN_EPOCH]["samples"] != whole.micro_batches[0]["samples"]  # another epoch
    assert all(moment.abs().max() > 0 for moment in whole.moments.values())
    stops = {
        "middle of the first epoch": "whole/step=2.ckpt",
        "the same epoch again": "middle of the first epoch/step=3.ckpt",
        "end of the epoch": f"whole/step={STEPS_AN_EPOCH}.ckpt",
        "middle of the second epoch": "whole/step=6.ckpt",
    }
    for case, checkpoint in stops.items():
        resumed = replace(stranger(job), resume=tmp_path / checkpoint, save_to=tmp_path / case).run()
        assert_bitwise(resumed, whole, int(checkpoint.removesuffix(".ckpt")[-1]), case)
    read_ahead = replace(stranger(job), resume=tmp_path / "whole/step=2.ckpt", data=job.data | {"num_workers": 1}).run()
    assert_bitwise(read_ahead, whole, 2, "another number of workers")


@pytest.mark.usefixtures("process_group")
def test_a_validation_that_was_due_at_the_stop_is_made_up_for(job, tmp_path):
    """Checkpoints of every step are saved before its validation: in the middle of an epoch, and at its end."""
    validated = replace(job, data=job.data | {"validation_fraction": 0.1})
    every_second_step = {"val_check_interval": 4, "check_val_every_n_epoch": None}
    whole = replace(validated, save_to=tmp_path).run(**every_second_step)
    assert len(whole.validation) == 3
    for done, missed in ((1, 0), (2, 0), (3, 1), (4, 1)):
        resumed = replace(stranger(validated), resume=tmp_path / f"step={done}.ckpt").run(**every_second_step)
        assert resumed.validation == whole.validation[missed:]
        assert_bitwise(resumed, whole, done, f"stop after {done} steps")


@pytest.mark.usefixtures("process_group")
def test_a_changed_learning_rate_holds_after_a_resume(job, tmp_path):
    whole = replace(job, save_to=tmp_path).run()
    twice = replace(job.optimizer, lr=2 * job.optimizer.lr)
    resumed = replace(job, resume=tmp_path / "step=3.ckpt", optimizer=twice).run()
    rates = [[micro_batch["learning rate"] for micro_batch in run.micro_batches] for run in (whole, resumed)]
    assert rates[1] == pytest.approx([2 * rate for rate in rates[0][6:]])


class SaveAfterEachMicroBatch(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(self.path)


@pytest.mark.usefixtures("process_group")
def test_no_checkpoint_is_saved_inside_an_optimizer_step(job, tmp_path):
    within = SaveAfterEachMicroBatch(tmp_path / "within.ckpt")
    with pytest.raises(CheckpointError, match="after 1 of 2 micro-batches of an optimizer step"):
        Job.run(replace(job, callbacks=(within,)))
    assert not list(tmp_path.iterdir())


MICRO_BATCHES, STOP = 12, 2
RANKS = (1, 3, 4)


@pytest.fixture(scope="module")
def job_of_12(llama_folder, tmp_path_factory):
    """Five steps of 12 micro-batches, 3 steps an epoch."""
    cache = write_random_cache(tmp_path_factory.mktemp("cache") / "cache", llama_folder, 47)
    data = {"cache": str(cache), "batch_tokens": 75, "num_anchors": 3, "validation_fraction": 0.05}
    return make_job(llama_folder, data=data, max_steps=5, strategy="zero2")


def on_ranks(job, ranks: int, **changes):
    return replace(job, devices=ranks, accumulation=MICRO_BATCHES // ranks, **changes)


@pytest.fixture(scope="module")
def by_two(job_of_12, tmp_path_factory):
    """The uninterrupted run of 2 ranks, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("two")
    jobs = {
        strategy: on_ranks(job_of_12, 2, strategy=strategy, save_to=folder / strategy)
        for strategy in ("zero2", "zero3")
    }
    return run_on_ranks(2, jobs, folder), folder


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.usefixtures("process_group")
def test_a_checkpoint_of_two_ranks_goes_on_with_the_same_steps_on(ranks, job_of_12, by_two, tmp_path):
    two, folder = by_two
    strategies = ("zero2", "zero3") if ranks == 3 else ("zero2",)
    jobs = {
        strategy: on_ranks(
            stranger(job_of_12), ranks, strategy=strategy, resume=folder / strategy / f"step={STOP}.ckpt"
        )
        for strategy in strategies
    }
    many = [{name: job.run() for name, job in jobs.items()}] if ranks == 1 else run_on_ranks(ranks, jobs, tmp_path)
    for strategy in strategies:
        whole, outcomes = two[0][strategy], [of_rank[strategy] for of_rank in many]
        for outcome in outcomes:
            assert outcome.reported == pytest.approx(whole.reported[STOP:], rel=1e-5)
            assert outcome.gradient_norms == pytest.approx(whole.gradient_norms[STOP:], rel=1e-5)
            for name, weight in whole.weights.items():
                torch.testing.assert_close(outcome.weights[name], weight, rtol=1e-4, atol=1e-6)
            for name, moment in whole.moments.items():
                torch.testing.assert_close(outcome.moments[name], moment, rtol=1e-4, atol=1e-7)
        # Which samples a step takes, with which anchors, at which learning rate.
        assert steps_of(outcomes) == {s: t for s, t in steps_of([rank[strategy] for rank in two]).items() if s >= STOP}
        assert not list((folder / strategy).glob("*.universal"))


def steps_of(outcomes: list[TracedOutcome]) -> dict[int, list]:
    """All ranks' micro-batches of each step."""
    steps = {}
    for outcome in outcomes:
        for micro_batch in outcome.micro_batches:
            content = [micro_batch[key] for key in ("samples", "anchors", "learning rate")]
            steps.setdefault(micro_batch["step"], []).append(content)
    return {step: sorted(contents) for step, contents in steps.items()}


@pytest.mark.usefixtures("process_group")
def test_validations_stay_at_their_steps_on_another_number_of_ranks(job_of_12, by_two):
    every_second_step = {"val_check_interval": 2 * MICRO_BATCHES, "check_val_every_n_epoch": None}
    whole = on_ranks(job_of_12, 1).run(**every_second_step)
    resume = by_two[1] / "zero2" / "step=1.ckpt"
    resumed = on_ranks(stranger(job_of_12), 1, resume=resume).run(**every_second_step)
    assert len(whole.validation) == 2
    assert whole.validation[0]["val/loss"] != pytest.approx(whole.validation[1]["val/loss"], rel=1e-3)
    for found, expected in zip(resumed.validation, whole.validation, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.usefixtures("process_group")
def test_a_checkpoint_of_another_layout_is_refused(job_of_12, by_two):
    other = on_ranks(job_of_12, 1, strategy="zero0", resume=by_two[1] / "zero2" / f"step={STOP}.ckpt")
    with pytest.raises(CheckpointError, match="was written under ZeRO stage 2, whose files stage 0 can't read"):
        other.run()
