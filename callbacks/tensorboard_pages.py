"""What a run shows in TensorBoard besides its scalars: the layout of the charts, what the run is, and its decodings."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from callbacks.acceptance import DecodingObserver
from callbacks.decoding_samples import sample_page
from callbacks.run_record import run_facts
from callbacks.tensorboard_layout import layout_summary
from datamodules import FeatureCacheDataModule
from dflash_lightning.evaluation.plot import draw_report
from dflash_lightning.evaluation.prompt_results import PromptResult
from dflash_lightning.target import load_tokenizer
from dflash_lightning.training.initial_drafter import CHOSEN
from dflash_lightning.training.module import DFlashModule

SAMPLES = 3
DATA_SETTINGS = ("batch_tokens", "num_anchors", "validation_fraction", "shard_window", "seed")
TRAINER_SETTINGS = ("max_steps", "accumulate_grad_batches", "world_size", "precision", "gradient_clip_val")
# What the table of runs compares: the latest value of each.
RESULTS = ("decode/tau", "decode/speedup", "decode/teacher_forced_tau", "val/loss")


def tensorboard_writers(trainer: L.Trainer) -> list[SummaryWriter]:
    """The writers of the trainer's TensorBoard loggers; none but on rank 0."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    return [logger.experiment for logger in loggers] if trainer.is_global_zero else []


def logged_step(trainer: L.Trainer) -> int:
    """Where Lightning draws what belongs to the latest optimizer step: it numbers them from 0."""
    return max(trainer.global_step - 1, 0)


class TensorBoardPages(DecodingObserver):
    """Writes, on rank 0 and for every TensorBoard logger, all that isn't a scalar.

    - the layout of the page "Custom Scalars" (`callbacks.tensorboard_layout`);
    - ``run/settings`` and ``run/versions`` as text, and settings beside the run's latest results as hyperparameters;
    - with each decoding: ``decode/committed_by_round`` (histogram), ``decode/acceptance_by_slot`` (picture) and
      ``decode/samples`` (text).

    A run that starts again from a checkpoint takes back what was logged after it.
    """

    def __init__(self, settings: str, first_step: int):
        """
        Args:
            settings: the run's configuration as YAML.
            first_step: optimizer steps behind the checkpoint that the run goes on from; 0 for a new one.
        """
        self.settings, self.first_step = settings, first_step

    def on_fit_start(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:
        writers = tensorboard_writers(trainer)
        if not writers:
            return
        self._tokenizer = load_tokenizer(pl_module.target_name)
        self._hparams = hparams(hyperparameters(trainer, pl_module), dict.fromkeys(RESULTS, 0.0))
        for writer in writers:
            # Readers forget what an earlier start logged from this step on.
            restart = SessionLog(status=SessionLog.START)
            writer.file_writer.add_event(Event(step=self.first_step, session_log=restart))
            writer.file_writer.add_summary(layout_summary(pl_module.drafter_config.block_size))
            writer.add_text("run/settings", f"```yaml\n{self.settings}\n```", self.first_step)
            writer.add_text("run/versions", facts_page(run_facts(trainer)), self.first_step)
            for summary in self._hparams[:2]:  # which settings and results there are, and this run's settings
                writer.file_writer.add_summary(summary)

    def on_decoded(self, trainer: L.Trainer, report: dict[str, Any], results: Sequence[PromptResult]) -> None:
        step = logged_step(trainer)
        committed = np.array([n for result in results for n in result.committed])
        for writer in tensorboard_writers(trainer):
            if len(committed):
                edges = np.arange(len(report["histogram"]) + 1) + 0.5
                writer.add_histogram("decode/committed_by_round", committed, step, bins=edges)
            writer.add_figure("decode/acceptance_by_slot", draw_report(report, f"step {report['step']}"), step)
            writer.add_text("decode/samples", sample_page(results[:SAMPLES], self._tokenizer, report["step"]), step)

    def on_fit_end(self, trainer: L.Trainer, pl_module: DFlashModule) -> None:  # noqa: ARG002
        for writer in tensorboard_writers(trainer):
            writer.file_writer.add_summary(self._hparams[2])  # that the run has ended well


def hyperparameters(trainer: L.Trainer, module: DFlashModule) -> dict[str, str | float]:
    """The settings that runs differ by, with defaults resolved; names with dots."""
    data: FeatureCacheDataModule = trainer.datamodule
    return _flat(
        {
            "target": module.target_name,
            "start_from": module.start_from and str(module.start_from),
            "drafter": {name: getattr(module.drafter_config, name) for name in CHOSEN},
            "loss": asdict(module.loss_settings),
            "optimizer": asdict(module.optimizer_settings),
            "data": {"cache": data.store.location} | {name: getattr(data, name) for name in DATA_SETTINGS},
            "trainer": {name: getattr(trainer, name) for name in TRAINER_SETTINGS},
        }
    )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, str | float]:
    flat: dict[str, str | float] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif value is not None:
            flat[prefix + name] = value if isinstance(value, str | int | float) else json.dumps(value)
    return flat


def facts_page(facts: dict[str, Any]) -> str:
    """`run_facts` as Markdown."""
    rows = {**facts, "command": f"`{facts['command']}`"}
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows.items())
