"""The commands ``cache info`` and ``cache verify``: tables for people, or with ``--json`` one JSON object."""

import json as json_format
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from dflash_lightning.cache import CacheStore, Fault, ObjectStoreSettings, describe, open_store
from dflash_lightning.cache import verify as find_faults
from dflash_lightning.cache.verify import sound_manifest
from dflash_lightning.errors import CacheError
from dflash_lightning.progress import say, track
from dflash_lightning.wording import counted


def info(cache: str, json: bool = False, object_store: ObjectStoreSettings = ObjectStoreSettings()) -> None:  # noqa: B008
    """Show what a feature cache holds, and whether it is complete.

    Args:
        cache: folder or URL of the feature cache.
        json: print one JSON object.
        object_store: how to reach a cache that is a URL.
    """
    description = describe(open_store(cache, object_store))
    if json:
        say(json_format.dumps(description))
        return
    quarantined = description.pop("quarantined")
    table = Table("name", Column("value", overflow="fold"), show_header=False, box=None, pad_edge=False)
    for name, value in description.items():
        table.add_row(name, escape(value if isinstance(value, str) else json_format.dumps(value)))
    Console().print(table)
    if quarantined:
        table = Table("shard", "sample", Column("why it isn't stored", overflow="fold"), title="quarantined")
        for sample in quarantined:
            table.add_row(f"{sample['shard']:06d}", escape(sample["sample_id"]), escape(sample["reason"]))
        Console().print(table)


def verify(
    cache: str,
    json: bool = False,
    repair: bool = False,
    target: str | None = None,
    data: Path | None = None,
    max_quarantined: float = 0.01,
    object_store: ObjectStoreSettings = ObjectStoreSettings(),  # noqa: B008
) -> None:
    """Read every object of a feature cache and compare it with its checksum.

    Args:
        cache: folder or URL of the feature cache.
        json: print one JSON object: the faults that there are, and those that were repaired.
        repair: rebuild what is damaged or missing and verify again: the manifest from its copy, shards by a capture
            with the settings that the manifest names. Not while a capture runs; an unfinished one is finished by the
            same capture command.
        target: for a repair: where the target is now. Default: where it was.
        data: for a repair: where the prepared data is now. Default: where it was.
        max_quarantined: for a repair: share of the samples that may be left out, as in `capture`; what the cache
            leaves out already is allowed.
        object_store: how to reach a cache that is a URL.

    Raises:
        CacheError: something is missing or damaged, and wasn't repaired; each fault is listed with shard and object.
    """
    store = open_store(cache, object_store)
    num_shards = sound_manifest(store)[0].num_shards
    faults, repaired = _scan(store, num_shards), []
    if faults and repair:
        # Loads torch and transformers, which a mere verification has no need of.
        from dflash_lightning.capture.repair import repair as rebuild

        if not json:
            _print_faults(faults)
        broken = sorted({fault.shard for fault in faults if fault.shard is not None})
        with redirect_stdout(sys.stderr) if json else nullcontext():
            rebuild(store, broken, target=target, data=data, max_quarantined=max_quarantined)
        remaining = _scan(store, num_shards)
        faults, repaired = remaining, [fault for fault in faults if fault not in remaining]
    if json:
        record = {"path": store.location, "faults": faults, "repaired": repaired}
        say(json_format.dumps(record, default=asdict))
    elif faults:
        _print_faults(faults)
    if faults:
        raise CacheError(f"{cache}: {_conclusion(faults, num_shards, repair)}")
    if not json:
        done = f"{_count(repaired)} repaired; " if repaired else ""
        say(f"{cache}: {done}every object is there and equals its checksum")


def _scan(store: CacheStore, num_shards: int) -> list[Fault]:
    with track(num_shards, "verify", "shards") as progress:
        return find_faults(store, progress.advance)


def _print_faults(faults: list[Fault]) -> None:
    """A table of what is damaged; shards that aren't committed are only counted, by `_conclusion`."""
    table = Table("shard", "object", Column("fault", overflow="fold"))
    for fault in faults:
        if not fault.uncommitted:
            table.add_row("" if fault.shard is None else f"{fault.shard:06d}", escape(fault.object), escape(fault.what))
    if table.row_count:
        Console().print(table)


def _conclusion(faults: list[Fault], num_shards: int, repaired: bool) -> str:
    """What there is in all, and what to do about it."""
    damage = [fault for fault in faults if not fault.uncommitted]
    uncommitted = len(faults) - len(damage)
    missing = f"{uncommitted} of {num_shards} shards {'is' if uncommitted == 1 else 'are'}n't committed"
    if repaired:
        return f"{_count(faults)} left after the repair. Does something else write to this cache?"
    if not damage:
        return f"{missing}: run the same capture command again."
    if len(damage) == len(faults):
        return f"{_count(damage)}. Add --repair to rebuild what is damaged."
    return f"{_count(damage)}, and {missing}. Once no capture runs any more, add --repair to make all of that anew."


def _count(faults: list[Fault]) -> str:
    return counted(len(faults), "fault")
