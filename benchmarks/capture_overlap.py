"""What it gains to write a shard while the next one is computed: the same capture with and without, in turn.

    python benchmarks/capture_overlap.py --target runs/quickstart/target --data runs/quickstart/data/train --rounds 3

Prints the seconds of each way (from the first forward to the last commit), their ratio, the seconds that writing took,
and whether the stored bytes are the same. Give it a core more than --num-threads.
"""

import argparse
import hashlib
import statistics
import tempfile
import time
from pathlib import Path

from dflash_lightning.cache import BackgroundWriter
from dflash_lightning.capture import command as capture_module


class TimedBackground(BackgroundWriter):
    """The writer that capture uses, with a clock."""

    seconds = 0.0

    def __enter__(self) -> "TimedBackground":
        self._start = time.perf_counter()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        type(self).seconds = time.perf_counter() - self._start


class TimedForeground(TimedBackground):
    """Computes nothing while it writes."""

    writing = 0.0

    def write_shard(self, shard: int, samples: list) -> None:
        start = time.perf_counter()
        super().write_shard(shard, samples)
        self._wait()
        type(self).writing += time.perf_counter() - start


def digest(cache: Path) -> str:
    """Fingerprint of all stored bytes but the markers, which name their process."""
    found = hashlib.sha256()
    for path in sorted(cache.glob("shards/*/**/*")):
        if path.is_file() and path.name != "COMMITTED":
            found.update(path.relative_to(cache).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def main() -> None:
    """Run the captures and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--target-layer-ids", type=int, nargs="+", help="default: spread over the target")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--shard-tokens", type=int, default=8192)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    settings = vars(parser.parse_args())
    rounds = settings.pop("rounds")
    seconds: dict[type, list[float]] = {TimedForeground: [], TimedBackground: []}
    digests = set()
    for _ in range(rounds):
        for way, taken in seconds.items():
            capture_module.BackgroundWriter = way
            with tempfile.TemporaryDirectory() as folder:
                capture_module.capture(cache=f"{folder}/cache", **settings)
                digests.add(digest(Path(folder) / "cache"))
            taken.append(way.seconds)
    ratios = [one / other for one, other in zip(*seconds.values(), strict=True)]
    one, other = (statistics.median(taken) for taken in seconds.values())
    print(f"in turn {one:.1f} s, of which writing {TimedForeground.writing / rounds:.1f} s; overlapped {other:.1f} s")
    print(f"ratio {statistics.median(ratios):.3f} (rounds: {', '.join(f'{ratio:.3f}' for ratio in ratios)})")
    print(f"stored bytes the same in all {2 * rounds} captures: {len(digests) == 1}")


if __name__ == "__main__":
    main()
