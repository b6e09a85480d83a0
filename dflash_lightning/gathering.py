"""A drafter in training with all of its weights on this rank."""

import torch

from dflash_lightning.drafter import Drafter


def gather_drafter(drafter: Drafter) -> Drafter:
    """The drafter itself; where ZeRO-3 has sharded its weights, a copy that holds all of them.

    Under ZeRO-3 this is a collective, for all ranks together. Using the copy is none, and draws on no random numbers.
    """
    parameters = dict(drafter.named_parameters())
    sharded = [parameter for parameter in parameters.values() if hasattr(parameter, "ds_id")]
    if not sharded:
        return drafter
    import deepspeed  # here, because DeepSpeed takes seconds to import

    with torch.inference_mode(False), torch.no_grad(), deepspeed.zero.GatheredParameters(sharded):
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.device("meta"):
        copy = Drafter(drafter.config)
    copy.rotary = drafter.rotary
    copy.load_state_dict(weights, assign=True)
    return copy.eval().requires_grad_(False)
