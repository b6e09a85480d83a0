"""One sample of the cache, and what makes it fit to be stored."""

from dataclasses import dataclass

import numpy as np
import torch

from dflash_lightning.cache.packing import PackedFeatures
from dflash_lightning.errors import CacheError

# The bits of infinity; without the sign bit, those of every NaN are larger, those of every finite value smaller.
# (torch.isfinite takes longer on bfloat16 than it takes to compress the same values.)
BFLOAT16_INFINITY = 0x7F80


@dataclass(eq=False, slots=True)
class Sample:
    """One conversation of T tokens with the target's hidden states.

    Attributes:
        sample_id: unique within the data set; it also keys the random draws of training.
        input_ids: [T] int32.
        loss_mask: [T] uint8, 1 where the token is supervised (the response), 0 elsewhere.
        features: [T, K*H] torch.bfloat16 on the CPU: the outputs of the tapped layers, concatenated in the manifest's
            order. Read from a packed cache: T packed rows.
    """

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    features: torch.Tensor | PackedFeatures


@dataclass(frozen=True)
class Quarantined:
    """A planned sample that can't be stored, and why not."""

    sample_id: str
    reason: str

    def __str__(self) -> str:
        return f"sample {self.sample_id!r}: {self.reason}"


class SampleError(CacheError):
    """A sample that can't be stored: names the sample and the reason.

    Attributes:
        sample_id: which sample.
        reason: what is wrong with it.
    """

    def __init__(self, sample_id: str, reason: str):
        super().__init__(sample_id, reason)
        self.sample_id = sample_id
        self.reason = reason

    def __str__(self) -> str:
        return f"sample {self.sample_id!r}: {self.reason}"


def count_anchor_candidates(loss_mask: np.ndarray) -> int:
    """Number of positions a at which a training block may start: a and a + 1 are both supervised.

    Args:
        loss_mask: [T], nonzero where the token is supervised.
    """
    supervised = np.asarray(loss_mask) != 0
    return int(np.count_nonzero(supervised[:-1] & supervised[1:]))


def storable(sample: Sample, target_layer_ids: tuple[int, ...], hidden_size: int) -> Sample:
    """The part of a sample that training can use, checked: it ends with the last supervised token.

    No later token is a label, and no block can start after it.

    Args:
        sample: as the producer made it.
        target_layer_ids: the K tapped layers.
        hidden_size: H of the target.

    Returns:
        The sample, cut after its last supervised token; its arrays are views.

    Raises:
        SampleError: wrong types or lengths, no place for a training block, features that are NaN or infinite, or a
            tapped layer that is constant (over the tokens, or over the channels of a token), as it is when a layer
            didn't run.
    """
    _check_form(sample, len(target_layer_ids), hidden_size)
    supervised = np.flatnonzero(sample.loss_mask)
    end = int(supervised[-1]) + 1 if len(supervised) else 0
    part = Sample(sample.sample_id, sample.input_ids[:end], sample.loss_mask[:end], sample.features[:end])
    if count_anchor_candidates(part.loss_mask) == 0:
        raise SampleError(
            sample.sample_id,
            "no place for a training block: it needs at least two supervised tokens in a row "
            f"({len(supervised)} of {len(sample.loss_mask)} tokens are supervised)",
        )
    _check_values(part, target_layer_ids)
    return part


def _check_form(sample: Sample, num_layers: int, hidden_size: int) -> None:
    def require(condition: bool, reason: str) -> None:
        if not condition:
            raise SampleError(sample.sample_id, reason)

    ids, mask, features = sample.input_ids, sample.loss_mask, sample.features
    width = num_layers * hidden_size
    require(bool(sample.sample_id), "its id is empty")
    require(ids.dtype == np.int32, f"input_ids must be int32, not {ids.dtype}")
    require(mask.dtype == np.uint8, f"loss_mask must be uint8, not {mask.dtype}")
    require(features.dtype == torch.bfloat16, f"features must be torch.bfloat16, not {features.dtype}")
    require(
        ids.shape == mask.shape == tuple(features.shape[:1]),
        f"lengths differ: input_ids {list(ids.shape)}, loss_mask {list(mask.shape)}, features {list(features.shape)}",
    )
    require(
        features.shape[1:] == (width,),
        f"features have shape {list(features.shape)}; expected [{len(ids)}, {width}] ({num_layers} layers x "
        f"{hidden_size})",
    )
    require(bool((ids >= 0).all()), "input_ids has a negative id")
    require(bool((mask <= 1).all()), "loss_mask has a value other than 0 and 1")


def _check_values(sample: Sample, target_layer_ids: tuple[int, ...]) -> None:
    tokens, width = sample.features.shape
    hidden_size = width // len(target_layer_ids)
    magnitudes = feature_bits(sample.features) & 0x7FFF
    if magnitudes.max() >= BFLOAT16_INFINITY:
        spoiled = np.argwhere(magnitudes >= BFLOAT16_INFINITY)
        token, column = spoiled[0]
        raise SampleError(
            sample.sample_id,
            f"{len(spoiled)} features are NaN or infinite, first at token {token}, layer "
            f"{target_layer_ids[column // hidden_size]}",
        )
    states = sample.features.view(tokens, len(target_layer_ids), hidden_size)
    # Only layers and tokens whose first two values are equal are looked at as a whole.
    for k in torch.nonzero((states[0] == states[1]).all(dim=1)).flatten().tolist():
        if bool((states[:, k] == states[0, k]).all()):
            raise SampleError(sample.sample_id, f"layer {target_layer_ids[k]} is the same at all {tokens} tokens")
    if hidden_size > 1:
        for token, k in torch.nonzero(states[:, :, 0] == states[:, :, 1]).tolist():
            if bool((states[token, k] == states[token, k, 0]).all()):
                raise SampleError(
                    sample.sample_id,
                    f"layer {target_layer_ids[k]} is constant at token {token}: all {hidden_size} values are "
                    f"{states[token, k, 0].item():g}",
                )


def feature_bits(features: torch.Tensor) -> np.ndarray:
    """The bfloat16 tensor as uint16, bit for bit, without a copy."""
    return features.detach().view(torch.uint16).numpy()
