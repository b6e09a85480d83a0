"""Acceptance without decoding: blocks laid over a text that is already there, as in training."""

from collections.abc import Sequence

import numpy as np
import torch
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import PreTrainedModel

from dflash_lightning.blocks import build_blocks, sample_anchors
from dflash_lightning.drafter import Drafter
from dflash_lightning.training.losses import score_slots
from dflash_lightning.visibility import attention_mask

TEACHER_FORCED_ANCHORS = 64


@torch.inference_mode()
def teacher_forced_lengths(
    target: PreTrainedModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    text: Sequence[int],
    features: Tensor,
    *,
    sample_id: str,
) -> tuple[int, ...]:
    """Accepted lengths of blocks laid at random anchors of a decoded text, by the training forward.

    Args:
        text: new tokens of a prompt.
        features: [L, K*H] of prompt and text, at least up to the last anchor.
        sample_id: what the anchors are drawn from.
    """
    token_ids = [*prompt_ids, *text]
    supervised = np.array([0] * len(prompt_ids) + [1] * len(text))
    anchors = sample_anchors(supervised, TEACHER_FORCED_ANCHORS, seed=0, sample_id=sample_id, epoch=None)
    if len(anchors) == 0:
        return ()
    device, length = features.device, len(features)
    rows = torch.tensor(token_ids, device=device)[None]
    blocks = build_blocks(
        input_ids=rows,
        loss_mask=torch.from_numpy(supervised).to(device)[None],
        document_ids=torch.zeros_like(rows),
        anchors=torch.from_numpy(anchors).to(device)[None],
        valid=torch.ones(1, len(anchors), dtype=torch.bool, device=device),
        block_size=drafter.config.block_size,
        mask_token_id=drafter.config.mask_token_id,
    )
    # The features of the last tokens are never computed, and never visible: no anchor comes after them.
    padded = torch.nn.functional.pad(features, (0, 0, 0, len(token_ids) - length))
    positions = torch.arange(len(token_ids), device=device)[None]
    hidden = drafter(
        target.get_input_embeddings()(blocks.input_ids.flatten(1)).to(device),
        blocks.positions.flatten(1),
        drafter.context_key_values(padded[None], positions),
        attention_mask(blocks.layout),
    )
    head = target.get_output_embeddings()
    with align_module_device(head, device):  # under a device map its weight may be kept elsewhere
        results = score_slots(hidden, head.weight, blocks)
    return tuple(results.accepted_lengths.tolist())
