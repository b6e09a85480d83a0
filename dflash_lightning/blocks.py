"""Training blocks: which anchors are drawn, what the drafter is shown, and which slots it is asked to predict."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_lightning.visibility import Layout


def anchor_candidates(loss_mask: np.ndarray) -> np.ndarray:
    """Positions [C] that may be an anchor: supervised, and followed by a supervised token to predict."""
    supervised = loss_mask.astype(bool)
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def sample_anchors(
    loss_mask: np.ndarray, num_anchors: int, *, seed: int, sample_id: str, epoch: int | None
) -> np.ndarray:
    """Draw up to ``num_anchors`` anchors of one sample, sorted, uniformly and without replacement.

    The draw depends on (seed, epoch, sample id) alone: not on rank, worker, batch or world size. In validation
    ``epoch`` is None and the draw is the same every time.

    Args:
        loss_mask: [T] 1 on supervised (response) tokens.

    Returns:
        [min(num_anchors, candidates)] int64 positions.
    """
    candidates = anchor_candidates(loss_mask)
    if len(candidates) <= num_anchors:
        return candidates
    # Two integers for the epoch, so that "validation" is no epoch's draw.
    epoch_key = [0, 0] if epoch is None else [1, epoch]
    id_key = int.from_bytes(hashlib.sha256(sample_id.encode()).digest()[:8], "little")
    generator = np.random.default_rng([seed, *epoch_key, id_key])
    return np.sort(generator.choice(candidates, size=num_anchors, replace=False))


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch: R rows, N blocks a row, B slots a block.

    Attributes:
        valid: [R, N] False for blocks that only pad the row.
        input_ids: [R, N, B] the anchor's token, then mask tokens.
        positions: [R, N, B] absolute positions within the document: anchor + slot.
        labels: [R, N, B] slot k's label is the token at anchor + k (same position, no shift).
        supervised: [R, N, B] slots with a loss: a contiguous run from slot 1; slot 0 never.
        layout: what the attention mask is made from.
    """

    valid: Tensor
    input_ids: Tensor
    positions: Tensor
    labels: Tensor
    supervised: Tensor
    layout: Layout


def positions_in_document(document_ids: Tensor) -> Tensor:
    """Positions [R, S] that restart at 0 with each document of a row."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = torch.zeros_like(index)
    starts[:, 1:] = torch.where(document_ids[:, 1:] != document_ids[:, :-1], index[:, 1:], 0)
    return index - starts.cummax(dim=1).values


def build_blocks(
    *,
    input_ids: Tensor,
    loss_mask: Tensor,
    document_ids: Tensor,
    anchors: Tensor,
    valid: Tensor,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Lay one block at each anchor.

    A label past the end of the document, or after the first unsupervised position following the anchor, has no loss.

    Args:
        input_ids, loss_mask, document_ids: [R, S] the context rows; document -1 is padding.
        anchors, valid: [R, N] drawn anchors as row indices, padded to N.
    """
    length = input_ids.shape[1]
    slots = torch.arange(block_size, device=anchors.device)
    label_index = anchors[..., None] + slots
    in_row = label_index < length
    label_index = label_index.clamp(max=length - 1)

    def at_label(values: Tensor) -> Tensor:
        return values.gather(1, label_index.flatten(1)).view(label_index.shape)

    labels = at_label(input_ids)
    anchor_documents = document_ids.gather(1, anchors)[..., None]
    predictable = in_row & at_label(loss_mask).bool() & (at_label(document_ids) == anchor_documents)
    predictable[..., 0] = True
    supervised = predictable.cumprod(dim=-1).bool() & valid[..., None]
    supervised[..., 0] = False

    block_ids = torch.full_like(labels, mask_token_id)
    block_ids[..., 0] = labels[..., 0]
    anchor_positions = positions_in_document(document_ids).gather(1, anchors)
    return Blocks(
        valid=valid,
        input_ids=block_ids,
        positions=anchor_positions[..., None] + slots,
        labels=labels,
        supervised=supervised,
        layout=Layout(anchors=anchors, document_ids=document_ids, block_size=block_size),
    )
