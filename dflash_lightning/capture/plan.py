"""The command ``cache plan``: what a capture would take, before anything is written."""

import json as json_format
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from dflash_lightning.cache import (
    CacheWriter,
    ObjectStoreSettings,
    Quarantined,
    Sample,
    create_or_join,
    open_store,
)
from dflash_lightning.cache.storage import STORAGES, Compression, Storage, default_compression
from dflash_lightning.capture.command import capture_samples
from dflash_lightning.capture.job import CaptureJob, plan_capture
from dflash_lightning.errors import ConfigError, DataError
from dflash_lightning.prepare.data import PreparedSample
from dflash_lightning.progress import say
from dflash_lightning.target import load_first_layers

# Forwards that are timed, after one that isn't.
TIMED_BATCHES = 3


def plan(
    target: str,
    data: Path,
    cache: str,
    json: bool = False,
    object_store: ObjectStoreSettings = ObjectStoreSettings(),  # noqa: B008
    **settings: Any,
) -> None:
    """Show what a capture with these settings would take: tokens, bytes of each storage, free space and time.

    A few batches run through the target and are stored in a temporary folder, so that bytes and time are measured.
    Nothing is written to the cache.

    Args:
        target: folder, hub name or .gguf file of the target.
        data: folder that `prepare` wrote.
        cache: folder or URL where the cache is to lie.
        json: print one JSON object.
        object_store: how to reach a cache that is a URL.
        settings: of `plan_capture`.

    Raises:
        DataError, TargetError, ConfigError: as `capture`.
    """
    if (size := settings.get("tensor_parallel_size", 1)) > 1:
        raise ConfigError(
            f"tensor_parallel_size is {size}, and a plan is made by one process. Leave it out: tokens and bytes don't "
            "depend on it; if the target doesn't fit one device, give device_map auto."
        )
    job = plan_capture(target, data, **settings)
    if job.place.world_size > 1:
        raise ConfigError(f"a plan is made by one process, not by {job.place.world_size}; start it without torchrun.")
    free = open_store(cache, object_store).free_bytes()
    record = measure(job, free)
    if json:
        say(json_format.dumps(record))
    else:
        _print(record)


def measure(job: CaptureJob, free_bytes: int | None) -> dict[str, Any]:
    """Time a few batches and store them in each way.

    Returns:
        samples, tokens (stored ones), storage, compression, tokens_per_second (of one process, compute and write
        overlapped), seconds (of one process), free_bytes (None if unknown), and `storages`: for each storage
        bytes_per_token, bytes and fits (None if unknown).
    """
    tokens = job.stored_tokens(range(job.manifest.num_shards))
    sample, compute_seconds = _timed_batches(job)
    storages, write_seconds = {}, 0.0
    for storage in STORAGES:
        chosen = storage == job.manifest.storage
        compression = job.manifest.compression if chosen else default_compression(storage)
        bytes_per_token, seconds = _stored(job, sample, storage, compression)
        total = round(bytes_per_token * tokens)
        storages[storage] = {
            "bytes_per_token": bytes_per_token,
            "bytes": total,
            "fits": None if free_bytes is None else total <= free_bytes,
        }
        write_seconds = seconds if chosen else write_seconds
    rate = sum(len(one.input_ids) for one in sample) / max(compute_seconds, write_seconds)
    return {
        "samples": len(job.samples),
        "tokens": tokens,
        "storage": job.manifest.storage,
        "compression": job.manifest.compression,
        "tokens_per_second": rate,
        "seconds": tokens / rate,
        "free_bytes": free_bytes,
        "storages": storages,
    }


def _timed_batches(job: CaptureJob) -> tuple[list[Sample], float]:
    """Features of samples from all over the data, and the seconds that the target took for them."""
    layer_ids, batch_tokens = job.manifest.target_layer_ids, job.manifest.capture["batch_tokens"]
    model = load_first_layers(
        job.target,
        max(layer_ids) + 1,
        dtype=getattr(torch, job.manifest.capture["dtype"]),
        placement=job.placement,
        local_rank=job.place.local_rank,
    )
    chosen = _spread(job.samples, TIMED_BATCHES * batch_tokens)

    def compute(samples: Iterable[PreparedSample]) -> list[Sample]:
        found = capture_samples(model, list(samples), layer_ids, batch_tokens)
        return [sample for _, sample in found if not isinstance(sample, Quarantined)]

    compute(chosen[:1])
    start = time.perf_counter()
    samples = compute(chosen)
    seconds = time.perf_counter() - start
    if not samples:
        raise DataError("none of the samples that were tried can go through the target; `capture` names the reasons.")
    return samples, seconds


def _spread(samples: list[PreparedSample], tokens: int) -> list[PreparedSample]:
    """Samples from all over the data, about ``tokens`` tokens of them and one at least."""
    mean = sum(len(sample.input_ids) for sample in samples) / len(samples)
    count = min(len(samples), max(1, int(tokens / mean)))
    return [samples[i * len(samples) // count] for i in range(count)]


def _stored(job: CaptureJob, sample: list[Sample], storage: Storage, compression: Compression) -> tuple[float, float]:
    """Bytes a token of a shard with these samples, and the seconds that it took to write."""
    manifest = replace(job.manifest, storage=storage, compression=compression, shard_samples=(len(sample),))
    with tempfile.TemporaryDirectory() as folder:
        writer: CacheWriter = create_or_join(folder, manifest, max_quarantined=1.0)
        start = time.perf_counter()
        marker = writer.write_shard(0, sample)
        seconds = time.perf_counter() - start
    if not marker.samples:
        raise DataError("none of the samples that were tried can be stored; `capture` names the reasons.")
    return marker.num_bytes / marker.rows, seconds


def _print(record: dict[str, Any]) -> None:
    free = record["free_bytes"]
    table = Table("storage", "bytes a token", "total", "fits")
    for name, column in record["storages"].items():
        fits = {None: "unknown", True: "yes", False: "no"}[column["fits"]]
        row = (name, f"{column['bytes_per_token']:,.0f}", decimal(column["bytes"]), fits)
        table.add_row(*row, style="bold" if name == record["storage"] else None)
    say(f"{record['samples']:,} samples, {record['tokens']:,} tokens that training can use")
    Console().print(table)
    say(f"free: {'unknown' if free is None else decimal(free)}")
    hours, rest = divmod(round(record["seconds"]), 3600)
    say(
        f"{record['storage']} with {record['compression']}: {record['tokens_per_second']:,.0f} tokens/s, "
        f"{hours} h {rest // 60} min {rest % 60} s in one process; n processes on n devices take an n-th"
    )
