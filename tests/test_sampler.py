"""Which sample is computed where: the same for every way of cutting an optimizer step."""

import numpy as np
import pytest

from datamodules.sampler import StepSampler, ValidationSampler
from dflash_lightning.errors import ConfigError

# batch size, ranks, accumulation steps: 12 samples a step each
CUTS = [(12, 1, 1), (1, 12, 1), (1, 1, 12), (2, 3, 2), (3, 2, 2), (2, 2, 3), (1, 4, 3), (6, 2, 1)]
SAMPLES = np.arange(100, 153)  # 53 samples: four steps, five left out
ANCHORS = np.arange(53) % 7 + 1


def make(cut=(12, 1, 1), rank=0, *, seed=0, epoch=0, start=0) -> StepSampler:
    batch_size, world_size, accumulation = cut
    sampler = StepSampler(
        SAMPLES,
        ANCHORS,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        accumulation=accumulation,
        seed=seed,
    )
    sampler.set_epoch(epoch)
    sampler.start = start
    return sampler


def ranks(cut, **options):
    """The micro-batches of every rank."""
    return [list(make(cut, rank, **options)) for rank in range(cut[1])]


def steps(cut, **options):
    """Samples of each optimizer step, in the order in which (accumulation step, rank) take them."""
    _, _, accumulation = cut
    by_rank = ranks(cut, **options)
    found = []
    for first in range(0, len(by_rank[0]), accumulation):
        micro_batches = [batches[first + micro] for micro in range(accumulation) for batches in by_rank]
        found.append([sample for batch in micro_batches for sample in batch.samples])
    return found


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("epoch", [0, 3])
def test_steps_hold_the_same_samples_in_the_same_order_for_every_cut(cut, epoch):
    assert steps(cut, epoch=epoch) == steps((12, 1, 1), epoch=epoch)


@pytest.mark.parametrize("cut", CUTS)
def test_every_rank_gets_the_same_number_of_full_micro_batches(cut):
    batch_size, _, accumulation = cut
    for rank, batches in enumerate(ranks(cut)):
        assert len(batches) == len(make(cut, rank)) == 4 * accumulation
        assert all(len(batch.samples) == batch_size and batch.epoch == 0 for batch in batches)


@pytest.mark.parametrize("cut", CUTS)
def test_an_epoch_takes_no_sample_twice_and_leaves_only_the_tail_out(cut):
    taken = [sample for step in steps(cut) for sample in step]
    assert len(set(taken)) == len(taken) == 48
    assert set(taken) < set(SAMPLES.tolist())


@pytest.mark.parametrize("cut", CUTS)
def test_anchors_in_step_counts_the_whole_step_on_every_rank(cut):
    anchors_of = dict(zip(SAMPLES.tolist(), ANCHORS.tolist(), strict=True))
    expected = [sum(anchors_of[sample] for sample in step) for step in steps(cut)]
    for batches in ranks(cut):
        assert [batch.anchors_in_step for batch in batches] == [n for n in expected for _ in range(cut[2])]


def test_order_changes_with_epoch_and_seed_and_with_nothing_else():
    cut = (2, 3, 2)
    assert steps(cut) == steps(cut)
    assert len({str(steps(cut, epoch=epoch, seed=seed)) for epoch in range(3) for seed in range(3)}) == 9


def test_over_epochs_every_sample_is_left_out_now_and_then():
    left_out = [set(SAMPLES.tolist()) - {s for step in steps((12, 1, 1), epoch=e) for s in step} for e in range(60)]
    assert all(len(tail) == 5 for tail in left_out)
    assert set.union(*left_out) == set(SAMPLES.tolist())


@pytest.mark.parametrize("start", [0, 1, 5, 8])
def test_a_start_skips_so_many_micro_batches_once(start):
    whole = list(make((2, 3, 2), rank=1))
    sampler = make((2, 3, 2), rank=1, start=start)
    assert list(sampler) == whole[start:]
    assert list(sampler) == whole


def test_fewer_samples_than_a_step_are_refused():
    with pytest.raises(ConfigError, match=r"holds 53 samples, but one optimizer step takes 54 \(9 samples x 2 ranks"):
        make((9, 2, 3))
    assert len(make((53, 1, 1))) == 1


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (5, 1), (5, 2), (4, 3), (53, 2), (60, 8)])
def test_validation_takes_every_sample_once_and_gives_every_rank_as_many_batches(batch_size, world_size):
    by_rank = [
        list(ValidationSampler(SAMPLES, ANCHORS, batch_size=batch_size, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in by_rank}) == 1
    counted = [batch for batches in by_rank for batch in batches if batch.anchors_in_step]
    assert sorted(sample for batch in counted for sample in batch.samples) == SAMPLES.tolist()
    assert sum(batch.anchors_in_step for batch in counted) == ANCHORS.sum()
    assert sum(len(batches) for batches in by_rank) - len(counted) < world_size
    assert all(batch.epoch is None and batch.samples for batches in by_rank for batch in batches)
