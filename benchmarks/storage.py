"""What each storage of features costs and keeps: bytes, speeds, and the error of what comes back.

Takes a finished bfloat16 cache, writes it anew in every storage and compression to a temporary folder, and reads it
back in random order. Speeds are in MB/s of bfloat16 features (2 bytes a value), so that they compare; `write` includes
packing and syncing, `unpack` is what the training device does, here a sample at a time. `error` is the root mean square
of the difference over that of the features less their mean, by layer, the first token of each sample left out; `first`
is the difference over the features for first tokens, whose values are massive.

    dflash-lightning capture --target runs/quickstart/target --data runs/quickstart/data/train \\
        --cache runs/plain --storage bfloat16
    python benchmarks/storage.py --cache runs/plain
"""

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dflash_lightning.cache import FeatureCache, Sample, create_or_join
from dflash_lightning.cache.packing import PackedFeatures, unpack
from dflash_lightning.cache.storage import STORAGES, packed_bits
from dflash_lightning.progress import say


def measure(source: list[Sample], cache: FeatureCache, storage: str, compression: str, folder: Path) -> dict:
    """Write, read and unpack the samples; the cache is removed again."""
    manifest = replace(cache.manifest, storage=storage, compression=compression)
    writer = create_or_join(folder, manifest)
    megabytes = cache.num_tokens * 2 * manifest.feature_width / 1e6
    bounds = np.cumsum([0, *manifest.shard_samples])
    start = time.perf_counter()
    for shard in range(manifest.num_shards):
        writer.write_shard(shard, source[bounds[shard] : bounds[shard + 1]])
    write = time.perf_counter() - start

    stored = FeatureCache(folder)
    order = np.random.default_rng(0).permutation(len(stored)).tolist()
    stored.read(0)
    start = time.perf_counter()
    read = {index: stored.read(index) for index in order}
    reading = time.perf_counter() - start
    start = time.perf_counter()
    restored = {index: restore(sample) for index, sample in read.items()}
    unpacking = time.perf_counter() - start if storage != "bfloat16" else None

    num_layers = len(manifest.target_layer_ids)
    first, rest = [], []
    for given, index in zip(source, range(len(source)), strict=True):
        pair = torch.stack((given.features, restored[index])).float().unflatten(2, (num_layers, -1))
        first.append(pair[:, :1])
        rest.append(pair[:, 1:])
    result = {
        "storage": storage,
        "compression": compression,
        "bytes_per_token": stored.num_bytes / stored.num_tokens,
        "share_of_bfloat16": stored.num_bytes / stored.num_tokens / (2 * manifest.feature_width),
        "write_mb_s": megabytes / write,
        "read_mb_s": megabytes / reading,
        "unpack_mb_s": megabytes / unpacking if unpacking else None,
        "error": error_by_layer(torch.cat(rest, dim=1)),
        "first": error_by_layer(torch.cat(first, dim=1), mean=False),
    }
    shutil.rmtree(folder)
    return result


def restore(sample: Sample) -> torch.Tensor:
    packed = isinstance(sample.features, PackedFeatures)
    return unpack(sample.features) if packed else sample.features


def error_by_layer(pair: torch.Tensor, mean: bool = True) -> list[float]:
    """Relative error [K] of given and restored features, pair [2, T, K, H]."""
    given, restored = pair
    centred = given - given.mean(dim=0) if mean else given
    return [((restored[:, k] - given[:, k]).norm() / centred[:, k].norm()).item() for k in range(given.shape[1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="a finished bfloat16 cache")
    parser.add_argument("--output", type=Path, help="JSON lines of the results")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cache = FeatureCache(options.cache)
    if cache.manifest.storage != "bfloat16":
        raise SystemExit(f"{options.cache} stores features in {cache.manifest.storage}; this needs a bfloat16 cache")
    source = [cache.read(i) for i in range(len(cache))]
    lines = []
    for storage in STORAGES:
        compressions = ("none", "lz4", "zstd") if packed_bits(storage) is None else ("none", "zstd")
        for compression in compressions:
            with tempfile.TemporaryDirectory() as folder:
                result = measure(source, cache, storage, compression, Path(folder, "cache"))
            lines.append(json.dumps(result))
            say(
                f"{storage:8} {compression:4} {result['bytes_per_token']:6,.0f} bytes/token "
                f"({result['share_of_bfloat16']:5.1%})  MB/s: write {result['write_mb_s']:5,.0f}, "
                f"read {result['read_mb_s']:5,.0f}, unpack "
                + (f"{result['unpack_mb_s']:5,.0f}" if result["unpack_mb_s"] else "    -")
                + "  error "
                + " ".join(f"{value:.3f}" for value in result["error"])
                + "  first "
                + " ".join(f"{value:.3f}" for value in result["first"])
            )
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
