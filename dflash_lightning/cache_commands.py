"""The commands ``cache info`` and ``cache verify``."""

import json

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from dflash_lightning.cache import ObjectStoreSettings, describe, open_store
from dflash_lightning.cache import verify as find_faults
from dflash_lightning.errors import CacheError
from dflash_lightning.progress import say


def info(cache: str, object_store: ObjectStoreSettings = ObjectStoreSettings()) -> None:  # noqa: B008
    """Show what a feature cache holds, and whether it is complete.

    Args:
        cache: folder or URL of the feature cache.
        object_store: how to reach a cache that is a URL.
    """
    table = Table("name", Column("value", overflow="fold"), show_header=False, box=None, pad_edge=False)
    description = describe(open_store(cache, object_store))
    quarantined = description.pop("quarantined")
    for name, value in description.items():
        table.add_row(name, escape(value if isinstance(value, str) else json.dumps(value)))
    Console().print(table)
    for sample in quarantined:
        say(f"quarantined in shard {sample['shard']:06d}: sample {sample['sample_id']!r}: {sample['reason']}")


def verify(cache: str, object_store: ObjectStoreSettings = ObjectStoreSettings()) -> None:  # noqa: B008
    """Read every object of a feature cache and compare it with its checksum.

    Args:
        cache: folder or URL of the feature cache.
        object_store: how to reach a cache that is a URL.

    Raises:
        CacheError: something is missing or damaged; each fault is listed with shard and object.
    """
    faults = find_faults(open_store(cache, object_store))
    if faults:
        raise CacheError(
            f"{cache}: {len(faults)} faults\n  " + "\n  ".join(map(str, faults)) + "\nRemove the shards named here and "
            "run the same capture command again; it makes just those anew."
        )
    say(f"{cache}: every object is there and equals its checksum")
