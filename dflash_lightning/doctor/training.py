"""Checks of a training's configuration: its settings, its data, and the room for its checkpoints."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.filesize import decimal

from callbacks import DecodedAcceptance
from callbacks.acceptance import check_validates
from datamodules import FeatureCacheDataModule
from dflash_lightning.doctor.machine import SHARED_MEMORY, free_disk
from dflash_lightning.doctor.parts import told
from dflash_lightning.doctor.verdict import Verdict
from dflash_lightning.drafter import Drafter
from dflash_lightning.library_output import tame_libraries
from dflash_lightning.training.fit import FitCLI, fit
from dflash_lightning.training.module import DFlashModule
from dflash_lightning.training.trainer_checks import check_settings
from dflash_lightning.wording import counted

# Of a checkpoint, for each weight: bfloat16, and in float32 the master and AdamW's two moments.
BYTES_PER_WEIGHT = 2 + 3 * 4
# A loader worker reads so many batches ahead.
BATCHES_AHEAD = 2


def check_training(training: Path) -> Iterator[Verdict]:
    """Build what `fit` would build of a YAML file, read one batch, and don't train."""
    verdicts: list[Verdict] = []

    class LooksInsteadOfTraining(FitCLI):
        def fit(self, model: DFlashModule, datamodule: FeatureCacheDataModule) -> None:
            check_settings(self.trainer)
            model.optimizer_settings.check_trainer(self.trainer)
            self.trainer.strategy.connect(model)
            datamodule.trainer = self.trainer
            verdicts.append(told("output folders", _places, self))
            verdicts.append(told("training data", _first_batch, datamodule))
            verdicts.append(told("checkpoints", _room_for_checkpoints, model, self.trainer))
            for callback in self.trainer.callbacks:
                if isinstance(callback, DecodedAcceptance):
                    verdicts.append(told("held-out prompts", _prompts, model, callback, datamodule))

    def build() -> Verdict:
        tame_libraries()  # again: Lightning came with this module
        with _no_news():
            fit(["--config", str(training)], LooksInsteadOfTraining)
        return Verdict("training", "ok", f"the settings in {training} are known and go together")

    yield told("training", build)
    yield from verdicts


@contextmanager
def _no_news() -> Iterator[None]:
    """Without what libraries tell of a training that begins: there is none."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _places(cli: FitCLI) -> Verdict:
    cli.check_early(apart_from=DecodedAcceptance)  # its prompts get a verdict of their own
    return Verdict("output folders", "ok", "logs, checkpoints and exports can be written")


def _first_batch(data: FeatureCacheDataModule) -> Verdict:
    """Read a micro-batch, and see whether loader workers could hand such batches over."""
    data.setup()
    loader = data.train_dataloader()
    plan = next(iter(loader.sampler))
    batch = loader.dataset.read(plan)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in batch.values())
    steps = len(loader) // data.trainer.accumulate_grad_batches
    epoch = f"an epoch has {counted(steps, 'step')}"
    found = f"{data.store.location} fits; {epoch}; the first batch was read, {decimal(num_bytes)}"
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
        f"{weights:,} weights; up to {counted(kept, 'checkpoint')} of {decimal(weights * BYTES_PER_WEIGHT)} each, "
        f"{decimal(free)} are free for {folder}"
    )
    if needed > free:
        return Verdict("checkpoints", "fails", found, "Free some disk, or give the ModelCheckpoints another dirpath.")
    return Verdict("checkpoints", "ok", found)


def _prompts(model: DFlashModule, decoding: DecodedAcceptance, data: FeatureCacheDataModule) -> Verdict:
    if hasattr(data, "validation_samples"):  # else its own verdict says what is wrong with the data
        check_validates(data)
    prompts = decoding.load_prompts(model.target_name)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    return Verdict(
        "held-out prompts", "ok", f"{len(prompts)} from {decoding.prompts_path}, up to {counted(longest, 'token')}"
    )
