"""Context features: the outputs of the target's tapped decoder layers."""

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, in order."""
    return target.get_decoder().layers


def input_device(target: PreTrainedModel) -> torch.device:
    """Where the target's inputs may lie.

    Weights that a device map keeps elsewhere have the device "meta"; accelerate then moves inputs and outputs itself.
    """
    return torch.device("cpu") if target.device.type == "meta" else target.device


class FeatureTap:
    """Reads the outputs of chosen decoder layers during a forward of the target.

    Hooks rather than ``output_hidden_states``: the latter keeps every layer, and its last entry is post-norm.

    Usage::

        with FeatureTap(target, layer_ids) as tap:
            target(input_ids)
        features = tap.features()  # [R, S, K*H], concatenated in the order of layer_ids
    """

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int]):
        self._layers = [decoder_layers(target)[i] for i in layer_ids]
        self._outputs: list[Tensor | None] = [None] * len(self._layers)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def _keep(self, slot: int):
        def hook(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> None:
            self._outputs[slot] = output[0] if isinstance(output, tuple) else output

        return hook

    def __enter__(self) -> "FeatureTap":
        self._handles = [layer.register_forward_hook(self._keep(i)) for i, layer in enumerate(self._layers)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def features(self) -> Tensor:
        """Features [R, S, K*H] of the last forward, on one device even if the layers lie on several."""
        return torch.cat([output.to(self._outputs[0].device) for output in self._outputs], dim=-1)


class _EnoughLayers(Exception):
    """Ends a forward once the last tapped layer has run."""


@torch.inference_mode()
def compute_features(
    target: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, layer_ids: Sequence[int]
) -> Tensor:
    """Features [R, S, K*H] of right-padded rows, in the target's dtype.

    The forward stops after the last tapped layer: no later layer, no final norm, no LM head. Rows of padding hold
    whatever the target makes of padding; the caller cuts each row to its length.

    Args:
        target: a whole model, or its first layers; placed anyhow.
        input_ids: [R, S], padded on the right; on any device.
        attention_mask: [R, S] 1 on tokens, 0 on padding.
        layer_ids: 0-based decoder layers.
    """

    def stop(*_: object) -> None:
        raise _EnoughLayers

    input_ids, attention_mask = input_ids.to(input_device(target)), attention_mask.to(input_device(target))
    with FeatureTap(target, layer_ids) as tap:
        last = decoder_layers(target)[max(layer_ids)].register_forward_hook(stop)
        try:
            target.get_decoder()(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        except _EnoughLayers:
            pass
        finally:
            last.remove()
    return tap.features()
