"""Packed features: 8, 4, 2 or 1 bits a value in the place of bfloat16's 16.

Each channel is first brought to mean 0 and size 1. Groups of 64 channels are then turned by a Hadamard matrix, which
spreads a single huge value (the first token's massive activations) over its group and makes the values of a group look
normally distributed. They are divided by the group's root mean square, kept as one byte, and rounded to the levels that
lose least on a normal distribution (Lloyd-Max). A value takes its bits plus 1/8 for the group's scale.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

GROUP = 64
# A scale of s stands for 2 ** ((s - 128) / 8): steps of 9 %.
SCALE_STEPS = 8
SCALE_ZERO = 128
# Channels are measured on so many tokens, evenly spaced.
FITTED_TOKENS = 4096
# Tokens whose values in some layer are larger than usual by this factor don't count in that: one of them would
# make its channels look large for all the others.
MASSIVE = 4.0
PACKED_AT_ONCE = 1024


@dataclass(frozen=True)
class PackedFeatures:
    """Features [T, F] in few bits.

    Attributes:
        rows: [T, `packed_width`] uint8. A row holds the codes of all groups, the first value of a byte in its lowest
            bits, and then the scale of each group, never 0.
        channels: [2, F] float32, mean and size of each channel.
    """

    rows: Tensor
    channels: Tensor


def packed_width(width: int, bits: int) -> int:
    """Bytes of a row of ``width`` values: whole groups of 64 (the last one filled up), and a scale for each."""
    return _num_groups(width) * (GROUP * bits // 8 + 1)


def _num_groups(width: int) -> int:
    return -(-width // GROUP)


@cache
def normal_levels(bits: int) -> Tensor:
    """The 2 ** bits values, ascending, that represent a standard normal variable with the least mean square error.

    Found by Lloyd's iteration: each level moves to the mean of the values nearest to it.
    """
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
    places = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    levels = 3**0.5 * normal.icdf(places)  # the optimum for many levels; a start for few
    edge = torch.tensor([torch.inf], dtype=torch.float64)
    for _ in range(2000):
        bounds = torch.cat((-edge, (levels[1:] + levels[:-1]) / 2, edge))
        mass = normal.cdf(bounds).diff()
        levels = -torch.exp(normal.log_prob(bounds)).diff() / mass
    return levels.float()


@cache
def _hadamard() -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < GROUP:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / GROUP**0.5


def measure_channels(features: Tensor, num_layers: int) -> Tensor:
    """Mean and standard deviation [2, F] float32 of each channel over the tokens, massive ones left out.

    Args:
        features: [T, F], the layers side by side.
    """
    values = features.float().unflatten(1, (num_layers, -1))
    sizes = values.pow(2).mean(dim=2, keepdim=True).sqrt()
    usual = (sizes <= MASSIVE * sizes.median(dim=0, keepdim=True).values).float()
    count = usual.sum(dim=0)
    mean = (values * usual).sum(dim=0) / count
    squares = (values - mean).pow(2)
    deviation = (squares * usual).sum(dim=0).div(count).sqrt()
    # A channel that only massive tokens move.
    deviation = torch.where(deviation > 0, deviation, squares.mean(dim=0).sqrt())
    return torch.stack((mean.flatten(), deviation.flatten()))


def pack(features: Tensor, bits: int, num_layers: int, device: torch.device | str = "cpu") -> PackedFeatures:
    """Pack the features of a shard.

    Args:
        features: [T, F] bfloat16, finite; the layers side by side.
        bits: 8, 4, 2 or 1.
        num_layers: layers in a row.
        device: where to compute. The result is on the CPU.
    """
    step = -(-len(features) // FITTED_TOKENS)
    channels = measure_channels(features[::step].to(device), num_layers)
    rows = [_pack_rows(part.to(device), bits, channels).cpu() for part in features.split(PACKED_AT_ONCE)]
    return PackedFeatures(torch.cat(rows), channels.cpu())


def _pack_rows(features: Tensor, bits: int, channels: Tensor) -> Tensor:
    mean, size = channels
    # A channel that never moves is all in its mean.
    values = torch.where(size > 0, (features.float() - mean) / size, 0.0)
    values = torch.nn.functional.pad(values, (0, _num_groups(len(mean)) * GROUP - len(mean)))
    values = values.unflatten(1, (-1, GROUP)) @ _hadamard().to(values.device)
    sizes = values.pow(2).mean(dim=2).sqrt()
    scales = (torch.log2(sizes) * SCALE_STEPS + SCALE_ZERO).round().clamp(1, 255).to(torch.uint8)
    levels = normal_levels(bits).to(values.device)
    codes = torch.bucketize(values / _scale(scales)[..., None], (levels[1:] + levels[:-1]) / 2, out_int32=True)
    places = torch.arange(0, 8, bits, device=values.device, dtype=torch.int32)
    codes = (codes.flatten(1).unflatten(1, (-1, 8 // bits)) << places).sum(dim=2).to(torch.uint8)
    return torch.cat((codes, scales), dim=1)


def unpack(packed: PackedFeatures) -> Tensor:
    """The features [..., T, F] bfloat16 on the device of ``packed``; the inverse of `pack` up to its rounding.

    Rows [..., T, bytes] and channels [..., 2, F] may have any leading dimensions, the same ones.
    """
    mean, size = packed.channels[..., None, :, :].unbind(dim=-2)
    groups = _num_groups(mean.shape[-1])
    codes, scales = packed.rows[..., :-groups], packed.rows[..., -groups:]
    values = _byte_values(codes.shape[-1] * 8 // (groups * GROUP), codes.device)[codes.int()]
    values = values.flatten(-2).unflatten(-1, (groups, GROUP)) * _scale(scales)[..., None]
    values = (values @ _hadamard().to(values.device)).flatten(-2)[..., : mean.shape[-1]]
    return torch.addcmul(mean, values, size).to(torch.bfloat16)


def _scale(scales: Tensor) -> Tensor:
    return torch.exp2((scales.float() - SCALE_ZERO) / SCALE_STEPS)


@cache
def _byte_values(bits: int, device: torch.device) -> Tensor:
    """[256, 8 / bits] the values that each byte stands for."""
    codes = torch.arange(256)[:, None] >> torch.arange(0, 8, bits)
    return normal_levels(bits)[codes & (2**bits - 1)].to(device)
