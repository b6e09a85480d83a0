"""Whether two texts part where the target itself can't decide: at a tie of two logits, up to rounding."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from dflash_lightning.features import input_device

# Where two texts part, the target's two logits may differ by so many units in the last place of its dtype.
TIE_UNITS = 4


def is_tie(target: PreTrainedModel, prompt_ids: Sequence[int], text: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two greedy texts part at a tie.

    A third forward, of the common prefix in one piece, gives the logits of both tokens where the texts part. They must
    be no further apart than a few roundings in the target's dtype.
    """
    parting = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), None)
    if parting is None:  # one text goes on where the other ended: no rounding explains that
        return False
    prefix = torch.tensor([[*prompt_ids, *text[:parting]]], device=input_device(target))
    with torch.inference_mode():
        logits = target(prefix, use_cache=False, logits_to_keep=1).logits[0, -1]
    first, second = logits[text[parting]].double(), logits[other[parting]].double()
    unit = torch.finfo(logits.dtype).eps * 2 ** torch.floor(torch.log2(torch.maximum(first.abs(), second.abs())))
    return bool((first - second).abs() <= TIE_UNITS * unit)
