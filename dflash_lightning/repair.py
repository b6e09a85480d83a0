"""Rebuild the damaged parts of a cache, with the settings that it was made with."""

from collections.abc import Collection
from pathlib import Path

from dflash_lightning.cache import CacheStore, create_or_join, restore_manifest, write_index
from dflash_lightning.capture import write_missing_shards
from dflash_lightning.capture_job import plan_capture
from dflash_lightning.errors import CacheError, ConfigError
from dflash_lightning.target import Placement


def repair(
    store: CacheStore,
    broken: Collection[int],
    *,
    target: str | None = None,
    data: Path | None = None,
    max_quarantined: float = 0.01,
) -> None:
    """Restore manifest and index, and capture the shards `broken` anew. The other committed shards aren't touched.

    Nothing is removed before target, data and settings are known to give the same cache. Interrupted, it leaves shards
    that aren't committed, which the next repair or capture writes.

    Args:
        store: where the cache lies.
        broken: indices of the shards that are damaged or missing.
        target: where the target is now. Default: where it was.
        data: where the prepared data is now. Default: where it was.
        max_quarantined: share of the planned samples that may be quarantined, 0 to 1.

    Raises:
        CacheError: the manifest and its copy are damaged, or the target or the data isn't the one that the cache was
            made from (each differing field is listed with both values).
        DataError, TargetError: the data or the target isn't there any more.
        ConfigError: there are several processes.
    """
    manifest = restore_manifest(store)
    if not broken:
        write_index(store)
        return
    settings = manifest.capture
    try:
        job = plan_capture(
            target or manifest.source["target"],
            data or Path(manifest.source["data"]),
            limit=manifest.num_samples,
            target_layer_ids=list(manifest.target_layer_ids),
            num_tapped_layers=len(manifest.target_layer_ids),
            dtype=settings["dtype"],
            placement=Placement(
                "cpu" if settings["device"] == "cpu" else "auto",
                tensor_parallel_size=settings["tensor_parallel_size"],
            ),
            batch_tokens=settings["batch_tokens"],
            shard_tokens=settings["shard_tokens"],
            storage=manifest.storage,
            compression=manifest.compression,
            num_threads=settings["num_threads"],
        )
    except KeyError as error:
        raise CacheError(
            f"the manifest of {store.location} doesn't name {error}: the cache wasn't made by `capture`, and can't be "
            "rebuilt by it. Remove the shards that are damaged and let their producer write them again."
        ) from error
    if job.place.world_size > 1:
        raise ConfigError(f"a repair is done by one process, not by {job.place.world_size}; start it without torchrun.")
    writer = create_or_join(store, job.manifest, max_quarantined=max_quarantined)
    for shard in broken:
        writer.remove(shard)
    write_missing_shards(job, writer)
