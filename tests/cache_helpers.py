"""Small caches for the cache tests. Importable by processes that the tests start."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import torch

from dflash_lightning.cache import CacheManifest, CacheStore, Fault, Sample, TargetIdentity, create_or_join, verify

LAYERS = (1, 4, 2)
HIDDEN = 24
SHARD_SAMPLES = (3, 1, 4, 2)


def make_manifest(**changes) -> CacheManifest:
    fields = {
        "target": TargetIdentity("tiny", "main", "w" * 64, "t" * 64, "c" * 64),
        "target_layer_ids": LAYERS,
        "hidden_size": HIDDEN,
        "storage": "bfloat16",
        "compression": "lz4",
        "generation": {"mode": "greedy", "thinking": False, "max_new_tokens": 64},
        "capture": {"dtype": "bfloat16", "device": "cpu", "num_threads": 1},
        "dataset_sha256": "d" * 64,
        "max_length": 512,
        "source": {"target": "there", "data": "here"},
        "code_version": "0.1.0",
        "shard_samples": SHARD_SAMPLES,
    }
    return CacheManifest(**{**fields, **changes})


def make_sample(number: int) -> Sample:
    """Sample `number` of the data set, always the same; 2 to 300 tokens, an id that isn't ASCII."""
    rng = np.random.default_rng(number)
    tokens = int(rng.integers(2, 300))
    loss_mask = (rng.random(tokens) < 0.7).astype(np.uint8)
    loss_mask[-2:] = 1
    generator = torch.Generator().manual_seed(number)
    return Sample(
        sample_id=f"prüfung-{number}",
        input_ids=rng.integers(0, 50_000, tokens, dtype=np.int32),
        loss_mask=loss_mask,
        features=torch.randn(tokens, len(LAYERS) * HIDDEN, generator=generator).bfloat16(),
    )


def shard_samples(shard: int) -> list[Sample]:
    start = sum(SHARD_SAMPLES[:shard])
    return [make_sample(start + i) for i in range(SHARD_SAMPLES[shard])]


def capture(path: Path, rank: int = 0, world: int = 1) -> None:
    """What a capture process does: write the uncommitted ones of every `world`-th shard."""
    writer = create_or_join(path, make_manifest(), rank=rank)
    for shard in range(rank, len(SHARD_SAMPLES), world):
        if not writer.is_committed(shard):
            writer.write_shard(shard, shard_samples(shard))


def capture_killed_at(path: Path, step: int) -> None:
    """Capture in this process, which kills itself before its `step`-th fsync, rename or hard link (0-based)."""
    remaining = step

    def dying(operation):
        def call(*args, **kwargs):
            nonlocal remaining
            if remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            remaining -= 1
            return operation(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "link"):
        setattr(os, name, dying(getattr(os, name)))
    capture(path)


def capture_slowly(path: Path, rank: int, world: int) -> None:
    """Capture with a disk that takes 2 ms for each fsync: about 0.2 s a shard."""
    fsync = os.fsync

    def slow(descriptor):
        time.sleep(0.002)
        fsync(descriptor)

    os.fsync = slow
    capture(path, rank, world)


def stored_files(path: Path) -> dict[str, bytes]:
    """Every file of a cache but the markers, which name their producer."""
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != "COMMITTED"
    }


def faults_beside_index(cache: Path | CacheStore) -> list[Fault]:
    """What `verify` finds, but for the missing index, which `capture` above leaves out."""
    return [fault for fault in verify(cache) if fault.object != "index"]
