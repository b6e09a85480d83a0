"""The data module on a small real cache: what a batch holds, what is refused, and where a resume goes on."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from faulty_server import faulty_s3
from lightning.pytorch.loops.progress import _BatchProgress as BatchProgress
from training_helpers import random_sample, write_cache

from datamodules import FeatureCacheDataModule
from datamodules.feature_cache import in_validation_split
from datamodules.plan import PLAN_VERSION
from dflash_lightning.cache import ObjectStoreSettings, StagingSettings, open_store
from dflash_lightning.cache.index import id_hash
from dflash_lightning.cache.staging import SUBFOLDER
from dflash_lightning.errors import CacheError, ConfigError
from dflash_lightning.target import target_identity

LAYERS, HIDDEN, BLOCK_SIZE = (1, 3), 8, 4
SAMPLES = [random_sample(f"s{i}", 6 + i, 2 + i % 3, len(LAYERS) * HIDDEN, seed=i) for i in range(23)]


@pytest.fixture(scope="module")
def cache(llama_folder, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "cache"
    return str(write_cache(path, SAMPLES, target=llama_folder, layer_ids=LAYERS, hidden_size=HIDDEN))


@pytest.fixture(scope="module")
def identity(llama_folder):
    return target_identity(str(llama_folder))


def make(
    cache,
    identity,
    *,
    rank=0,
    world_size=1,
    accumulation=1,
    layers=LAYERS,
    hidden=HIDDEN,
    own_sampler_replaced=False,
    **options,
):
    """A data module set up for a trainer and a drafter of this kind."""
    data = FeatureCacheDataModule(
        cache, **{"num_anchors": 3, "validation_fraction": 0.25, "batch_tokens": 90, **options}
    )
    data.trainer = SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        accumulate_grad_batches=accumulation,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=BatchProgress())),
        _accelerator_connector=SimpleNamespace(use_distributed_sampler=own_sampler_replaced),
        lightning_module=SimpleNamespace(
            target_identity=identity,
            drafter_config=SimpleNamespace(target_layer_ids=layers, hidden_size=hidden, block_size=BLOCK_SIZE),
        ),
    )
    data.setup("fit")
    return data


def epoch_of(loader, epoch=0):
    loader.sampler.set_epoch(epoch)
    return list(loader)


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def sample_of(batch, row):
    """The stored sample in a row of a batch, found by its tokens."""
    tokens = int((batch["document_ids"][row] == 0).sum())
    ids = batch["input_ids"][row, :tokens].tolist()
    (found,) = [sample for sample in SAMPLES if sample.input_ids.tolist() == ids]
    return found


def test_a_batch_holds_the_stored_samples_padded_on_the_right(cache, identity):
    batches = epoch_of(make(cache, identity).train_dataloader())
    for batch in batches:
        rows, length, _ = batch["features"].shape
        assert batch["features"].dtype == torch.bfloat16
        # DeepSpeed casts every other float tensor of a batch.
        assert all(not tensor.is_floating_point() for name, tensor in batch.items() if name != "features")
        in_step, longest, most = 0, 0, 0
        for row in range(rows):
            sample = sample_of(batch, row)
            tokens = len(sample.input_ids)
            longest = max(longest, tokens)
            assert torch.equal(batch["features"][row, :tokens], sample.features)
            assert batch["loss_mask"][row, :tokens].tolist() == sample.loss_mask.tolist()
            assert (batch["document_ids"][row, tokens:] == -1).all()
            for name in ("features", "input_ids", "loss_mask"):
                assert (batch[name][row, tokens:] == 0).all()
            candidates = [a for a in range(tokens - 1) if sample.loss_mask[a] and sample.loss_mask[a + 1]]
            drawn = batch["anchors"][row, batch["valid"][row]].tolist()
            assert len(drawn) == min(3, len(candidates))
            assert set(drawn) <= set(candidates)
            in_step += len(drawn)
            most = max(most, len(drawn))
        assert (length, batch["anchors"].shape[1]) == (longest, most)
        assert rows * (length + BLOCK_SIZE * most) <= 90
        assert int(batch["anchors_in_step"]) == in_step


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_are_the_same_from_a_staged_remote_cache(cache, identity, tmp_path, workers):
    with faulty_s3("features") as server:
        reach = ObjectStoreSettings(endpoint=server.url)
        for file in sorted(Path(cache).rglob("*")):
            if file.is_file():
                open_store("s3://features/cache", reach).replace(file.relative_to(cache).as_posix(), file.read_bytes())
        staging = StagingSettings(folder=tmp_path, max_gb=1)
        remote = make("s3://features/cache", identity, object_store=reach, staging=staging, num_workers=workers)
        assert_equal(epoch_of(remote.train_dataloader()), epoch_of(make(cache, identity).train_dataloader()))
        assert [path for path in (tmp_path / SUBFOLDER).iterdir() if path.is_dir()]


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 2), (4, 1)])
def test_batches_are_the_same_on_any_number_of_ranks(cache, identity, world_size, accumulation):
    whole = epoch_of(make(cache, identity, accumulation=4).train_dataloader(), epoch=1)
    cut = {"world_size": world_size, "accumulation": accumulation}
    by_rank = [
        epoch_of(make(cache, identity, rank=rank, **cut).train_dataloader(), epoch=1) for rank in range(world_size)
    ]
    assert_equal([batch for turn in zip(*by_rank, strict=True) for batch in turn], whole)


def test_training_redraws_anchors_and_order_each_epoch_and_validation_never(cache, identity):
    data = make(cache, identity)
    loader = data.train_dataloader()
    first, second, again = epoch_of(loader, 0), epoch_of(loader, 1), epoch_of(loader, 0)
    assert_equal(first, again)

    def anchors(batches):
        return {
            sample_of(batch, row).sample_id: batch["anchors"][row].tolist()
            for batch in batches
            for row in range(len(batch["anchors"]))
        }

    before, after = anchors(first), anchors(second)
    assert list(before) != list(after)
    assert any(before[name] != after[name] for name in before.keys() & after.keys())
    assert_equal(list(data.val_dataloader()), list(make(cache, identity).val_dataloader()))


def test_training_and_validation_share_no_sample(cache, identity):
    data = make(cache, identity)
    held_back, trained = (
        {sample_of(batch, row).sample_id for batch in batches for row in range(len(batch["anchors"]))}
        for batches in (data.val_dataloader(), epoch_of(data.train_dataloader()))
    )
    assert held_back
    assert held_back | trained == {sample.sample_id for sample in SAMPLES}
    assert not held_back & trained


def test_the_split_is_by_hash_and_never_moves(llama_folder, cache, identity, tmp_path):
    few = write_cache(tmp_path / "few", SAMPLES[:9], target=llama_folder, layer_ids=LAYERS, hidden_size=HIDDEN)
    small, large = make(str(few), identity), make(cache, identity)

    def held_back(data):
        return {data.cache.sample_ids[i] for i in data.validation_samples}

    known = {sample.sample_id for sample in SAMPLES[:9]}
    assert held_back(small) == held_back(large) & known != set()
    # A larger share only adds.
    assert held_back(large) < held_back(make(cache, identity, validation_fraction=0.6))
    share = in_validation_split(np.array([id_hash(b"sample %d" % i) for i in range(5000)], dtype=np.uint64), 0.2).mean()
    assert abs(share - 0.2) < 4 * (0.2 * 0.8 / 5000) ** 0.5
    assert make(cache, identity, validation_fraction=0.0).val_dataloader() == []


def test_a_rank_without_a_batch_of_its_own_validates_on_nothing(cache, identity):
    cut = {"world_size": 3, "batch_tokens": 400}
    batches = [list(make(cache, identity, rank=rank, **cut).val_dataloader()) for rank in range(3)]
    assert [len(found) for found in batches] == [1, 1, 1]
    assert [bool(found[0]["valid"].any()) for found in batches] == [True, False, False]


def resume(state, cache, identity, *, epoch=0, **cut):
    loader = make(cache, identity, **cut).train_dataloader()
    loader.load_state_dict(state)
    return epoch_of(loader, epoch)


def test_a_resumed_loader_goes_on_where_the_trainer_stopped(cache, identity):
    whole = epoch_of(make(cache, identity).train_dataloader(), 2)
    loader = make(cache, identity).train_dataloader()
    loader.sampler.set_epoch(2)
    iterator = iter(loader)
    taken = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    assert_equal(taken, whole[:3])
    assert_equal(resume(state, cache, identity, epoch=2), whole[3:])
    # The rest of this loader's epoch isn't disturbed, and its end resumes at the start of the next.
    assert_equal(list(iterator), whole[3:])
    following = epoch_of(make(cache, identity).train_dataloader(), 3)
    assert_equal(resume(loader.state_dict(), cache, identity, epoch=3), following)


@pytest.mark.slow
def test_workers_that_read_ahead_change_nothing(cache, identity):
    whole = epoch_of(make(cache, identity).train_dataloader())
    loader = make(cache, identity, num_workers=2).train_dataloader()
    loader.load_state_dict({**loader.state_dict(), "micro_batches_taken": 2})
    iterator = iter(loader)
    assert_equal([next(iterator), next(iterator)], whole[2:4])
    state = loader.state_dict()
    assert state["micro_batches_taken"] == 4  # what the workers have prefetched by now doesn't count
    assert_equal(list(iterator), whole[4:])
    # The same workers serve the next epochs.
    assert_equal(list(loader), whole)
    loader.load_state_dict(state)
    assert_equal(list(loader), whole[4:])
    assert_equal(resume(state, cache, identity, num_workers=0), whole[4:])


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_damage_is_told_in_the_same_words_by_a_worker(cache, identity, tmp_path, num_workers):
    shutil.copytree(cache, tmp_path / "cache")
    file = tmp_path / "cache" / "shards" / "000000" / "features" / "c" / "0" / "0"
    file.write_bytes(file.read_bytes()[:-1])
    data = make(tmp_path / "cache", identity, num_workers=num_workers)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        with pytest.raises(CacheError, match=r"shard 000000, object features/c/0/0: ") as caught:
            list(loader)
        assert "Traceback" not in str(caught.value)


def test_a_resume_twice_within_an_epoch_goes_on_where_the_second_stopped(cache, identity):
    whole = epoch_of(make(cache, identity).train_dataloader())
    first = make(cache, identity).train_dataloader()
    iterator = iter(first)
    assert_equal([next(iterator), next(iterator)], whole[:2])
    second = make(cache, identity).train_dataloader()
    second.load_state_dict(first.state_dict())
    iterator = iter(second)
    assert_equal([next(iterator), next(iterator)], whole[2:4])
    assert_equal(resume(second.state_dict(), cache, identity), whole[4:])


def test_a_state_holds_for_any_number_of_ranks(cache, identity):
    """DeepSpeed keeps rank 0's state for all ranks; the world may also have changed in between."""
    loader = make(cache, identity, accumulation=4).train_dataloader()
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    for rank in range(2):
        cut = {"rank": rank, "world_size": 2, "accumulation": 2}
        whole = epoch_of(make(cache, identity, **cut).train_dataloader())
        assert_equal(resume(state, cache, identity, **cut), whole[2:])


def test_a_state_of_another_plan_is_refused_in_the_middle_of_an_epoch_only(cache, identity):
    loader = make(cache, identity).train_dataloader()
    at_start = loader.state_dict()
    iterator = iter(loader)
    next(iterator)
    inside = loader.state_dict()
    for other, message in (
        ({"batch_tokens": 91}, "batch_tokens: checkpoint 90, this run 91"),
        ({"seed": 1}, "seed: checkpoint 0, this run 1"),
        ({"accumulation": 2}, "micro-batches in a step: checkpoint 1, this run 2"),
        ({"num_anchors": 2}, "samples: checkpoint"),
    ):
        with pytest.raises(ConfigError, match=message):
            resume(inside, cache, identity, **other)
        assert resume(at_start, cache, identity, **other)
    with pytest.raises(ConfigError, match=r"after 1 micro-batches, inside an optimizer step.* on 2 ranks"):
        resume(
            {**inside, "plan": make(cache, identity, accumulation=2).train_dataloader().state_dict()["plan"]},
            cache,
            identity,
            world_size=2,
        )


def test_a_state_of_another_version_of_the_plan_is_refused(cache, identity, monkeypatch):
    loader = make(cache, identity).train_dataloader()
    next(iter(loader))
    state = loader.state_dict()
    unversioned = {**state, "plan": {k: v for k, v in state["plan"].items() if k != "plan version"}}
    with pytest.raises(ConfigError, match=f"plan version: checkpoint None, this run {PLAN_VERSION}"):
        resume(unversioned, cache, identity)
    monkeypatch.setattr("datamodules.plan.PLAN_VERSION", PLAN_VERSION + 1)
    with pytest.raises(ConfigError, match=f"plan version: checkpoint {PLAN_VERSION}, this run {PLAN_VERSION + 1}"):
        resume(state, cache, identity)


def test_a_cache_that_does_not_fit_is_refused_with_what_differs(cache, identity):
    with pytest.raises(CacheError, match=r"target_layer_ids: cache has \[1, 3\], this run has \[3, 1\]"):
        make(cache, identity, layers=(3, 1))
    with pytest.raises(CacheError, match="hidden_size: cache has 8, this run has 16"):
        make(cache, identity, hidden=16)
    with pytest.raises(CacheError, match=r"target\.weights_sha256: cache has .*, this run has other"):
        make(cache, replace(identity, weights_sha256="other"))
    assert len(make(cache, replace(identity, name="moved", revision="x")).cache) == len(SAMPLES)


def test_what_is_no_cache_is_refused(tmp_path, identity):
    with pytest.raises(CacheError, match="is not a feature cache"):
        make(str(tmp_path), identity)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"shard_window": 0}, "shard_window is 0"),
        ({"num_anchors": 0}, "num_anchors is 0"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"validation_fraction": -0.1}, "validation_fraction is -0.1"),
    ],
)
def test_options_out_of_range_are_refused(cache, option, message):
    with pytest.raises(ConfigError, match=message):
        FeatureCacheDataModule(cache, **option)


def test_too_few_samples_for_one_step_are_refused(cache, identity):
    with pytest.raises(ConfigError, match="Lower accumulate_grad_batches"):
        make(cache, identity, accumulation=24).train_dataloader()


def test_lightnings_own_sampler_is_refused_on_several_ranks(cache, identity):
    with pytest.raises(ConfigError, match="use_distributed_sampler is true"):
        make(cache, identity, world_size=2, own_sampler_replaced=True)
