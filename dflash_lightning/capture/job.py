"""What a capture is to do: the plan of a cache, from the target, the data and the settings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch

from dflash_lightning import __version__
from dflash_lightning.cache import CacheManifest
from dflash_lightning.cache.storage import Compression, Storage, default_compression
from dflash_lightning.config import DrafterSettings
from dflash_lightning.distributed import Group, Place, form_groups, launched_place
from dflash_lightning.errors import ConfigError, DataError
from dflash_lightning.prepare.data import PreparedSample, load_data
from dflash_lightning.target import Placement, target_identity, target_text_config
from dflash_lightning.wording import counted


@dataclass(frozen=True)
class CaptureJob:
    """What a capture computes, and this process's part in it.

    Attributes:
        target: name of the target.
        manifest: of the cache; it has the settings that the features' bits depend on.
        samples: all that are planned.
        placement: where the target lies.
        place: this process among those that the launcher started.
        group: the processes that share this one's target.
    """

    target: str
    manifest: CacheManifest
    samples: list[PreparedSample]
    placement: Placement
    place: Place
    group: Group

    def members(self, shard: int) -> list[PreparedSample]:
        """The samples that are planned for a shard."""
        return self.samples[self._bounds[shard] : self._bounds[shard + 1]]

    def stored_tokens(self, shards: Iterable[int]) -> int:
        """Tokens that these shards will store, if no sample is quarantined: a prepared text ends with its response."""
        return sum(len(sample.input_ids) for shard in shards for sample in self.members(shard))

    @cached_property
    def _bounds(self) -> list[int]:
        return [0, *accumulate(self.manifest.shard_samples)]


def plan_capture(
    target: str,
    data: Path,
    limit: int | None = None,
    target_layer_ids: list[int] | None = None,
    num_tapped_layers: int = 5,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    device: str = "auto",
    tensor_parallel_size: int = 1,
    device_map: Literal["auto"] | None = None,
    max_memory: dict[int | str, str] | None = None,
    batch_tokens: int = 4096,
    shard_tokens: int = 32768,
    storage: Storage = "4bit",
    compression: Compression | None = None,
    num_threads: int = 1,
) -> CaptureJob:
    """Check settings, target and data, and plan the cache; nothing is written.

    Sets the CPU threads of this process, and joins it with the others that share its target. The commands `capture` and
    `cache plan` take these settings as theirs.

    Args:
        target: folder, hub name or .gguf file of the target.
        data: folder that `prepare` wrote.
        limit: take only so many samples.
        target_layer_ids: layers to tap, 0-based. Default: spread evenly over the target.
        num_tapped_layers: how many layers to tap when target_layer_ids is left out.
        dtype: what the target computes in.
        device: where the target runs: cpu, cuda:N, or auto, which takes this process's GPU if there is one.
        tensor_parallel_size: processes under torchrun that hold one target together, each a slice of every layer.
        device_map: auto spreads the target's layers over all GPUs of this process, then its memory, then the disk.
        max_memory: what device_map may use, by device: {0: 70GiB, cpu: 100GiB}.
        batch_tokens: tokens of a forward, padding included.
        shard_tokens: tokens of a shard, the unit that is redone after an interruption.
        storage: how features are stored: bfloat16 as they are, or rounded to so many bits a value (docs/cache.md shows
            what each costs and keeps).
        compression: what features are compressed with, without loss. Default: lz4 for bfloat16, none for packed ones.
        num_threads: CPU threads of each process, whatever its launcher allows. The last bits of the features depend on
            it, so a cache has one number; to use more cores, run more processes.

    Raises:
        DataError, TargetError, ConfigError: each says what was found, what was expected and what to do.
    """
    placement = Placement(device, tensor_parallel_size, device_map, max_memory)
    counts = {"batch_tokens": batch_tokens, "shard_tokens": shard_tokens, "num_threads": num_threads, "limit": limit}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; expected at least 1.")
    torch.set_num_threads(num_threads)
    place = launched_place()
    identity = target_identity(target)
    text_config = target_text_config(target)
    placement.check(target, text_config, place.local_rank)
    info, samples = load_data(data)
    if not info.target.fits(identity):
        raise DataError(
            f"{data} was prepared with target {info.target.name}, which isn't {target}: one target's answers don't "
            "teach a drafter for another. Name the same target, or prepare again."
        )
    layer_ids = DrafterSettings(
        num_layers=1,
        target_layer_ids=target_layer_ids,
        num_tapped_layers=num_tapped_layers if target_layer_ids is None else None,
    ).resolve_target_layer_ids(text_config.num_hidden_layers)
    samples = samples[:limit]
    if not samples:
        raise DataError(f"{data} holds no sample; prepare some prompts first.")
    if not any(any(sample.loss_mask) for sample in samples):
        raise DataError(
            f"{data}: not one token of {counted(len(samples), 'sample')} is an answer's (response_start is the end of "
            "each), so that a drafter would have nothing to learn. Prepare prompts whose answers aren't empty."
        )
    manifest = CacheManifest(
        target=identity,
        target_layer_ids=layer_ids,
        hidden_size=text_config.hidden_size,
        storage=storage,
        compression=compression or default_compression(storage),
        generation=info.generation,
        capture={
            "dtype": dtype,
            "device": placement.device_kind(place.local_rank),
            "tensor_parallel_size": placement.tensor_parallel_size,
            "num_threads": num_threads,
            "batch_tokens": batch_tokens,
            "shard_tokens": shard_tokens,
        },
        dataset_sha256=info.dataset_sha256,
        max_length=max(len(sample.input_ids) for sample in samples),
        source={
            "target": str(Path(target).resolve()) if Path(target).exists() else target,
            "data": str(data.resolve()),
        },
        code_version=__version__,
        shard_samples=tuple(map(len, plan_shards(samples, shard_tokens))),
    )
    group = form_groups(place, placement.tensor_parallel_size)
    return CaptureJob(target, manifest, samples, placement, place, group)


def plan_shards(samples: Sequence[PreparedSample], shard_tokens: int) -> list[range]:
    """Cut the samples, in order, into runs of at least ``shard_tokens`` tokens (the last may be shorter)."""
    shards, start, tokens = [], 0, 0
    for index, sample in enumerate(samples):
        tokens += len(sample.input_ids)
        if tokens >= shard_tokens:
            shards.append(range(start, index + 1))
            start, tokens = index + 1, 0
    if start < len(samples):
        shards.append(range(start, len(samples)))
    return shards
