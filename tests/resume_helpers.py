"""Trainings that note all that a resumed run must repeat."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from helpers import MASK_TOKEN_ID, load_tiny, make_drafter
from training_helpers import Job, Outcome, random_sample, write_cache

from dflash_lightning.config import DrafterSettings
from dflash_lightning.training.losses import LossSettings
from dflash_lightning.training.module import OptimizerSettings

LAYERS, HIDDEN = [1, 3], 32


class Trace(L.Callback):
    """What each micro-batch of this rank was, and the moments of Adam at the end.

    It draws a random number at each micro-batch, as a drafter with dropout would.
    """

    def __init__(self):
        self.micro_batches: list[dict[str, Any]] = []
        self.moments: dict[str, torch.Tensor] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # noqa: ARG002
        self.micro_batches.append(
            {
                "step": trainer.global_step,
                "samples": batch["samples"].tolist(),
                "anchors": batch["anchors"].tolist(),
                "learning rate": trainer.optimizers[0].param_groups[0]["lr"],
                "random numbers": (torch.rand(1).item(), np.random.rand(), random.random()),
            }
        )

    def on_train_end(self, trainer, pl_module):  # noqa: ARG002
        from deepspeed.utils import safe_get_full_optimizer_state

        for name, parameter in pl_module.drafter.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                self.moments[f"{moment} {name}"] = safe_get_full_optimizer_state(parameter, moment).clone()


@dataclass
class TracedOutcome(Outcome):
    micro_batches: list[dict[str, Any]]
    moments: dict[str, torch.Tensor]


class TracedJob(Job):
    """A job under DeepSpeed whose outcome holds the trace, too."""

    def run(self, **options) -> TracedOutcome:
        L.seed_everything(1, verbose=False)
        trace = Trace()
        outcome = Job.run(replace(self, callbacks=(trace,)), **options)
        return TracedOutcome(**vars(outcome), micro_batches=trace.micro_batches, moments=trace.moments)


def write_random_cache(folder: Path, target: Path, samples: int) -> Path:
    texts = [random_sample(f"s{i}", 14 + i % 9, 3, len(LAYERS) * HIDDEN, seed=i) for i in range(samples)]
    return write_cache(folder, texts, target=target, layer_ids=LAYERS, hidden_size=HIDDEN)


def make_job(target: Path, **settings) -> TracedJob:
    """A job whose Adam, by its large eps, shows a gradient of the wrong size."""
    return TracedJob(
        target=str(target),
        drafter=DrafterSettings(num_layers=2, block_size=4, target_layer_ids=LAYERS, mask_token_id=MASK_TOKEN_ID),
        loss=LossSettings(gamma=2.5),
        optimizer=OptimizerSettings(lr=0.05, eps=0.01, warmup_ratio=0.3),
        initial=make_drafter(load_tiny(target), block_size=4, scale=3.0).state_dict(),
        clip=0.5,
        **settings,
    )


def stranger(job: TracedJob) -> TracedJob:
    """The job with other weights: a resumed run must take its own from the checkpoint."""
    return replace(job, initial={name: torch.zeros_like(weight) for name, weight in job.initial.items()})
