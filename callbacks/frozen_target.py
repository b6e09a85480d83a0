"""Where the frozen target of the validations lies while the drafter trains."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_lightning.target import Placement, load_placed_target, load_target, target_text_config

Residence = Literal["device", "host", "device_map"]


class FrozenTarget:
    """A target that is at hand when asked for, and else lies where it doesn't stand in the way of training.

    - ``device``: always on the device that trains. Costs its memory, and no time.
    - ``host``: in this process's memory, copied to the device for as long as it is used.
    - ``device_map``: spread over GPUs, memory and disk of the node, as ``device_map="auto"`` and ``max_memory`` say.
    """

    def __init__(
        self,
        name: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        residence: Residence,
        max_memory: dict[int | str, str] | None = None,
    ):
        """
        Args:
            name: folder, hub name or .gguf file.
            dtype: data type of the weights.
            device: the device that trains.
            residence: where it lies, see above.
            max_memory: as in `Placement`; for ``device_map`` only.

        Raises:
            ConfigError, TargetError: it can't be loaded or placed so.
        """
        self._device, self._moves = device, residence == "host"
        if residence == "device_map":
            placement = Placement(device_map="auto", max_memory=max_memory)
            placement.check(name, target_text_config(name), local_rank=0)
            self._model = load_placed_target(name, dtype=dtype, placement=placement)
        else:
            self._model = load_target(name, dtype=dtype, device="cpu" if self._moves else device)

    @contextmanager
    def at_hand(self) -> Iterator[PreTrainedModel]:
        """The target, ready to compute; afterwards the device's memory is free again."""
        if not self._moves:
            yield self._model
            return
        on_host = [
            (module, name, tensor)
            for module in self._model.modules()
            for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        ]
        copies: dict[Tensor, Tensor] = {}  # a tied weight is copied once
        try:
            for module, name, tensor in on_host:
                if tensor not in copies:
                    copy = tensor.to(self._device)
                    is_weight = isinstance(tensor, nn.Parameter)
                    copies[tensor] = nn.Parameter(copy, requires_grad=False) if is_weight else copy
                setattr(module, name, copies[tensor])
            yield self._model
        finally:
            for module, name, tensor in on_host:
                setattr(module, name, tensor)
            copies.clear()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
