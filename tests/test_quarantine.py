"""What can't be stored is left out by name and reason, counted, and stops a run where it is too much."""

import re

import numpy as np
import pytest
import torch
from cache_helpers import (
    HIDDEN,
    LAYERS,
    SHARD_SAMPLES,
    faults_beside_index,
    make_manifest,
    make_sample,
    shard_samples,
)

from dflash_lightning.cache import FeatureCache, Quarantined, create_or_join, describe
from dflash_lightning.cache.shards import ShardMarker
from dflash_lightning.errors import CacheError


def with_nan(sample):
    sample.features[1, 30] = float("nan")


def with_infinity(sample):
    sample.features[0, 71] = float("-inf")


def one_supervised(sample):
    sample.loss_mask[:] = 0
    sample.loss_mask[-1] = 1


def same_at_all_tokens(sample):
    sample.features[:, HIDDEN : 2 * HIDDEN] = sample.features[0, HIDDEN : 2 * HIDDEN].clone()


def one_value_at_a_token(sample):
    sample.features[1, 2 * HIDDEN :] = 0.0
    sample.features[1, 2 * HIDDEN + 3] = -0.0


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (with_nan, f"1 features are NaN or infinite, first at token 1, layer {LAYERS[1]}"),
        (with_infinity, f"first at token 0, layer {LAYERS[2]}"),
        (same_at_all_tokens, rf"layer {LAYERS[1]} is the same at all \d+ tokens"),
        (one_value_at_a_token, f"layer {LAYERS[2]} is constant at token 1: all 24 values are 0"),
        (one_supervised, "at least two supervised tokens in a row"),
        (lambda s: setattr(s, "sample_id", ""), "its id is empty"),
        (lambda s: setattr(s, "input_ids", s.input_ids[:-1]), "lengths differ"),
        (lambda s: setattr(s, "loss_mask", s.loss_mask[1:]), "lengths differ"),
        (lambda s: setattr(s, "features", s.features[1:]), "lengths differ"),
        (lambda s: setattr(s, "features", s.features[:, 1:]), r"expected \[\d+, 72\] \(3 layers x 24\)"),
        (lambda s: setattr(s, "features", s.features.float()), r"must be torch\.bfloat16, not torch\.float32"),
        (lambda s: setattr(s, "input_ids", s.input_ids.astype(np.int64)), "input_ids must be int32, not int64"),
        (lambda s: setattr(s, "input_ids", -s.input_ids), "negative id"),
        (lambda s: setattr(s, "loss_mask", s.loss_mask.astype(bool)), "loss_mask must be uint8, not bool"),
        (lambda s: setattr(s, "loss_mask", s.loss_mask * 2), "other than 0 and 1"),
        (lambda s: setattr(s, "sample_id", "prüfung-0"), "another sample of its shard has the same id"),
    ],
)
def test_unfit_samples_are_quarantined_by_id_and_the_others_stored(tmp_path, spoil, words):
    samples = shard_samples(0)
    spoil(samples[1])
    writer = create_or_join(tmp_path, make_manifest(), max_quarantined=0.1)
    marker = writer.write_shard(0, samples)
    (left_out,) = marker.quarantined
    assert left_out.sample_id == samples[1].sample_id
    assert re.search(words, left_out.reason)
    cache = FeatureCache(tmp_path, require_complete=False)
    assert list(cache.sample_ids) == ["prüfung-0", "prüfung-2"]
    for index, number in enumerate((0, 2)):
        assert torch.equal(cache.read(index).features, make_sample(number).features)
    assert {fault.shard for fault in faults_beside_index(tmp_path)} == {1, 2, 3}
    told = describe(tmp_path)
    assert (told["samples"], told["samples_quarantined"]) == (2, 1)
    assert told["quarantined"] == [{"shard": 0, **vars(left_out)}]


def test_a_shard_without_a_stored_sample(tmp_path):
    """Quarantined by the producer, all of them: the shard is committed, and read as one that has nothing."""
    writer = create_or_join(tmp_path, make_manifest(), max_quarantined=0.4)
    for shard in range(len(SHARD_SAMPLES)):
        samples = shard_samples(shard)
        if shard in (0, 1):
            samples = [Quarantined(sample.sample_id, "too hot") for sample in samples]
        writer.write_shard(shard, samples)
    assert [file.name for file in sorted((tmp_path / "shards/000000").iterdir())] == ["COMMITTED", "zarr.json"]
    assert faults_beside_index(tmp_path) == []
    cache = FeatureCache(tmp_path)
    assert cache.complete
    assert list(cache.sample_ids) == [f"prüfung-{i}" for i in range(4, 10)]
    for index in range(len(cache)):
        assert torch.equal(cache.read(index).features, make_sample(index + 4).features)
    told = describe(tmp_path)
    assert (told["samples"], told["samples_quarantined"], told["samples_planned"]) == (6, 4, 10)
    assert [(sample["shard"], sample["sample_id"]) for sample in told["quarantined"]] == [
        *((0, f"prüfung-{i}") for i in range(3)),
        (1, "prüfung-3"),
    ]
    (tmp_path / "shards/000001/zarr.json").write_text("{}")
    (fault,) = faults_beside_index(tmp_path)
    assert (fault.shard, fault.object) == (1, "zarr.json")


def test_a_cache_in_which_everything_is_quarantined_has_nothing_to_read(tmp_path):
    writer = create_or_join(tmp_path, make_manifest(shard_samples=(1,)), max_quarantined=1.0)
    writer.write_shard(0, [Quarantined("x", "too hot")])
    assert faults_beside_index(tmp_path) == []
    with pytest.raises(CacheError, match="holds no sample"):
        FeatureCache(tmp_path)


def test_too_many_quarantined_samples_stop_the_run_and_keep_what_is_good(tmp_path):
    """Counted over all writers, those that another process committed included."""
    manifest = make_manifest()  # 10 samples: 0.2 are 2
    first, second = (create_or_join(tmp_path, manifest, rank=rank, max_quarantined=0.2) for rank in (0, 1))
    first.write_shard(2, [*shard_samples(2)[:3], Quarantined("a", "too hot")])
    second.write_shard(1, [Quarantined("b", "too cold")])
    second.check_quarantined()
    with pytest.raises(CacheError) as caught:
        first.write_shard(0, [Quarantined("c", "too wet"), *shard_samples(0)[1:]])
    message = str(caught.value)
    assert message.startswith("3 of 10 planned samples can't be stored; max_quarantined allows 0.2 of them:")
    for line in ("sample 'a': too hot", "sample 'b': too cold", "sample 'c': too wet"):
        assert f"\n  {line}\n" in message
    assert sorted(entry.name for entry in (tmp_path / "shards").iterdir()) == ["000001", "000002"]
    assert {fault.shard for fault in faults_beside_index(tmp_path)} == {0, 3}
    first.write_shard(0, shard_samples(0))  # the cause is removed
    with pytest.raises(CacheError, match=r"2 of 10 planned .* max_quarantined allows 0\.1 of them"):
        create_or_join(tmp_path, manifest, max_quarantined=0.1).check_quarantined()


def test_markers_of_others_are_not_read_for_each_shard_that_quarantines(tmp_path, monkeypatch):
    """100 shards of two samples, one of each quarantined: 100 times as many markers would be read."""
    writer = create_or_join(tmp_path, make_manifest(shard_samples=(2,) * 100), max_quarantined=0.6)
    read = []
    load = ShardMarker.load
    monkeypatch.setattr(ShardMarker, "load", lambda *args: read.append(args) or load(*args))
    for shard in range(100):
        writer.write_shard(shard, [make_sample(0), Quarantined("a", "too hot")])
    own, recounts = 100, 10
    assert len(read) <= own + recounts * 100
    writer.remove(3)
    assert len(writer.quarantined()) == 99


def test_layers_that_only_look_constant_are_kept(tmp_path):
    samples = shard_samples(0)
    samples[1].features[:, 5] = 2.0  # a channel that is the same at all tokens
    samples[1].features[0, : HIDDEN - 1] = 0.5  # all values of a layer but one
    samples[1].features[1, : HIDDEN - 1] = 0.5
    create_or_join(tmp_path, make_manifest()).write_shard(0, samples)
    stored = FeatureCache(tmp_path, require_complete=False).read(1)
    assert torch.equal(stored.features, samples[1].features)


def test_only_what_training_can_use_is_stored(tmp_path):
    """Nothing after the last supervised token, be it as broken as it likes."""
    samples = shard_samples(0)
    kept = [len(sample.input_ids) for sample in samples]
    kept[1] -= 5
    samples[1].loss_mask[-5:] = 0
    samples[1].loss_mask[-7:-5] = 1
    samples[1].features[-5:] = float("nan")
    create_or_join(tmp_path, make_manifest()).write_shard(0, samples)
    cache = FeatureCache(tmp_path, require_complete=False)
    assert cache.lengths.tolist() == kept
    stored = cache.read(1)
    assert torch.equal(stored.features, samples[1].features[:-5])
    np.testing.assert_array_equal(stored.input_ids, samples[1].input_ids[:-5])
    np.testing.assert_array_equal(stored.loss_mask, samples[1].loss_mask[:-5])
