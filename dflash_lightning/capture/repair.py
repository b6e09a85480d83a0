"""Rebuild the damaged parts of a cache, with the settings that it was made with."""

from collections.abc import Collection
from pathlib import Path

from dflash_lightning.cache import CacheManifest, CacheStore, create_or_join, restore_manifest, write_index
from dflash_lightning.cache.index import INDEX
from dflash_lightning.cache.shards import shard_name, sound_markers
from dflash_lightning.capture.command import write_missing_shards
from dflash_lightning.capture.job import plan_capture
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
    that aren't committed and no index, so that the cache isn't complete; the next repair or capture writes them.

    Args:
        store: where the cache lies.
        broken: indices of the shards that are damaged or missing.
        target: where the target is now. Default: where it was.
        data: where the prepared data is now. Default: where it was.
        max_quarantined: share of the planned samples that may be quarantined, 0 to 1. What is quarantined already is
            allowed whatever it says.

    Raises:
        CacheError: the manifest and its copy are damaged, or the target or the data isn't the one that the cache was
            made from (each differing field is listed with both values), or the shards were captured by processes
            that held the target together.
        DataError, TargetError: the data or the target isn't there any more.
        ConfigError: there are several processes, or there is no device of the kind that the cache was captured on.
    """
    manifest = restore_manifest(store)
    if not broken:
        write_index(store)
        return
    settings = manifest.capture
    try:
        device = _device(store, settings, broken)
        job = plan_capture(
            target or manifest.source["target"],
            data or Path(manifest.source["data"]),
            limit=manifest.num_samples,
            target_layer_ids=list(manifest.target_layer_ids),
            num_tapped_layers=len(manifest.target_layer_ids),
            dtype=settings["dtype"],
            device=device,
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
    allowed = max(max_quarantined, _quarantined_share(store, manifest))
    writer = create_or_join(store, job.manifest, max_quarantined=allowed)
    for shard in broken:
        writer.remove(shard)
    write_missing_shards(job, writer)


def _device(store: CacheStore, settings: dict, broken: Collection[int]) -> str:
    """Where one process computes the same bits as the capture with these settings did."""
    size = settings["tensor_parallel_size"]
    if size > 1:
        folders = " ".join(shard_name(shard) for shard in sorted(broken))
        raise CacheError(
            f"{store.location} was captured by {size} processes that held the target together, which a repair, one "
            f"process, can't do. Remove the folders of these shards from it, and the object {INDEX}, then run the "
            f"capture command again under torchrun with --tensor-parallel-size {size}: {folders}"
        )
    device = "cpu" if settings["device"] == "cpu" else "auto"
    kind = Placement(device).device_kind(local_rank=0)
    if kind != settings["device"]:
        raise ConfigError(
            f"{store.location} was captured on {settings['device']}, and this machine has only {kind}, which gives "
            "other last bits. Run the repair on a machine with such a device."
        )
    return device


def _quarantined_share(store: CacheStore, manifest: CacheManifest) -> float:
    """The share of the planned samples that the sound markers name as quarantined."""
    markers = sound_markers(store, manifest)
    return sum(len(marker.quarantined) for marker in markers if marker) / manifest.num_samples
