"""Why features are packed as they are: the error of 4 and 2 bits with the steps of `pack` added one by one.

Takes a bfloat16 cache (see benchmarks/storage.py). Errors are relative to the features' norm, by layer, the first token
of each sample left out; then, after the bar, of first tokens alone, whose values are massive.

    python benchmarks/packing_steps.py --cache runs/plain
"""

import argparse
import math
from pathlib import Path

import torch

from dflash_lightning.cache import FeatureCache
from dflash_lightning.cache.packing import GROUP, measure_channels, normal_levels, pack, unpack
from dflash_lightning.progress import say

SAMPLES = 120


def group_of(features: torch.Tensor) -> int:
    """Values in a group: 64, or what divides a smaller row."""
    return math.gcd(features.shape[1], GROUP)


def by_largest(features: torch.Tensor, bits: int) -> torch.Tensor:
    """The plain scheme: integers of the largest value in a group."""
    groups = features.unflatten(1, (-1, group_of(features)))
    step = groups.abs().amax(dim=2, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((groups / step).round() * step).flatten(1)


def by_root_mean_square(features: torch.Tensor, bits: int, channels: torch.Tensor) -> torch.Tensor:
    """Channels brought to one size, groups scaled by their root mean square, the best levels; nothing is turned."""
    mean, size = channels
    groups = ((features - mean) / size).unflatten(1, (-1, group_of(features)))
    scale = groups.pow(2).mean(dim=2, keepdim=True).sqrt()
    levels = normal_levels(bits)
    codes = torch.bucketize(groups / scale, (levels[1:] + levels[:-1]) / 2)
    return (levels[codes] * scale).flatten(1) * size + mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="a finished bfloat16 cache")
    cache = FeatureCache(parser.parse_args().cache)
    if cache.manifest.storage != "bfloat16":
        raise SystemExit(f"{cache.store.location} stores features in {cache.manifest.storage}; expected bfloat16")
    samples = [cache.read(i).features for i in range(0, len(cache), max(1, len(cache) // SAMPLES))]
    features, num_layers = torch.cat(samples), len(cache.manifest.target_layer_ids)
    first = torch.zeros(len(features), dtype=torch.bool)
    first[[0, *torch.tensor([len(sample) for sample in samples]).cumsum(0)[:-1].tolist()]] = True
    given = features.float()
    channels = measure_channels(given, num_layers)
    without_mean = torch.stack((torch.zeros_like(channels[0]), channels.pow(2).sum(dim=0).sqrt()))
    for bits in (4, 2):
        for name, restored in (
            ("by the largest value", by_largest(given, bits)),
            ("channels to one size, best levels", by_root_mean_square(given, bits, without_mean)),
            ("and their means taken out", by_root_mean_square(given, bits, channels)),
            ("and turned (as stored)", unpack(pack(features, bits, num_layers)).float()),
        ):
            columns = []
            for rows in (~first, first):
                pair = [values[rows].unflatten(1, (num_layers, -1)) for values in (restored - given, given)]
                errors = (pair[0].norm(dim=(0, 2)) / pair[1].norm(dim=(0, 2))).tolist()
                columns.append(" ".join(f"{error:.3f}" for error in errors))
            say(f"{bits} bits, {name:36} {' | '.join(columns)}")


if __name__ == "__main__":
    main()
