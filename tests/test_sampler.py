"""Which sample is computed where: planned for all ranks together, the same for every way of dealing it out."""

import numpy as np
import pytest

from datamodules.plan import EpochPlanner, SampleSizes
from datamodules.sampler import StepSampler, ValidationSampler
from dflash_lightning.errors import ConfigError

BLOCK_SIZE, BUDGET = 4, 700
# Ranks and accumulation steps: 12 micro-batches a step each.
DEALS = [(12, 1), (1, 12), (3, 4), (4, 3), (2, 6)]
RNG = np.random.default_rng(7)
COUNT = 300
SIZES = SampleSizes(
    samples=np.arange(1000, 1000 + COUNT),
    lengths=RNG.lognormal(4.0, 0.5, COUNT).astype(np.int64) + 10,
    anchors=RNG.integers(1, 13, COUNT),
    shards=np.arange(COUNT) // 20,
    block_size=BLOCK_SIZE,
)
POSITION = {sample: position for position, sample in enumerate(SIZES.samples.tolist())}


def plan(*, batches_per_step=12, seed=0, shard_window=None, sizes=SIZES, batch_tokens=BUDGET) -> EpochPlanner:
    return EpochPlanner(
        sizes, batch_tokens=batch_tokens, batches_per_step=batches_per_step, seed=seed, shard_window=shard_window
    )


def ranks(world_size, *, epoch=0, start=0, **options):
    """The micro-batches of every rank."""
    dealt = []
    for rank in range(world_size):
        sampler = StepSampler(plan(**options), int, rank=rank, world_size=world_size)
        sampler.set_epoch(epoch)
        sampler.start = start
        dealt.append(list(sampler))
        assert len(dealt[-1]) == len(sampler) - start
    return dealt


def in_order(by_rank):
    """All micro-batches in the order in which (accumulation step, rank) take them."""
    return [batch for turn in zip(*by_rank, strict=True) for batch in turn]


def padded_tokens(batch) -> int:
    members = [POSITION[sample] for sample in batch.samples]
    return len(members) * int(SIZES.lengths[members].max() + BLOCK_SIZE * SIZES.anchors[members].max())


@pytest.mark.parametrize(("world_size", "accumulation"), DEALS)
@pytest.mark.parametrize("epoch", [0, 3])
def test_every_step_is_the_same_for_any_number_of_ranks(world_size, accumulation, epoch):
    by_rank = ranks(world_size, epoch=epoch)
    assert in_order(by_rank) == in_order(ranks(1, epoch=epoch))
    assert len({len(batches) for batches in by_rank}) == 1
    assert len(by_rank[0]) % accumulation == 0


@pytest.mark.parametrize("batches_per_step", [1, 12, 64])
def test_every_epoch_has_as_many_micro_batches_and_takes_nearly_every_sample_once(batches_per_step):
    planner = plan(batches_per_step=batches_per_step)
    assert planner.num_batches % batches_per_step == 0
    for epoch in range(20):
        batches = planner.batches(epoch)
        assert len(batches) == planner.num_batches
        assert all(len(batch) for batch in batches)
        taken = np.concatenate(batches).tolist()
        assert len(set(taken)) == len(taken) > 0.97 * COUNT


@pytest.mark.parametrize(
    ("count", "batches_per_step", "steps"),
    [(10, 4, 1), (44, 4, 1), (60, 4, 2), (100, 8, 2), (30, 1, 3), (300, 8, 4), (1000, 8, 11)],
)
def test_a_small_epoch_has_as_few_steps_as_hold_it(count, batches_per_step, steps):
    lengths = np.random.default_rng(0).lognormal(5.4, 0.45, count).astype(np.int64) + 20
    sizes = SampleSizes(np.arange(count), lengths, np.full(count, 64), np.zeros(count, int), 16)
    planner = plan(sizes=sizes, batch_tokens=16384, batches_per_step=batches_per_step)
    assert planner.num_steps == steps
    assert all(sum(map(len, planner.batches(epoch))) == count for epoch in range(8))


def test_full_steps_need_no_spare_room():
    sizes = SampleSizes(np.arange(100), np.full(100, 60), np.full(100, 10), np.zeros(100, int), BLOCK_SIZE)
    batches = plan(sizes=sizes, batch_tokens=500, batches_per_step=4).batches(0)
    assert [len(batch) for batch in batches] == [5] * 20


def test_a_micro_batch_keeps_to_the_budget_and_most_come_near_it():
    for batches_per_step in (1, 12):
        found = [padded_tokens(batch) for batch in in_order(ranks(1, batches_per_step=batches_per_step))]
        assert max(found) <= BUDGET
        assert np.mean(found) > 0.6 * BUDGET


def test_similar_lengths_share_a_micro_batch():
    """GSM8K-like lengths: a log-normal spread of 0.45 around some 250 tokens."""
    lengths = np.random.default_rng(0).lognormal(5.4, 0.45, 5000).astype(np.int64) + 20
    sizes = SampleSizes(np.arange(5000), lengths, np.full(5000, 24), np.zeros(5000, int), BLOCK_SIZE)
    for batch_tokens, batches_per_step in ((1500, 8), (1500, 64), (5000, 16)):
        batches = plan(sizes=sizes, batch_tokens=batch_tokens, batches_per_step=batches_per_step).batches(1)
        padded = sum(len(batch) * lengths[batch].max() for batch in batches)
        assert 1 - sum(lengths[batch].sum() for batch in batches) / padded < 0.1
        one = plan(sizes=sizes, batch_tokens=batch_tokens, batches_per_step=1).batches(1)
        assert 1 - lengths.sum() / sum(len(batch) * lengths[batch].max() for batch in one) > 0.15


@pytest.mark.parametrize("batches_per_step", [1, 12])
def test_a_step_is_a_fair_draw(batches_per_step):
    """Means of the steps' lengths scatter as those of random draws of as many samples."""
    batches = plan(batches_per_step=batches_per_step).batches(0)
    steps = [np.concatenate(batches[i : i + batches_per_step]) for i in range(0, len(batches), batches_per_step)]
    deviations = [(SIZES.lengths[step].mean() - SIZES.lengths.mean()) * len(step) ** 0.5 for step in steps]
    assert 0.5 < np.std(deviations) / SIZES.lengths.std() < 1.4
    sizes = [len(step) for step in steps]
    assert np.median(sizes) - 1 <= np.mean(sizes) <= np.median(sizes) + 1


def test_samples_meet_others_in_every_epoch():
    together = [
        {(a, b) for batch in plan().batches(epoch) for a in batch for b in batch if a < b} for epoch in range(2)
    ]
    assert len(together[0] & together[1]) < 0.2 * len(together[0])


def test_the_plan_changes_with_epoch_and_seed_and_with_nothing_else():
    assert in_order(ranks(3)) == in_order(ranks(3))
    assert len({str(ranks(1, epoch=epoch, seed=seed)) for epoch in range(3) for seed in range(3)}) == 9


def test_anchors_in_step_counts_the_whole_step_on_every_rank():
    batches = in_order(ranks(3))
    for first in range(0, len(batches), 12):
        step = batches[first : first + 12]
        expected = sum(int(SIZES.anchors[POSITION[sample]]) for batch in step for sample in batch.samples)
        assert {batch.anchors_in_step for batch in step} == {expected}


def test_what_an_epoch_leaves_out_is_counted_and_shown(caplog):
    planner = plan(batches_per_step=1)
    planner.num_steps -= 20
    planner.num_batches -= 20
    left_out = {frozenset(range(COUNT)) - frozenset(np.concatenate(planner.batches(epoch))) for epoch in range(8)}
    assert len(left_out) == 8
    with caplog.at_level("INFO"):
        list(StepSampler(planner, int))
    assert f"epoch 0: {COUNT - sum(map(len, planner.batches(0)))} of {COUNT} samples" in caplog.text


@pytest.mark.parametrize("start", [0, 1, 5])
def test_a_start_skips_so_many_micro_batches_once(start):
    sampler = StepSampler(plan(), int, rank=1, world_size=3)
    whole = list(sampler)
    sampler.start = start
    assert list(sampler) == whole[start:]
    assert list(sampler) == whole


@pytest.mark.parametrize("shard_window", [1, 2, 4])
def test_a_window_of_shards_bounds_the_shards_in_use(shard_window):
    shards = [
        {int(SIZES.shards[POSITION[sample]]) for sample in batch.samples}
        for batch in in_order(ranks(1, batches_per_step=1, shard_window=shard_window))
    ]
    needed = [{shard for later in shards[i:] for shard in later} for i in range(len(shards))]
    seen = set()
    for i, now in enumerate(shards):
        seen |= now
        assert len(seen & needed[i]) <= 2 * shard_window  # those in use, and at a border the next ones
    first = [batches[0].samples for epoch in range(6) for batches in ranks(1, epoch=epoch, shard_window=shard_window)]
    assert len({int(SIZES.shards[POSITION[samples[0]]]) for samples in first}) > 1


def test_what_can_not_be_planned_is_refused():
    with pytest.raises(ConfigError, match="holds 300 samples, but one optimizer step takes 301 micro-batches"):
        plan(batches_per_step=301)
    assert plan(batches_per_step=300).num_batches == 300
    heaviest = int(SIZES.tokens.max())
    with pytest.raises(ConfigError, match=f"the largest sample alone takes {heaviest} tokens"):
        plan(batch_tokens=heaviest - 1)
    assert plan(batch_tokens=heaviest).num_batches > 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_validation_takes_every_sample_once_and_gives_every_rank_as_many_batches(world_size):
    by_rank = [
        list(ValidationSampler(SIZES, int, batch_tokens=BUDGET, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in by_rank}) == 1
    counted = [batch for batches in by_rank for batch in batches if batch.anchors_in_step]
    assert sorted(sample for batch in counted for sample in batch.samples) == SIZES.samples.tolist()
    assert sum(batch.anchors_in_step for batch in counted) == SIZES.anchors.sum()
    assert max(map(padded_tokens, counted)) <= BUDGET
    assert sum(len(batches) for batches in by_rank) - len(counted) < world_size
    assert all(batch.epoch is None and batch.samples for batches in by_rank for batch in batches)
