"""How fast a cache is read at random, beside the two ways in which it is usually done, on the same bytes."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dflash_lightning.cache.packing import PackedFeatures
from dflash_lightning.cache.reader import FeatureCache
from dflash_lightning.cache.samples import Sample
from dflash_lightning.cache.store import CacheStore
from dflash_lightning.errors import CacheError, ConfigError

ROUNDS = 5
# What the drawn samples may take. There are two copies of them.
MAX_BYTES = 1 << 30
# Free space that the copies must leave.
RESERVE = 1 << 30

Reader = Callable[[int], object]


@dataclass(frozen=True)
class ReadingSpeed:
    """One way of reading the chosen samples, each once, in a random order.

    Attributes:
        samples_per_second, tokens_per_second: of the median round.
        mb_per_second: of what the samples take in memory, in 1e6 bytes.
        ratio: how many times faster the cache is than this way: the median over the rounds.
    """

    samples_per_second: float
    tokens_per_second: float
    mb_per_second: float
    ratio: float


def bench_reading(
    cache: str | Path | CacheStore, *, samples: int = 1000, scratch: Path | None = None, seed: int = 0
) -> dict[str, object]:
    """Read random samples through `FeatureCache`, by `numpy.memmap`, and by `torch.load` from one file a sample.

    The copies are made in a temporary folder and removed. All are in the system's page cache: this measures what
    reading costs beyond the disk. The ways take turns in each round, so that other load meets all of them.

    Args:
        cache: path, URL or store of the cache.
        samples: how many to draw (all, if the cache has fewer); not more than fit in 1 GiB.
        scratch: folder for the copies, on a local disk. Default: the system's temporary folder.
        seed: of the draw and the orders.

    Returns:
        path, samples, tokens, bytes (what was read in a round), seconds_to_open, first_samples_per_second (the cache's
        in a first round, in which shards open and checksums are checked), and for each way, cache, memmap and
        torch_files, the fields of `ReadingSpeed`.

    Raises:
        CacheError: no room for the copies, or the cache can't be read.
    """
    if samples < 1:
        raise ConfigError(f"samples is {samples}; expected at least 1.")
    if seed < 0:
        raise ConfigError(f"seed is {seed}; expected at least 0.")
    begin = time.perf_counter()
    features = FeatureCache(cache)
    seconds_to_open = time.perf_counter() - begin
    random = np.random.default_rng(seed)
    chosen = random.permutation(len(features))[:samples]
    row_bytes = sum(column[:1].nbytes for column in _columns(features.read(int(chosen[0]))))
    chosen = chosen[: max(1, np.searchsorted(np.cumsum(features.lengths[chosen]), MAX_BYTES // row_bytes))].tolist()
    tokens = int(features.lengths[chosen].sum())
    num_bytes = tokens * row_bytes
    with _free_folder(scratch, 2 * num_bytes) as folder:
        copied = _Copies(folder, (features.read(index) for index in chosen))
        ways: dict[str, Reader] = {
            "cache": lambda number: features.read(chosen[number]),
            "memmap": copied.read_memmap,
            "torch_files": copied.read_torch_file,
        }
        fresh = FeatureCache(features.store)
        first = _seconds(lambda number: fresh.read(chosen[number]), random.permutation(len(chosen)))
        rounds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            order = random.permutation(len(chosen))
            for name in random.permutation(list(ways)).tolist():
                rounds[name].append(_seconds(ways[name], order))
    result: dict[str, object] = {
        "path": features.store.location,
        "samples": len(chosen),
        "tokens": tokens,
        "bytes": num_bytes,
        "seconds_to_open": seconds_to_open,
        "first_samples_per_second": len(chosen) / first,
    }
    for name, seconds in rounds.items():
        middle = statistics.median(seconds)
        result[name] = vars(
            ReadingSpeed(
                samples_per_second=len(chosen) / middle,
                tokens_per_second=tokens / middle,
                mb_per_second=num_bytes / 1e6 / middle,
                ratio=statistics.median(way / own for way, own in zip(seconds, rounds["cache"], strict=True)),
            )
        )
    return result


def _seconds(read: Reader, order: np.ndarray) -> float:
    begin = time.perf_counter()
    for number in order.tolist():
        read(number)
    return time.perf_counter() - begin


def _columns(sample: Sample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a sample holds for each token, as arrays of numbers that NumPy knows."""
    rows = sample.features.rows if isinstance(sample.features, PackedFeatures) else sample.features.view(torch.uint16)
    return rows.numpy(), sample.input_ids, sample.loss_mask


class _Copies:
    """The samples in one file for each column, and each in a file of its own."""

    def __init__(self, folder: Path, samples: Iterator[Sample]):
        self._folder, self._ends = folder, [0]
        files = [(folder / name).open("wb") for name in ("features", "input_ids", "loss_mask")]
        for number, sample in enumerate(samples):
            columns = _columns(sample)
            for file, values in zip(files, columns, strict=True):
                values.tofile(file)
            torch.save([torch.from_numpy(values) for values in columns], self._path(number))
            self._ends.append(self._ends[-1] + len(columns[0]))
        for file in files:
            file.close()
        self._maps = [
            np.memmap(file.name, dtype=values.dtype, mode="r", shape=(self._ends[-1], *values.shape[1:]))
            for file, values in zip(files, columns, strict=True)
        ]

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.pt"

    def read_memmap(self, number: int) -> list[torch.Tensor]:
        rows = slice(self._ends[number], self._ends[number + 1])
        return [torch.from_numpy(np.array(values[rows])) for values in self._maps]

    def read_torch_file(self, number: int) -> list[torch.Tensor]:
        return torch.load(self._path(number), weights_only=True)


@contextmanager
def _free_folder(parent: Path | None, needed: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dflash-bench-", dir=parent) as folder:
        free = shutil.disk_usage(folder).free
        if free < needed + RESERVE:
            raise CacheError(
                f"the copies need {needed:,} bytes in {folder} and must leave {RESERVE:,}, but {free:,} are free; draw "
                "fewer samples, or name another --scratch folder."
            )
        yield Path(folder)
