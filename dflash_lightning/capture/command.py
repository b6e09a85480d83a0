"""Capture: run the target once over the prepared texts and store its context features.

Shards and batches are planned from the data set alone. Each of n writers takes every n-th shard, so that any number of
them, in any number of runs, writes the same cache; they never talk to each other. A writer is one process, or the
leader of a group of processes that hold one large target together.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from dflash_lightning.cache import (
    BackgroundWriter,
    CacheManifest,
    CacheWriter,
    ObjectStoreSettings,
    Quarantined,
    Sample,
    create_or_join,
    open_store,
    write_index,
)
from dflash_lightning.cache.manifest import MANIFEST
from dflash_lightning.cache.space import check_space
from dflash_lightning.cache.store import CacheStore, LocalFolder
from dflash_lightning.capture.job import CaptureJob, plan_capture
from dflash_lightning.distributed import leaders_value
from dflash_lightning.errors import ConfigError
from dflash_lightning.features import compute_features
from dflash_lightning.prepare.data import PreparedSample
from dflash_lightning.progress import say, track
from dflash_lightning.target import load_first_layers
from dflash_lightning.wording import counted
from dflash_lightning.writable import check_writable

# Quarantined samples that are shown at the end.
MAX_SHOWN = 10


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group indices by length, so that no batch holds more than ``batch_tokens`` tokens, padding included.

    A longer sample makes a batch of its own.
    """
    batches: list[list[int]] = []
    for index in np.argsort(lengths, kind="stable").tolist():
        if not batches or (len(batches[-1]) + 1) * lengths[index] > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


def capture_samples(
    target: PreTrainedModel, samples: Sequence[PreparedSample], layer_ids: Sequence[int], batch_tokens: int
) -> Iterator[tuple[int, Sample | Quarantined]]:
    """Features of each sample, batch by batch: pairs of index and finished sample, in no particular order.

    Rows are padded on the right and cut back: neighbours change nothing but the last bits of a sample's features. A
    sample that the target can't take is quarantined.
    """
    vocab_size = target.config.get_text_config().vocab_size
    usable = []
    for i, sample in enumerate(samples):
        reason = _why_unusable(sample, vocab_size)
        if reason is None:
            usable.append(i)
        else:
            yield i, Quarantined(sample.id, reason)
    pad = target.config.get_text_config().eos_token_id or 0
    pad = pad[0] if isinstance(pad, list) else pad
    for members in plan_batches([len(samples[i].input_ids) for i in usable], batch_tokens):
        batch = [usable[k] for k in members]
        length = max(len(samples[i].input_ids) for i in batch)
        input_ids = torch.full((len(batch), length), pad)
        attention_mask = torch.zeros(len(batch), length, dtype=torch.long)
        for row, i in enumerate(batch):
            tokens = len(samples[i].input_ids)
            input_ids[row, :tokens] = torch.tensor(samples[i].input_ids)
            attention_mask[row, :tokens] = 1
        features = compute_features(target, input_ids, attention_mask, layer_ids).to("cpu", torch.bfloat16)
        for row, i in enumerate(batch):
            sample = samples[i]
            yield (
                i,
                Sample(
                    sample_id=sample.id,
                    input_ids=np.array(sample.input_ids, dtype=np.int32),
                    loss_mask=np.array(sample.loss_mask, dtype=np.uint8),
                    features=features[row, : len(sample.input_ids)],
                ),
            )


def _why_unusable(sample: PreparedSample, vocab_size: int) -> str | None:
    if not sample.input_ids:
        return "it has no tokens"
    if min(sample.input_ids) < 0 or max(sample.input_ids) >= vocab_size:
        outside = [token for token in sample.input_ids if not 0 <= token < vocab_size]
        return f"{len(outside)} token ids are outside the target's vocabulary of {vocab_size:,}, first {outside[0]}"
    return None


def capture(
    target: str,
    data: Path,
    cache: str,
    max_quarantined: float = 0.01,
    object_store: ObjectStoreSettings = ObjectStoreSettings(),  # noqa: B008
    **settings: Any,
) -> None:
    """Store the target's context features of prepared texts in a feature cache.

    Run it in one process, or in many under torchrun or srun on a shared path or an object store. It can be killed at
    any moment; the same command goes on where it stopped, with any number of processes.

    Args:
        target: folder, hub name or .gguf file of the target.
        data: folder that `prepare` wrote.
        cache: folder or URL (s3://, gs://, az://) of the feature cache; a folder is made if missing.
        max_quarantined: share of the samples that may be left out because they can't be stored (NaN features and the
            like), 0 to 1; with more, the capture stops.
        object_store: how to reach a cache that is a URL.
        settings: of `plan_capture`.

    Raises:
        DataError, TargetError, CacheError, ConfigError: each says what was found, what was expected and what to do.
    """
    if not 0 <= max_quarantined <= 1:
        raise ConfigError(f"max_quarantined is {max_quarantined}; expected a share from 0 to 1.")
    store = open_store(cache, object_store)
    if isinstance(store, LocalFolder) and not (store.path / MANIFEST).is_file():
        _check_place(store)
    job = plan_capture(target, data, **settings)
    planned = set(range(job.manifest.num_shards))
    begun = CacheManifest.exists(store)
    if not begun:  # a refusal leaves nothing behind
        check_space(store, job.manifest, job.stored_tokens(planned))
    writer = create_or_join(store, job.manifest, rank=job.place.rank, max_quarantined=max_quarantined)
    if begun and (missing := planned - writer.committed()):  # a finished cache may be in a folder that is read only
        _check_place(store)
        check_space(store, job.manifest, job.stored_tokens(missing))
    write_missing_shards(job, writer)


def _check_place(store: CacheStore) -> None:
    """Refuse a folder that can't be written to; an object store says so at the first request."""
    if isinstance(store, LocalFolder):
        check_writable("cache", store.path, folder=True)


def write_missing_shards(job: CaptureJob, writer: CacheWriter) -> None:
    """Compute and commit this process's share of the shards that aren't there yet, and say how the cache stands.

    Raises:
        CacheError: too many samples are quarantined, or a shard can't be written; see `CacheWriter.write_shard`.
    """
    manifest, group = job.manifest, job.group
    dtype, batch_tokens = getattr(torch, manifest.capture["dtype"]), manifest.capture["batch_tokens"]
    mine = leaders_value(sorted(set(range(group.number, manifest.num_shards, group.count)) - writer.committed()))
    name = f"writer {group.number + 1} of {group.count}"
    if mine:
        model = load_first_layers(
            job.target,
            max(manifest.target_layer_ids) + 1,
            dtype=dtype,
            placement=job.placement,
            local_rank=job.place.local_rank,
        )
        writer.device = model.device
        members = {shard: job.members(shard) for shard in mine}
        computed = (capture_samples(model, members[shard], manifest.target_layer_ids, batch_tokens) for shard in mine)
        if group.leads:
            total = sum(map(len, members.values()))
            with track(total, f"capture, {name}", "tokens") as progress, BackgroundWriter(writer) as background:
                for shard, shard_samples in zip(mine, computed, strict=True):
                    finished: dict[int, Sample | Quarantined] = {}
                    for index, sample in shard_samples:
                        finished[index] = sample
                        progress.advance(1, done=len(members[shard][index].input_ids))
                        background.check()
                    background.write_shard(shard, [finished[i] for i in range(len(members[shard]))])
        else:  # its slices are needed; the features that come out are the same in every process of the group
            for shard_samples in computed:
                deque(shard_samples, maxlen=0)
    if group.leads:
        writer.check_quarantined()
        write_index(writer.store)
        _report(writer, f"{writer.store.location}: {name} is done, {counted(len(mine), 'shard')} written now")


def _report(writer: CacheWriter, done: str) -> None:
    committed, quarantined = len(writer.committed()), writer.quarantined()
    say(
        f"{done}; {committed} of {counted(writer.manifest.num_shards, 'shard')} committed, "
        f"{counted(len(quarantined), 'sample')} quarantined"
    )
    for sample in quarantined[:MAX_SHOWN]:
        say(f"  {sample}")
    if len(quarantined) > MAX_SHOWN:
        say(f"  and {len(quarantined) - MAX_SHOWN:,} more: dflash-lightning cache info {writer.store.location}")
