"""Nothing reaches a block that it wouldn't have at decode time: the gradient is exactly zero (spec.md 5.2)."""

import pytest
import torch
from helpers import load_tiny, make_drafter

from dflash_lightning.blocks import build_blocks, positions_in_document
from dflash_lightning.training.losses import LossSettings, score_slots, weighted_loss
from dflash_lightning.visibility import attention_mask

# Row 0: one document. Row 1: two documents, then padding. Row 2: a short document, then padding.
DOCUMENTS = [[30], [11, 13], [9]]
LENGTH = 30
# (anchor in the row, valid): the last block of each row is padding.
ANCHORS = [[(4, True), (12, True), (28, True), (0, False)], [(3, True), (15, True), (20, True), (0, False)]]
ANCHORS += [[(1, True), (5, True), (7, True), (0, False)]]
BLOCKS = [(row, block) for row in range(3) for block in range(3)]


class Forward:
    """One training forward whose features and block embeddings are leaves, to ask for their gradients."""

    def __init__(self, target, drafter):
        generator = torch.Generator().manual_seed(4)
        self.document_ids = torch.full((3, LENGTH), -1)
        for row, lengths in enumerate(DOCUMENTS):
            start = 0
            for number, tokens in enumerate(lengths):
                self.document_ids[row, start : start + tokens] = number
                start += tokens
        input_ids = torch.randint(4, 260, (3, LENGTH), generator=generator)
        self.anchors = torch.tensor([[anchor for anchor, _ in row] for row in ANCHORS])
        blocks = build_blocks(
            input_ids=input_ids,
            loss_mask=(self.document_ids >= 0).long(),
            document_ids=self.document_ids,
            anchors=self.anchors,
            valid=torch.tensor([[valid for _, valid in row] for row in ANCHORS]),
            block_size=drafter.config.block_size,
            mask_token_id=drafter.config.mask_token_id,
        )
        self.features = torch.randn(3, LENGTH, drafter.config.feature_size, generator=generator).requires_grad_()
        self.embeddings = target.get_input_embeddings()(blocks.input_ids.flatten(1)).detach().requires_grad_()
        hidden = drafter(
            self.embeddings,
            blocks.positions.flatten(1),
            drafter.context_key_values(self.features, positions_in_document(self.document_ids)),
            attention_mask(blocks.layout),
        )
        self.results = score_slots(hidden, target.get_output_embeddings().weight, blocks)

    def gradients(self, row: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one block's loss, to every feature [R, S] and every slot's embedding [R, N, B] (largest magnitude)."""
        loss = self.results.entropy[row, block].sum()
        features, embeddings = torch.autograd.grad(loss, (self.features, self.embeddings), retain_graph=True)
        slots = embeddings.unflatten(1, (self.anchors.shape[1], -1))
        return features.abs().amax(dim=-1), slots.abs().amax(dim=-1)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def forward(request) -> Forward:
    target = load_tiny(request.getfixturevalue(f"{request.param}_folder"))
    return Forward(target, make_drafter(target, scale=3.0))


@pytest.mark.parametrize(("row", "block"), BLOCKS)
def test_a_block_depends_on_what_is_before_its_anchor_and_on_itself_alone(forward, row, block):
    features, slots = forward.gradients(row, block)
    anchor = int(forward.anchors[row, block])
    seen = torch.zeros(3, LENGTH, dtype=torch.bool)
    for position in range(anchor):
        same_document = forward.document_ids[row, position] == forward.document_ids[row, anchor]
        seen[row, position] = same_document
    assert seen.any()
    assert (features[~seen] == 0).all()
    assert (features[seen] > 0).all()
    own = torch.zeros_like(slots, dtype=torch.bool)
    own[row, block] = True
    assert (slots[~own] == 0).all()
    assert (slots[own] > 0).all()


def test_padded_blocks_have_no_loss(forward):
    assert (forward.results.entropy[:, 3] == 0).all()
    features, slots = forward.gradients(0, 3)
    assert (features == 0).all()
    assert (slots == 0).all()


def module_loss(target, drafter, samples, length, num_blocks):
    """Loss and accepted lengths of samples (ids, features, anchors) in one batch, padded to ``length`` and
    ``num_blocks`` with junk."""
    generator = torch.Generator().manual_seed(length)
    rows = len(samples)
    input_ids = torch.randint(4, 260, (rows, length), generator=generator)
    features = torch.randn(rows, length, drafter.config.feature_size, generator=generator)
    loss_mask, document_ids = torch.zeros_like(input_ids), torch.full_like(input_ids, -1)
    anchors, valid = torch.zeros(rows, num_blocks, dtype=torch.long), torch.zeros(rows, num_blocks, dtype=torch.bool)
    for row, (ids, values, places) in enumerate(samples):
        tokens = len(ids)
        input_ids[row, :tokens], features[row, :tokens] = ids, values
        loss_mask[row, 2:tokens], document_ids[row, :tokens] = 1, 0
        anchors[row, : len(places)], valid[row, : len(places)] = torch.tensor(places), True
    blocks = build_blocks(
        input_ids=input_ids,
        loss_mask=loss_mask,
        document_ids=document_ids,
        anchors=anchors,
        valid=valid,
        block_size=drafter.config.block_size,
        mask_token_id=drafter.config.mask_token_id,
    )
    hidden = drafter(
        target.get_input_embeddings()(blocks.input_ids.flatten(1)),
        blocks.positions.flatten(1),
        drafter.context_key_values(features, positions_in_document(document_ids)),
        attention_mask(blocks.layout),
    )
    results = score_slots(hidden, target.get_output_embeddings().weight, blocks)
    gradient = torch.autograd.grad(weighted_loss(results, LossSettings()), list(drafter.parameters()))
    return results, gradient


def test_a_sample_gives_the_same_result_in_any_batch_and_padding(qwen3_folder):
    target = load_tiny(qwen3_folder)
    drafter = make_drafter(target, scale=3.0)
    generator = torch.Generator().manual_seed(5)

    def sample(tokens, places):
        features = torch.randn(tokens, drafter.config.feature_size, generator=generator)
        return torch.randint(4, 260, (tokens,), generator=generator), features, places

    samples = [sample(17, [2, 6, 14]), sample(29, [3]), sample(8, [2, 5, 6])]
    together, gradient = module_loss(target, drafter, samples, length=37, num_blocks=5)
    total = [torch.zeros_like(p) for p in drafter.parameters()]
    for row, one in enumerate(samples):
        alone, part = module_loss(target, drafter, [one], length=len(one[0]), num_blocks=len(one[2]))
        count = len(one[2])
        torch.testing.assert_close(alone.entropy[0], together.entropy[row, :count], rtol=1e-5, atol=1e-5)
        assert torch.equal(alone.correct[0], together.correct[row, :count])
        total = [a + b for a, b in zip(total, part, strict=True)]
    for whole, parts in zip(gradient, total, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
