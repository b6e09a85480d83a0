"""Small builders that several test files share."""

import torch
from transformers import AutoModelForCausalLM

from dflash_lightning.config import DrafterConfig, DrafterSettings
from dflash_lightning.drafter import Drafter

MASK_TOKEN_ID = 3


def load_tiny(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().requires_grad_(False)


def make_drafter(target, *, seed=0, scale=1.0, **settings) -> Drafter:
    """A random drafter for ``target``; ``scale`` multiplies the weights so that its logits aren't all alike."""
    settings = {"num_layers": 2, "block_size": 4, "target_layer_ids": [1, 3], **settings}
    config = DrafterConfig.from_target(DrafterSettings(**settings), target.config, mask_token_id=MASK_TOKEN_ID)
    torch.manual_seed(seed)
    drafter = Drafter(config).eval()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(scale)
    return drafter


def random_rows(rows=3, length=23, vocab=272, seed=0):
    """input_ids, loss_mask, document_ids [rows, length]: prompts and responses, the last rows padded."""
    g = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(4, vocab, (rows, length), generator=g)
    loss_mask = torch.zeros(rows, length, dtype=torch.long)
    document_ids = torch.zeros(rows, length, dtype=torch.long)
    for r in range(rows):
        end = length - 3 * r
        loss_mask[r, 5:end] = 1
        document_ids[r, end:] = -1
    return input_ids, loss_mask, document_ids
