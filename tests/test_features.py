"""Captured features are the target's own hidden states, whatever batch a sample was captured in."""

import numpy as np
import pytest
import torch
from helpers import load_tiny

from dflash_lightning.capture.command import capture_samples, plan_batches
from dflash_lightning.capture.job import plan_shards
from dflash_lightning.features import FeatureTap, compute_features, decoder_layers
from dflash_lightning.prepare.data import PreparedSample

LAYERS = [3, 0, 4]
LENGTHS = [5, 19, 1, 12]


@pytest.fixture
def target(target_folder):
    return load_tiny(target_folder)


def texts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 260, (length,), generator=generator) for length in LENGTHS]


@torch.no_grad()
def naive_features(target, ids) -> torch.Tensor:
    """``hidden_states[id + 1]`` of an unpadded forward of one text."""
    states = target(ids[None], output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[i + 1][0] for i in LAYERS], dim=-1)


def padded(rows, junk=0):
    """Right-padded ids and their attention mask; the padding holds ``junk``."""
    length = max(map(len, rows))
    ids, mask = torch.full((len(rows), length), junk), torch.zeros(len(rows), length, dtype=torch.long)
    for row, text in enumerate(rows):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    return ids, mask


@pytest.mark.parametrize("junk", [0, 200])
def test_features_of_padded_batches_equal_hidden_states_of_single_forwards(target, junk):
    rows = texts()
    features = compute_features(target, *padded(rows, junk), LAYERS)
    assert features.shape == (4, 19, 3 * 32)
    for row, text in enumerate(rows):
        torch.testing.assert_close(features[row, : len(text)], naive_features(target, text), rtol=1e-4, atol=1e-4)


def test_features_keep_the_targets_dtype(target_folder):
    target = load_tiny(target_folder, dtype=torch.bfloat16)
    ids, mask = padded(texts())
    features = compute_features(target, ids, mask, LAYERS)
    assert features.dtype == torch.bfloat16
    for row, text in enumerate(texts()):
        expected = naive_features(target, text)
        assert (features[row, : len(text)] - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(("layer_ids", "run"), [([0], 1), ([3, 0, 4], 5), ([2, 1], 3)])
def test_the_forward_stops_after_the_last_tapped_layer(target, layer_ids, run):
    calls = []
    modules = {f"layer {i}": layer for i, layer in enumerate(decoder_layers(target))}
    modules |= {"final norm": target.model.norm, "head": target.get_output_embeddings()}
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: calls.append(name)) for name, module in modules.items()
    ]
    compute_features(target, *padded(texts()), layer_ids)
    assert calls == [f"layer {i}" for i in range(run)]
    for handle in handles:
        handle.remove()


def test_no_hook_stays_behind(target):
    ids, mask = padded(texts())
    before = target(ids, attention_mask=mask).logits
    compute_features(target, ids, mask, LAYERS)
    assert all(not layer._forward_hooks for layer in decoder_layers(target))
    assert torch.equal(target(ids, attention_mask=mask).logits, before)


def test_an_error_inside_the_target_is_not_swallowed(target):
    with pytest.raises(IndexError):
        compute_features(target, torch.tensor([[10_000]]), torch.ones(1, 1), LAYERS)
    assert all(not layer._forward_hooks for layer in decoder_layers(target))


@torch.no_grad()
def test_a_tap_around_a_whole_forward_reads_the_same(target):
    (text, *_) = texts()
    with FeatureTap(target, LAYERS) as tap:
        target(text[None])
    torch.testing.assert_close(tap.features()[0], naive_features(target, text), rtol=1e-5, atol=1e-5)


def prepared(number: int, ids: list[int]) -> PreparedSample:
    return PreparedSample(
        id=f"p{number}",
        question={"prompt": "?"},
        response="!",
        finish_reason="stop",
        source="given",
        input_ids=ids,
        response_start=len(ids) // 2,
        extra={},
    )


@pytest.mark.parametrize("batch_tokens", [1, 24, 10_000])
def test_captured_samples_do_not_depend_on_their_neighbours(target, batch_tokens):
    samples = [prepared(number, text.tolist()) for number, text in enumerate(texts())]
    found = dict(capture_samples(target, samples, LAYERS, batch_tokens))
    assert sorted(found) == [0, 1, 2, 3]
    for number, text in enumerate(texts()):
        sample = found[number]
        assert sample.sample_id == f"p{number}"
        assert sample.input_ids.tolist() == text.tolist()
        assert sample.loss_mask.tolist() == [int(i >= len(text) // 2) for i in range(len(text))]
        expected = naive_features(target, text)
        # bfloat16 keeps 8 bits.
        assert ((sample.features.float() - expected).abs() <= expected.abs() / 256 + 1e-4).all()


def random_lengths(seed):
    rng = np.random.default_rng(seed)
    return rng.integers(1, 60, int(rng.integers(1, 50))).tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("batch_tokens", [1, 30, 64, 1000])
def test_batches_hold_each_sample_once_within_the_budget(seed, batch_tokens):
    lengths = random_lengths(seed)
    batches = plan_batches(lengths, batch_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        padded_tokens = len(batch) * max(lengths[i] for i in batch)
        assert padded_tokens <= batch_tokens or len(batch) == 1
    # Alike lengths go together, so that little is padding.
    ordered = [lengths[i] for batch in batches for i in batch]
    assert ordered == sorted(lengths)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shard_tokens", [1, 40, 100, 100_000])
def test_shards_cut_the_samples_in_order_and_are_full(seed, shard_tokens):
    lengths = random_lengths(seed)
    shards = plan_shards([prepared(i, [7] * length) for i, length in enumerate(lengths)], shard_tokens)
    assert [i for shard in shards for i in shard] == list(range(len(lengths)))
    for number, shard in enumerate(shards):
        tokens = [lengths[i] for i in shard]
        assert tokens
        assert sum(tokens) >= shard_tokens or number == len(shards) - 1
        assert sum(tokens[:-1]) < shard_tokens
