"""What it takes to open the index of a large cache: seconds and memory, each in a fresh process.

The cache has a real manifest and a real index object of so many samples, but no shard: opening reads none.

    python benchmarks/cache_open.py --samples 1000000
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dflash_lightning.cache import CacheManifest, FeatureCache, TargetIdentity
from dflash_lightning.cache.index import INDEX, SampleIndex, id_hash
from dflash_lightning.cache.store import LocalFolder

SHARD_SAMPLES = 500


def write_synthetic(folder: Path, samples: int) -> None:
    """A manifest of `samples` samples and the index that it would have."""
    sizes = [SHARD_SAMPLES] * (samples // SHARD_SAMPLES)
    random = np.random.default_rng(0)
    store = LocalFolder(folder)
    manifest = CacheManifest(
        target=TargetIdentity("synthetic", "", "w" * 64, "t" * 64, "c" * 64),
        target_layer_ids=(1, 9, 17, 25, 33),
        hidden_size=4096,
        generation={},
        capture={},
        dataset_sha256="d" * 64,
        max_length=3072,
        source={},
        storage="bfloat16",
        compression="lz4",
        code_version="0",
        shard_samples=tuple(sizes),
    )
    store.make()
    manifest.create(store)
    ids = [f"synthetic/train/{number:012d}".encode() for number in range(sum(sizes))]
    index = SampleIndex(
        identity_sha256=manifest.identity_sha256,
        num_bytes=0,
        id_hashes=np.array([id_hash(name) for name in ids], dtype=np.uint64),
        id_offsets=np.cumsum([0, *map(len, ids)]),
        lengths=random.integers(100, 3072, len(ids), dtype=np.int32),
        anchor_candidates=random.integers(1, 2000, len(ids), dtype=np.int32),
        shard_samples=np.array(sizes, dtype=np.int32),
        sources=random.integers(1, 255, (len(sizes), 32), dtype=np.uint8),
        ids=np.frombuffer(b"".join(ids), dtype=np.uint8),
    )
    store.replace(INDEX, index.dump())


def open_and_measure(folder: Path) -> dict[str, float]:
    """In this process: what opening adds to the memory that the imports take already."""

    def peak() -> float:
        # Not getrusage's ru_maxrss, which a process inherits from the one that started it.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    before = peak()
    begin = time.perf_counter()
    cache = FeatureCache(folder)
    held_back = int((cache.id_hashes < np.uint64(0.05 * 2**64)).sum())
    seconds = time.perf_counter() - begin
    return {
        "samples": len(cache),
        "held_back": held_back,
        "seconds": round(seconds, 3),
        "mb_of_imports": round(before, 1),
        "mb_added_at_peak": round(peak() - before, 1),
        "index_mb": round((folder / INDEX).stat().st_size / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--open", type=Path, help="(for the fresh process) open this cache and print the figures")
    arguments = parser.parse_args()
    if arguments.open:
        sys.stdout.write(json.dumps(open_and_measure(arguments.open)) + "\n")
        return
    with tempfile.TemporaryDirectory() as temporary:
        write_synthetic(Path(temporary), arguments.samples)
        for _ in range(3):
            subprocess.run([sys.executable, __file__, "--open", temporary], check=True)


if __name__ == "__main__":
    main()
