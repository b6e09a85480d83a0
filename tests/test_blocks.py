"""Which anchors are drawn, and what the blocks at them ask for."""

import numpy as np
import pytest
import torch

from dflash_lightning.blocks import anchor_candidates, build_blocks, positions_in_document, sample_anchors


def draw(loss_mask, count, *, seed=0, sample_id="a", epoch=0):
    return sample_anchors(loss_mask, count, seed=seed, sample_id=sample_id, epoch=epoch).tolist()


def naive_candidates(loss_mask):
    return [a for a in range(len(loss_mask) - 1) if loss_mask[a] and loss_mask[a + 1]]


MASKS = {
    "response at the end": [0, 0, 0, 1, 1, 1, 1],
    "holes": [1, 1, 0, 1, 0, 1, 1, 1, 0],
    "single tokens only": [0, 1, 0, 1, 0],
    "everything": [1] * 9,
    "nothing": [0] * 4,
    "one token": [1],
}


@pytest.mark.parametrize("name", MASKS)
def test_candidates_are_supervised_and_followed_by_a_supervised_token(name):
    mask = np.array(MASKS[name], dtype=np.uint8)
    assert anchor_candidates(mask).tolist() == naive_candidates(MASKS[name])
    # Fewer candidates than asked for: all of them.
    assert draw(mask, 50) == naive_candidates(MASKS[name])


def test_anchors_are_drawn_uniformly_without_replacement_and_sorted():
    mask = np.array([0, 0] + [1] * 6 + [0] + [1] * 6 + [0])
    candidates = naive_candidates(mask)
    counts, draws, size = dict.fromkeys(candidates, 0), 3000, 4
    for epoch in range(draws):
        anchors = draw(mask, size, epoch=epoch)
        assert len(anchors) == size
        assert anchors == sorted(set(anchors))
        for anchor in anchors:
            counts[anchor] += 1  # KeyError: not a candidate
    expected = draws * size / len(candidates)
    # Sampling without replacement shrinks the variance by 1 - size / candidates.
    chi_square = sum((n - expected) ** 2 for n in counts.values()) / expected / (1 - size / len(candidates))
    assert chi_square < 27.9  # 0.1 % point for 9 degrees of freedom


def test_every_pair_of_anchors_is_drawn_equally_often():
    mask = np.ones(6)
    counts = {}
    for epoch in range(4000):
        pair = tuple(draw(mask, 2, epoch=epoch))
        counts[pair] = counts.get(pair, 0) + 1
    assert len(counts) == 10
    chi_square = sum((n - 400) ** 2 / 400 for n in counts.values())
    assert chi_square < 27.9


def test_the_draw_depends_on_seed_epoch_and_sample_alone():
    mask = np.ones(400)
    first = draw(mask, 20)
    np.random.seed(99)
    torch.manual_seed(99)
    assert draw(mask, 20) == first
    others = [draw(mask, 20, **change) for change in ({"seed": 1}, {"epoch": 1}, {"sample_id": "b"}, {"epoch": None})]
    others.append(first)
    assert len({tuple(other) for other in others}) == 5
    # In validation there are no epochs: nothing to redraw by, and the seed still counts.
    assert draw(mask, 20, epoch=None) == draw(mask, 20, epoch=None) != draw(mask, 20, epoch=None, seed=1)


def random_rows(seed):
    """Rows of several documents, loss masks full of holes, random anchors: any position of a document."""
    rng = np.random.default_rng(seed)
    rows, length, blocks = 4, int(rng.integers(6, 40)), int(rng.integers(1, 9))
    input_ids = rng.integers(0, 1000, (rows, length))
    loss_mask = (rng.random((rows, length)) < 0.8).astype(int)
    document_ids = np.full((rows, length), -1)
    for row in range(rows):
        end = int(rng.integers(1, length + 1)) if row else length
        document_ids[row, :end] = np.sort(rng.integers(0, 3, end))
    anchors = np.array([rng.integers(0, (document_ids[row] >= 0).sum(), blocks) for row in range(rows)])
    valid = rng.random((rows, blocks)) < 0.8
    return input_ids, loss_mask, document_ids, anchors, valid


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_blocks_equal_naive_loops(seed, block_size):
    input_ids, loss_mask, document_ids, anchors, valid = random_rows(seed)
    blocks = build_blocks(
        input_ids=torch.from_numpy(input_ids),
        loss_mask=torch.from_numpy(loss_mask),
        document_ids=torch.from_numpy(document_ids),
        anchors=torch.from_numpy(anchors),
        valid=torch.from_numpy(valid),
        block_size=block_size,
        mask_token_id=777,
    )
    assert torch.equal(blocks.valid, torch.from_numpy(valid))
    assert torch.equal(blocks.layout.anchors, torch.from_numpy(anchors))
    assert torch.equal(blocks.layout.document_ids, torch.from_numpy(document_ids))
    assert blocks.layout.block_size == block_size
    for row, block in np.ndindex(*anchors.shape):
        anchor = int(anchors[row, block])
        document = document_ids[row, anchor]
        start = document_ids[row].tolist().index(document)
        assert blocks.input_ids[row, block].tolist() == [input_ids[row, anchor]] + [777] * (block_size - 1)
        assert blocks.positions[row, block].tolist() == [anchor - start + k for k in range(block_size)]
        supervised, running = [False], True
        for k in range(1, block_size):
            index = anchor + k
            inside = index < input_ids.shape[1] and document_ids[row, index] == document
            running = running and inside and bool(loss_mask[row, index])
            supervised.append(running and bool(valid[row, block]))
            if supervised[-1]:
                assert blocks.labels[row, block, k] == input_ids[row, index]
        assert blocks.supervised[row, block].tolist() == supervised


def test_positions_restart_with_each_document():
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1], [4, 4, 4, 4, 4, 4, 4, 4], [0, 1, 0, 0, 2, 2, 2, -1]])
    assert positions_in_document(documents).tolist() == [
        [0, 1, 2, 0, 1, 0, 0, 1],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 0, 0, 1, 0, 1, 2, 0],
    ]
