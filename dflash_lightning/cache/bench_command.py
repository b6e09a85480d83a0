"""The command ``cache bench``: how fast a cache is read, beside the usual ways to store the same samples."""

import json as json_format
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dflash_lightning.cache import ObjectStoreSettings, bench_reading, open_store
from dflash_lightning.progress import say

WAYS = {"cache": "this cache", "memmap": "numpy.memmap, one file", "torch_files": "torch.load, one file a sample"}


def bench(
    cache: str,
    json: bool = False,
    samples: int = 1000,
    scratch: Path | None = None,
    seed: int = 0,
    object_store: ObjectStoreSettings = ObjectStoreSettings(),  # noqa: B008
) -> None:
    """Read random samples of a feature cache, and the same bytes by numpy.memmap and from torch.save files.

    Args:
        cache: folder or URL of the feature cache.
        json: print one JSON object.
        samples: how many to draw, at most; not more than fit in 1 GiB.
        scratch: folder for temporary copies, on a local disk. Default: the system's temporary folder.
        seed: of the draw and the order.
        object_store: how to reach a cache that is a URL.

    Raises:
        CacheError: the cache can't be read, or there is no room for the copies.
    """
    result = bench_reading(open_store(cache, object_store), samples=samples, scratch=scratch, seed=seed)
    if json:
        say(json_format.dumps(result))
        return
    table = Table("read by", "samples/s", "tokens/s", "MB/s", "the cache is")
    for name, title in WAYS.items():
        speed = result[name]
        figures = (f"{speed[f'{unit}_per_second']:,.0f}" for unit in ("samples", "tokens", "mb"))
        table.add_row(title, *figures, "" if name == "cache" else f"{speed['ratio']:.2f}x as fast")
    Console().print(table)
    opening, first = result["seconds_to_open"], result["first_samples_per_second"]
    say(
        f"{cache}: {result['samples']:,} samples, {result['bytes'] / 1e6:,.0f} MB, at random, from the page cache. "
        f"Opened in {opening:.3f} s; {first:,.0f} samples/s at first, when shards open and checksums are checked."
    )
