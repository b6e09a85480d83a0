"""The commands ``cache info`` and ``cache verify``."""

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from dflash_lightning.cache import describe
from dflash_lightning.cache import verify as find_faults
from dflash_lightning.errors import CacheError
from dflash_lightning.progress import say


def info(cache: Path) -> None:
    """Show what a feature cache holds, and whether it is complete.

    Args:
        cache: folder of the feature cache.
    """
    table = Table("name", Column("value", overflow="fold"), show_header=False, box=None, pad_edge=False)
    for name, value in describe(cache).items():
        table.add_row(name, escape(value if isinstance(value, str) else json.dumps(value)))
    Console().print(table)


def verify(cache: Path) -> None:
    """Read every object of a feature cache and compare it with its checksum.

    Args:
        cache: folder of the feature cache.

    Raises:
        CacheError: something is missing or damaged; each fault is listed with shard and object.
    """
    faults = find_faults(cache)
    if faults:
        raise CacheError(
            f"{cache}: {len(faults)} faults\n  " + "\n  ".join(map(str, faults)) + "\nRemove the shards named here and "
            "run the same capture command again; it makes just those anew."
        )
    say(f"{cache}: every object is there and equals its checksum")
