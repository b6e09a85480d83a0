"""One sample of the cache, and what makes it fit to be stored."""

from dataclasses import dataclass

import numpy as np
import torch

from dflash_lightning.errors import CacheError

# The bits of infinity; without the sign bit, those of every NaN are larger, those of every finite value smaller.
# (torch.isfinite takes longer on bfloat16 than it takes to compress the same values.)
BFLOAT16_INFINITY = 0x7F80


@dataclass(eq=False)
class Sample:
    """One conversation of T tokens with the target's hidden states.

    Attributes:
        sample_id: unique within the data set; it also keys the random draws of training.
        input_ids: [T] int32.
        loss_mask: [T] uint8, 1 where the token is supervised (the response), 0 elsewhere.
        features: [T, K*H] torch.bfloat16 on the CPU: the outputs of the tapped layers, concatenated in the manifest's
            order.
    """

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    features: torch.Tensor


class SampleError(CacheError):
    """A sample that can't be stored: names the sample and the reason, so that a caller may set it aside.

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


def check_sample(sample: Sample, target_layer_ids: tuple[int, ...], hidden_size: int) -> None:
    """Raise SampleError unless the sample has the types, shapes and values that the format promises to readers."""

    def require(condition: bool, reason: str) -> None:
        if not condition:
            raise SampleError(sample.sample_id, reason)

    ids, mask, features = sample.input_ids, sample.loss_mask, sample.features
    width = len(target_layer_ids) * hidden_size
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
        f"features have shape {list(features.shape)}; expected [{len(ids)}, {width}] "
        f"({len(target_layer_ids)} layers x {hidden_size})",
    )
    require(bool((ids >= 0).all()), "input_ids has a negative id")
    require(bool((mask <= 1).all()), "loss_mask has a value other than 0 and 1")
    require(
        count_anchor_candidates(mask) > 0,
        "no place for a training block: it needs at least two supervised tokens in a row "
        f"({int(mask.sum())} of {len(mask)} tokens are supervised)",
    )
    magnitudes = feature_bits(features) & 0x7FFF
    if magnitudes.max() >= BFLOAT16_INFINITY:
        spoiled = np.argwhere(magnitudes >= BFLOAT16_INFINITY)
        token, column = spoiled[0]
        layer = target_layer_ids[column // hidden_size]
        require(False, f"{len(spoiled)} features are NaN or infinite, first at token {token}, layer {layer}")


def feature_bits(features: torch.Tensor) -> np.ndarray:
    """The bfloat16 tensor as uint16, bit for bit, without a copy."""
    return features.detach().view(torch.uint16).numpy()
