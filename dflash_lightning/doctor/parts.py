"""Checks of the parts of a run, and of whether they fit each other: target, data, cache and training configuration."""

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.filesize import decimal

from callbacks import DecodedAcceptance
from datamodules import FeatureCacheDataModule
from dflash_lightning.cache import FeatureCache
from dflash_lightning.decoding.decode import plain_decode
from dflash_lightning.devices import resolve_device
from dflash_lightning.doctor.machine import SHARED_MEMORY, free_disk
from dflash_lightning.doctor.verdict import Verdict
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import DataError, DFlashError
from dflash_lightning.evaluation.prompt_results import load_prompts
from dflash_lightning.prepare.data import DataInfo, load_data
from dflash_lightning.prompts.rows import PromptRow, prompt_token_ids
from dflash_lightning.target import load_target, load_tokenizer, stop_token_ids, target_identity
from dflash_lightning.training.fit import FitCLI, fit
from dflash_lightning.training.module import DFlashModule
from dflash_lightning.training.trainer_checks import check_settings

NEW_TOKENS = 16
# Of a checkpoint, for each weight: bfloat16, and in float32 the master and AdamW's two moments.
BYTES_PER_WEIGHT = 2 + 3 * 4
# A loader worker reads so many batches ahead.
BATCHES_AHEAD = 2


def told(subject: str, check: Callable[..., Verdict], *arguments: Any) -> Verdict:
    """The verdict of a check; a user's mistake is one, and its message says what to do."""
    try:
        return check(*arguments)
    except DFlashError as error:
        return Verdict(subject, "fails", str(error))
    except torch.OutOfMemoryError as error:
        return Verdict(
            subject,
            "fails",
            str(error).splitlines()[0],
            "Spread the target (`target_on: device_map` of DecodedAcceptance, `--device-map auto` of capture).",
        )


@dataclass(frozen=True)
class Parts:
    """What a run is made of, as far as it is given.

    Attributes:
        target: folder, hub name or .gguf file.
        data: folder that `prepare` wrote.
        cache: folder or URL of a feature cache.
        training: YAML file of a training.
    """

    target: str | None = None
    data: Path | None = None
    cache: str | None = None
    training: Path | None = None

    def check(self) -> Iterator[Verdict]:
        """Each given part by itself, then whether they fit each other."""
        if self.target is not None:
            yield told("target", self._target)
        if self.data is not None:
            yield told("data", self._data)
        if self.cache is not None:
            yield told("cache", self._cache)
        if self.training is not None:
            yield from self._training()

    def _target(self) -> Verdict:
        """Load it and let it answer."""
        device = resolve_device("auto")
        tokenizer, start = load_tokenizer(self.target), time.perf_counter()
        model = load_target(self.target, dtype=torch.bfloat16, device=device)
        loaded = time.perf_counter()
        turn = [{"role": "user", "content": "Count from 1 to 5."}]
        row = PromptRow("doctor", turn, bare=True, response=None, finish_reason="stop")
        token_ids = prompt_token_ids(row, tokenizer, None)
        text = plain_decode(model, token_ids, max_new_tokens=NEW_TOKENS, stop_ids=stop_token_ids(model, tokenizer))
        answer = tokenizer.decode(text.token_ids, skip_special_tokens=True).strip()
        seconds = time.perf_counter() - loaded
        return Verdict(
            "target",
            "ok",
            f"{self.target} was loaded in {loaded - start:.1f} s and, asked to count from 1 to 5, said {answer!r} in "
            f"{seconds:.1f} s ({device}, bfloat16)",
        )

    def _data(self) -> Verdict:
        info, samples = load_data(self.data)
        self._check_targets_data(info)
        tokens = sum(len(sample.input_ids) for sample in samples)
        return Verdict("data", "ok", f"{self.data} holds {len(samples):,} samples, {tokens:,} tokens")

    def _check_targets_data(self, info: DataInfo) -> None:
        if self.target is not None and not info.target.fits(target_identity(self.target)):
            raise DataError(
                f"{self.data} has the answers of {info.target.name}, which isn't {self.target}. Prepare it anew."
            )

    def _cache(self) -> Verdict:
        cache = FeatureCache(self.cache)
        manifest = cache.manifest
        identity = None if self.target is None else target_identity(self.target)
        cache.check_compatible(identity, manifest.target_layer_ids, manifest.hidden_size)
        found = f"{self.cache} holds {len(cache):,} samples, {cache.num_tokens:,} tokens, {decimal(cache.num_bytes)}"
        if self.data is not None:
            info, _ = load_data(self.data)
            if info.dataset_sha256 != manifest.dataset_sha256:
                return Verdict(
                    "cache",
                    "doubtful",
                    f"{found}; it was captured from other data than {self.data}",
                    "Capture a new cache.",
                )
        return Verdict("cache", "ok", found)

    def _training(self) -> Iterator[Verdict]:
        """Build what `fit` would build, read one batch, and don't train."""
        verdicts: list[Verdict] = []

        class LooksInsteadOfTraining(FitCLI):
            def fit(self, model: DFlashModule, datamodule: FeatureCacheDataModule) -> None:
                check_settings(self.trainer)
                model.optimizer_settings.check_trainer(self.trainer)
                self.trainer.strategy.connect(model)
                datamodule.trainer = self.trainer
                verdicts.append(told("training data", _first_batch, datamodule))
                verdicts.append(told("checkpoints", _room_for_checkpoints, model, self.trainer))
                for callback in self.trainer.callbacks:
                    if isinstance(callback, DecodedAcceptance):
                        verdicts.append(told("held-out prompts", _prompts, model, callback))

        def build() -> Verdict:
            fit(["--config", str(self.training)], LooksInsteadOfTraining)
            return Verdict("training", "ok", f"the settings in {self.training} are known and go together")

        yield told("training", build)
        yield from verdicts


def _first_batch(data: FeatureCacheDataModule) -> Verdict:
    """Read a micro-batch, and see whether loader workers could hand such batches over."""
    data.setup()
    loader = data.train_dataloader()
    plan = next(iter(loader.sampler))
    batch = loader.dataset[plan]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in batch.values())
    steps = len(loader) // data.trainer.accumulate_grad_batches
    found = f"{data.store.location} fits; an epoch has {steps:,} steps; the first batch was read, {decimal(num_bytes)}"
    needed = num_bytes * BATCHES_AHEAD * data.num_workers * data.trainer.num_devices
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if needed > free:
        return Verdict(
            "training data",
            "doubtful",
            f"{found}; loader workers would hold {decimal(needed)} in shared memory, and {decimal(free)} are free",
            "Lower data.num_workers or data.batch_tokens, or start the container with a larger --shm-size.",
        )
    return Verdict("training data", "ok", found)


def _room_for_checkpoints(model: DFlashModule, trainer: L.Trainer) -> Verdict:
    """Compare the checkpoints that are kept with the free disk."""
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in Drafter(model.drafter_config).parameters())
    savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
    # One more than is kept: the old one goes when the new one is there.
    kept = sum(max(saver.save_top_k, 1) + bool(saver.save_last) for saver in savers) + 1
    folder = Path(next((saver.dirpath for saver in savers if saver.dirpath), trainer.default_root_dir))
    needed, free = kept * weights * BYTES_PER_WEIGHT, free_disk(folder)
    if any(saver.save_top_k == -1 for saver in savers):
        return Verdict(
            "checkpoints",
            "doubtful",
            f"save_top_k -1 keeps every checkpoint, {decimal(weights * BYTES_PER_WEIGHT)} each; {decimal(free)} are "
            f"free for {folder}",
            "Set save_top_k to how many are wanted.",
        )
    found = (
        f"{weights:,} weights; up to {kept} checkpoints take {decimal(needed)}, {decimal(free)} are free for {folder}"
    )
    if needed > free:
        return Verdict("checkpoints", "fails", found, "Free some disk, or give the ModelCheckpoints another dirpath.")
    return Verdict("checkpoints", "ok", found)


def _prompts(model: DFlashModule, decoding: DecodedAcceptance) -> Verdict:
    tokenizer = load_tokenizer(model.target_name)
    prompts = load_prompts(decoding.prompts_path, tokenizer, limit=decoding.limit, thinking=decoding.thinking)
    if not prompts:
        return Verdict("held-out prompts", "fails", f"{decoding.prompts_path} holds no prompt", "Give another file.")
    longest = max(len(prompt.token_ids) for prompt in prompts)
    return Verdict("held-out prompts", "ok", f"{len(prompts)} from {decoding.prompts_path}, up to {longest} tokens")
