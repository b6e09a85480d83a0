"""All weights of a drafter in training, out of it and into it, though ZeRO-3 shards them over ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dflash_lightning.drafter import Drafter


def gather_drafter(drafter: Drafter) -> Drafter:
    """The drafter itself; where ZeRO-3 has sharded its weights, a copy that holds all of them.

    Under ZeRO-3 this is a collective, for all ranks together. Using the copy is none, and draws on no random numbers.
    """
    sharded = _sharded(drafter)
    if not sharded:
        return drafter
    import deepspeed  # here, because DeepSpeed takes seconds to import

    with torch.inference_mode(False), torch.no_grad(), deepspeed.zero.GatheredParameters(sharded):
        weights = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    with torch.device("meta"):
        copy = Drafter(drafter.config)
    copy.rotary = drafter.rotary
    copy.load_state_dict(weights, assign=True)
    return copy.eval().requires_grad_(False)


def load_weights(drafter: Drafter, weights: Mapping[str, Tensor]) -> None:
    """Give a drafter in training these weights, named as in `Drafter`; under ZeRO-3 each rank keeps its part of them.

    Under ZeRO-3 this is a collective, and rank 0's ``weights`` are taken.
    """
    sharded = _sharded(drafter)
    if not sharded:
        drafter.load_state_dict(weights)
        return
    import deepspeed  # here, because DeepSpeed takes seconds to import

    with deepspeed.zero.GatheredParameters(sharded, modifier_rank=0):
        drafter.load_state_dict(weights)


def _sharded(drafter: Drafter) -> list[torch.nn.Parameter]:
    return [parameter for parameter in drafter.parameters() if hasattr(parameter, "ds_id")]
