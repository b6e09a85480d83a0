"""Prepared texts without a target that answers, and captures of them."""

import random
from pathlib import Path

from dflash_lightning.prepare.data import DataInfo, PreparedSample, dataset_sha256, write_data
from dflash_lightning.target import target_identity


def random_texts(count: int, seed: int = 3) -> list[PreparedSample]:
    """Texts of 8 to 60 random tokens."""
    draw = random.Random(seed)
    samples = []
    for number in range(count):
        tokens = [draw.randrange(4, 260) for _ in range(draw.randrange(8, 60))]
        start = draw.randrange(1, len(tokens) - 2)
        samples.append(PreparedSample(f"text-{number}", {"prompt": "?"}, "!", "stop", "given", tokens, start, {}))
    return samples


def write_texts(folder: Path, target: Path, samples: list[PreparedSample]) -> Path:
    """A data folder as `prepare` leaves it."""
    folder.mkdir()
    info = DataInfo(target_identity(str(target)), {"mode": "chat"}, {}, dataset_sha256(samples), {})
    write_data(folder, info, samples, [])
    return folder


def capture_arguments(target: Path, data: Path, cache: Path | str, *more: str) -> list[str]:
    """The command line of a capture into many small shards."""
    return [
        *("capture", "--target", str(target), "--data", str(data), "--cache", str(cache), "--device", "cpu"),
        *("--target-layer-ids", "[1, 3, 4]", "--batch-tokens", "100", "--shard-tokens", "50"),
        *("--storage", "bfloat16", *more),
    ]
