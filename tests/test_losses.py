"""The loss and its metrics against naive loops straight from spec.md section 3."""

import math

import pytest
import torch
from helpers import load_tiny, make_drafter

from dflash_lightning.blocks import build_blocks, positions_in_document
from dflash_lightning.errors import ConfigError
from dflash_lightning.training import losses
from dflash_lightning.training.losses import (
    LossSettings,
    SlotResults,
    linear_cross_entropy,
    score_slots,
    slot_weights,
    weighted_loss,
)
from dflash_lightning.training.metrics import BlockMetrics
from dflash_lightning.visibility import attention_mask


@pytest.mark.parametrize("chunk", [(1, 1), (3, 37), (5, 8), (64, 7), (2048, 4096)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_chunked_cross_entropy_equals_naive_in_float64(monkeypatch, chunk, dtype, tolerance):
    for name, value in zip(("CHUNK_SLOTS", "CHUNK_VOCABULARY"), chunk, strict=True):
        monkeypatch.setattr(losses, name, value)
    generator = torch.Generator().manual_seed(0)
    # Large logits, where a naive softmax in float32 would overflow.
    hidden = 10 * torch.randn(13, 8, generator=generator, dtype=torch.float64)
    head = 4 * torch.randn(37, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 37, (13,), generator=generator)
    weights = torch.randn(13, generator=generator, dtype=torch.float64)

    naive_hidden = hidden.to(dtype).double().requires_grad_()
    logits = naive_hidden @ head.to(dtype).double().T
    entropies = [-(row - row.logsumexp(0))[label] for row, label in zip(logits, labels, strict=True)]
    sum(w * e for w, e in zip(weights, entropies, strict=True)).backward()

    tested = hidden.to(dtype).requires_grad_()
    entropy, correct = linear_cross_entropy(tested, head.to(dtype), labels)
    (entropy * weights.to(dtype)).sum().backward()
    scale = logits.abs().max().item()
    assert entropy.dtype == dtype
    torch.testing.assert_close(entropy.double(), torch.stack(entropies), rtol=tolerance, atol=tolerance * scale)
    torch.testing.assert_close(tested.grad.double(), naive_hidden.grad, rtol=tolerance, atol=tolerance * scale)
    assert correct.tolist() == [int(row.argmax()) == int(label) for row, label in zip(logits, labels, strict=True)]


@pytest.mark.parametrize("chunk_vocabulary", [8, 12, 4096])
def test_of_equally_likely_tokens_the_first_counts_as_the_most_likely(monkeypatch, chunk_vocabulary):
    monkeypatch.setattr(losses, "CHUNK_VOCABULARY", chunk_vocabulary)
    head = torch.randn(20, 8, generator=torch.Generator().manual_seed(2))
    head[[5, 6, 13, 17]] = 3 * head[5]
    hidden = head[5].expand(4, 8)
    _, correct = linear_cross_entropy(hidden, head, torch.tensor([5, 6, 13, 17]))
    assert correct.tolist() == [True, False, False, False]


def test_bfloat16_cross_entropy_is_computed_in_float32():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, 8, generator=generator).bfloat16().requires_grad_()
    head, labels = torch.randn(50, 8, generator=generator).bfloat16(), torch.randint(0, 50, (9,), generator=generator)
    entropy, _ = linear_cross_entropy(hidden, head, labels)
    assert entropy.dtype == torch.float32
    # The logits themselves are rounded to bfloat16 by the matmul, nothing after them is.
    logits = (hidden @ head.T).double()
    naive = torch.stack([row.logsumexp(0) - row[label] for row, label in zip(logits, labels, strict=True)])
    torch.testing.assert_close(entropy.double(), naive, rtol=1e-5, atol=1e-5)
    entropy.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16
    exact = (logits.softmax(-1) - torch.nn.functional.one_hot(labels, 50)) @ head.double()
    assert (hidden.grad.double() - exact).norm() < 1e-2 * exact.norm()


def make_results(seed=0, shape=(2, 5, 6), prefixes=None) -> SlotResults:
    """Random cross entropies; supervised prefixes of every length, the last block of each row padding."""
    generator = torch.Generator().manual_seed(seed)
    entropy = 4 * torch.rand(shape, generator=generator, dtype=torch.float64)
    correct = torch.rand(shape, generator=generator) < 0.7
    lengths = torch.randint(0, shape[2], shape[:2], generator=generator) if prefixes is None else prefixes
    lengths[:, 0] = shape[2] - 1
    valid = torch.ones(shape[:2], dtype=torch.bool)
    valid[:, -1] = False
    slots = torch.arange(shape[2])
    supervised = (slots >= 1) & (slots <= lengths[..., None]) & valid[..., None]
    return SlotResults(entropy * supervised, correct & supervised, supervised, valid)


def blocks_of(results: SlotResults):
    """Each block's supervised (slot, cross entropy) pairs."""
    rows, blocks, size = results.entropy.shape
    for row in range(rows):
        for block in range(blocks):
            yield [(k, results.entropy[row, block, k].item()) for k in range(size) if results.supervised[row, block, k]]


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_default_gamma_is_the_papers(block_size, gamma):
    assert LossSettings().resolve_gamma(block_size) == gamma
    assert LossSettings(gamma=3.0).resolve_gamma(block_size) == 3.0


def test_gamma_between_the_papers_sizes_is_in_proportion():
    assert LossSettings().resolve_gamma(32) == 14.0
    assert LossSettings().resolve_gamma(4) == 1.75


@pytest.mark.parametrize("gamma", [None, 2.0])
def test_decay_equals_naive(gamma):
    results = make_results(shape=(2, 5, 8))
    size = 8
    weights = {k: math.exp(-(k - 1) / (gamma or 4.0)) for k in range(1, size)}
    naive = sum(weights[k] * entropy for block in blocks_of(results) for k, entropy in block) / sum(weights.values())
    assert weighted_loss(results, LossSettings(gamma=gamma)).item() == pytest.approx(naive, rel=1e-12)


def test_uniform_equals_naive():
    results = make_results(seed=1)
    naive = sum(entropy for block in blocks_of(results) for _, entropy in block) / 5
    assert weighted_loss(results, LossSettings("uniform")).item() == pytest.approx(naive, rel=1e-12)


def naive_dpace(block, alpha):
    """w_j = sum over m >= j of prod over i <= m of q~_i, over the supervised slots."""
    smoothed = [(1 - alpha) * math.exp(-entropy) + alpha for _, entropy in block]
    total = 0.0
    for j in range(len(block)):
        weight = sum(math.prod(smoothed[: m + 1]) for m in range(j, len(block)))
        total += weight * block[j][1]
    return total


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 1.0])
def test_dpace_equals_naive(alpha):
    results = make_results(seed=2, shape=(3, 7, 6))
    naive = sum(naive_dpace(block, alpha) for block in blocks_of(results))
    assert weighted_loss(results, LossSettings("dpace", alpha=alpha)).item() == pytest.approx(naive, rel=1e-12)


@pytest.mark.parametrize("weighting", ["decay", "dpace", "uniform"])
def test_weights_are_constants_for_the_gradient(weighting):
    results = make_results(seed=3)
    leaf = results.entropy.clone().requires_grad_()
    results = SlotResults(leaf, results.correct, results.supervised, results.valid)
    settings = LossSettings(weighting)
    weighted_loss(results, settings).backward()
    weights = slot_weights(results, settings)
    assert not weights.requires_grad
    assert torch.equal(leaf.grad, weights)
    assert (weights[~results.supervised] == 0).all()
    assert (weights[results.supervised] > 0).all()


@pytest.mark.parametrize("settings", [{"gamma": 0.0}, {"gamma": -1.0}, {"alpha": 1.5}, {"alpha": -0.1}])
def test_settings_out_of_range_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        LossSettings(**settings)


@pytest.mark.parametrize("weighting", ["decay", "dpace", "uniform"])
def test_without_any_anchor_every_parameter_gets_a_zero_gradient(llama_folder, weighting):
    target = load_tiny(llama_folder)
    drafter = make_drafter(target)
    input_ids, documents = torch.full((2, 9), 5), torch.zeros(2, 9, dtype=torch.long)
    blocks = build_blocks(
        input_ids=input_ids,
        loss_mask=torch.ones_like(input_ids),
        document_ids=documents,
        anchors=torch.zeros(2, 3, dtype=torch.long),
        valid=torch.zeros(2, 3, dtype=torch.bool),
        block_size=4,
        mask_token_id=3,
    )
    hidden = drafter(
        target.get_input_embeddings()(blocks.input_ids.flatten(1)),
        blocks.positions.flatten(1),
        drafter.context_key_values(torch.randn(2, 9, 64), positions_in_document(documents)),
        attention_mask(blocks.layout),
    )
    results = score_slots(hidden, target.get_output_embeddings().weight, blocks)
    loss = weighted_loss(results, LossSettings(weighting))
    loss.backward()
    assert loss.item() == 0.0
    assert {name for name, p in drafter.named_parameters() if p.grad is None} == set()
    assert all((p.grad == 0).all() for p in drafter.parameters())


def test_results_stand_in_the_slots_they_belong_to(llama_folder):
    head = load_tiny(llama_folder).get_output_embeddings().weight
    generator = torch.Generator().manual_seed(6)
    input_ids = torch.randint(4, 260, (2, 12), generator=generator)
    blocks = build_blocks(
        input_ids=input_ids,
        loss_mask=torch.ones_like(input_ids),
        document_ids=torch.zeros_like(input_ids),
        anchors=torch.tensor([[1, 6, 10], [0, 9, 0]]),
        valid=torch.tensor([[True] * 3, [True, True, False]]),
        block_size=4,
        mask_token_id=3,
    )
    hidden = torch.randn(2, 12, 32, generator=generator)
    # The drafter is right about slot 1 of the first block and slot 2 of the second.
    hidden[0, 1], hidden[0, 4 + 2] = 50 * head[input_ids[0, 2]], 50 * head[input_ids[0, 8]]
    results = score_slots(hidden, head, blocks)
    for row in range(2):
        for block in range(3):
            anchor = int(blocks.layout.anchors[row, block])
            for k in range(4):
                scored = k > 0 and anchor + k < 12 and bool(blocks.valid[row, block])
                logits = hidden[row, 4 * block + k].double() @ head.double().T
                label = int(input_ids[row, anchor + k]) if scored else 0
                naive = float(logits.logsumexp(0) - logits[label]) if scored else 0.0
                assert results.entropy[row, block, k].item() == pytest.approx(naive, rel=1e-4, abs=1e-4)
                assert results.correct[row, block, k].item() == (scored and int(logits.argmax()) == label)
    assert results.correct[0, 0, 1]
    assert results.correct[0, 1, 2]


def naive_metrics(batches, block_size):
    loss_sum, entropy_sum, blocks, accepted = 0.0, 0.0, 0, 0
    hits, seen = [0] * block_size, [0] * block_size
    for results, loss in batches:
        loss_sum += float(loss)
        for row in range(results.valid.shape[0]):
            for block in range(results.valid.shape[1]):
                if not results.valid[row, block]:
                    continue
                blocks += 1
                accepted += 1
                leading = True
                for k in range(1, block_size):
                    supervised = bool(results.supervised[row, block, k])
                    right = supervised and bool(results.correct[row, block, k])
                    seen[k] += supervised
                    entropy_sum += supervised * float(results.entropy[row, block, k])
                    hits[k] += right
                    leading = leading and right
                    accepted += leading
    values = {
        "loss": loss_sum / blocks,
        "cross_entropy": entropy_sum / sum(seen),
        "teacher_forced_tau": accepted / blocks,
        "accuracy": sum(hits) / sum(seen),
    }
    return values | {f"accuracy_slot_{k}": hits[k] / seen[k] for k in range(1, block_size)}


def test_metrics_equal_naive_counts_over_several_updates():
    batches = [(make_results(seed=seed, shape=(2, 4 + seed, 6)), torch.tensor(1.5 + seed)) for seed in range(3)]
    metrics = BlockMetrics(6)
    for results, loss in batches:
        metrics.update(results, loss)
    found = {name: value.item() for name, value in metrics.compute().items()}
    assert found == pytest.approx(naive_metrics(batches, 6), rel=1e-6)
    metrics.reset()
    metrics.update(*batches[1])
    found = {name: value.item() for name, value in metrics.compute().items()}
    assert found == pytest.approx(naive_metrics(batches[1:2], 6), rel=1e-6)


def test_a_block_cut_short_is_accepted_up_to_its_end_only():
    results = make_results(shape=(1, 3, 6), prefixes=torch.tensor([[5, 2, 5]]))
    everything_right = SlotResults(results.entropy, results.supervised, results.supervised, results.valid)
    assert everything_right.accepted_lengths.tolist() == [6, 3]


def test_metrics_of_nothing_are_nan():
    results = make_results(shape=(1, 2, 4))
    nothing = SlotResults(
        torch.zeros_like(results.entropy),
        torch.zeros_like(results.correct),
        torch.zeros_like(results.supervised),
        torch.zeros_like(results.valid),
    )
    metrics = BlockMetrics(4)
    metrics.update(nothing, torch.tensor(0.0))
    assert all(math.isnan(value) for value in metrics.compute().values())
