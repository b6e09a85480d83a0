"""Short trainings for the tests, in one process or several."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from command_client import command_server, meeting_place
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

from datamodules import FeatureCacheDataModule
from datamodules.loader import collate
from dflash_lightning.cache import CacheManifest, Sample, create_or_join
from dflash_lightning.cache.storage import Storage, default_compression
from dflash_lightning.config import DrafterSettings
from dflash_lightning.target import target_identity
from dflash_lightning.training.gathering import gather_drafter
from dflash_lightning.training.losses import LossSettings
from dflash_lightning.training.module import ContextBatch, DFlashModule, OptimizerSettings
from dflash_lightning.training.strategy import DFlashDeepSpeedStrategy

LIGHTNING_NAMES = {"plain": "auto", "ddp": "ddp"}


class RecordSteps(Logger):
    """A logger that keeps what it is given: pairs of step and metrics."""

    name = version = "memory"

    def __init__(self):
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics, step=None):
        self.logged.append((step, dict(metrics)))

    def log_hyperparams(self, *_args, **_kwargs):
        pass

    def values(self, name: str) -> list[float]:
        return [metrics[name] for _, metrics in self.logged if name in metrics]


def make_trainer(strategy: str, **options) -> L.Trainer:
    """A silent CPU trainer; ``strategy`` is plain (one process), ddp, zero0 to zero3, or with +offload."""
    options = {
        "precision": "32-true",
        "max_epochs": -1,
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "logger": False,
        **options,
    }
    return L.Trainer(
        accelerator="cpu",
        strategy=LIGHTNING_NAMES.get(strategy)
        or DFlashDeepSpeedStrategy(int(strategy[4]), offload_optimizer="+offload" in strategy),
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


@dataclass(frozen=True)
class GivenSample:
    """A sample with its anchors given instead of drawn; none at all is allowed."""

    sample: Sample
    anchors: np.ndarray


def random_sample(name: str, tokens: int, prompt: int, feature_size: int, seed: int) -> Sample:
    """Random features and tokens; everything after the prompt is supervised."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    return Sample(
        sample_id=name,
        input_ids=rng.integers(4, 260, tokens, dtype=np.int32),
        loss_mask=(np.arange(tokens) >= prompt).astype(np.uint8),
        features=torch.randn(tokens, feature_size, generator=generator).bfloat16(),
    )


def write_cache(
    path: Path, samples: list[Sample], *, target: Path, layer_ids, hidden_size: int, storage: Storage = "bfloat16"
) -> Path:
    """A finished cache of two shards."""
    shards = [samples[: len(samples) // 2], samples[len(samples) // 2 :]]
    manifest = CacheManifest(
        target=target_identity(str(target)),
        target_layer_ids=tuple(layer_ids),
        hidden_size=hidden_size,
        storage=storage,
        compression=default_compression(storage),
        generation={},
        capture={},
        dataset_sha256="d" * 64,
        max_length=max(len(sample.input_ids) for sample in samples),
        source={},
        code_version="0",
        shard_samples=tuple(map(len, shards)),
    )
    writer = create_or_join(path, manifest)
    for number, members in enumerate(shards):
        writer.write_shard(number, members)
    return path


class DealtSteps(torch.utils.data.Dataset):
    """This rank's micro-batches of given optimizer steps: each step's samples in turn to (micro-batch, rank)."""

    def __init__(self, steps: list[list[GivenSample]], *, rank: int, world_size: int, accumulation: int):
        self.steps, self.rank, self.world_size, self.accumulation = steps, rank, world_size, accumulation

    def __len__(self):
        return len(self.steps) * self.accumulation

    def __getitem__(self, index: int) -> ContextBatch:
        number, micro = divmod(index, self.accumulation)
        step = self.steps[number]
        size = len(step) // (self.world_size * self.accumulation)
        first = (micro * self.world_size + self.rank) * size
        members = step[first : first + size]
        return collate(
            [given.sample for given in members],
            [given.anchors for given in members],
            indices=range(number * len(step) + first, number * len(step) + first + size),
            anchors_in_step=sum(len(given.anchors) for given in step),
        )


class DealtData(L.LightningDataModule):
    """Given steps, all of as many samples; they are numbered through."""

    def __init__(self, steps: list[list[GivenSample]]):
        super().__init__()
        self.steps = steps

    def sample_ids(self, indices: Sequence[int]) -> list[str]:
        given = [given for step in self.steps for given in step]
        return [given[index].sample.sample_id for index in indices]

    def train_dataloader(self):
        trainer = self.trainer
        dealt = DealtSteps(
            self.steps,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            accumulation=trainer.accumulate_grad_batches,
        )
        return torch.utils.data.DataLoader(dealt, batch_size=None)


@dataclass
class Outcome:
    """What a training ended with, on this rank."""

    weights: dict[str, torch.Tensor]
    reported: list[float]
    gradient_norms: list[float]
    validation: list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A short training, cut in some way. ``steps`` are given optimizer steps; without them ``data`` are the arguments
    of the data module."""

    target: str
    drafter: DrafterSettings
    loss: LossSettings
    optimizer: OptimizerSettings
    initial: dict[str, torch.Tensor]
    steps: list[list[GivenSample]] | None = None
    data: dict[str, Any] = field(default_factory=dict)
    max_steps: int
    clip: float
    strategy: str = "plain"
    accumulation: int = 1
    devices: int = 1
    precision: str = "32-true"
    max_skipped_steps: int = 10
    callbacks: tuple[L.Callback, ...] = ()
    root: Path | None = None
    """Where callbacks write files."""
    save_to: Path | None = None
    """Where to save a checkpoint after each step."""
    resume: Path | None = None

    def run(self, **options) -> Outcome:
        module = DFlashModule(self.target, self.drafter, self.loss, self.optimizer, self.max_skipped_steps)
        module.configure_model()
        module.drafter.load_state_dict(self.initial)
        logger = RecordSteps()
        saving = [ModelCheckpoint(self.save_to, "{step}", every_n_train_steps=1, save_top_k=-1)] if self.save_to else []
        trainer = make_trainer(
            self.strategy,
            devices=self.devices,
            precision=self.precision,
            default_root_dir=self.root,
            max_steps=self.max_steps,
            accumulate_grad_batches=self.accumulation,
            gradient_clip_val=self.clip,
            logger=logger,
            callbacks=[*self.callbacks, *saving],
            enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in (*self.callbacks, *saving)),
            **options,
        )
        data = DealtData(self.steps) if self.steps else FeatureCacheDataModule(**self.data)
        trainer.fit(module, datamodule=data, ckpt_path=self.resume)
        assert trainer.global_step == self.max_steps
        return Outcome(
            weights={name: weight.clone() for name, weight in gather_drafter(module.drafter).state_dict().items()},
            reported=logger.values("train/loss"),
            gradient_norms=logger.values("train/grad_norm"),
            validation=[metrics for _, metrics in logger.logged if "val/loss" in metrics],
        )


def run_on_ranks(ranks: int, jobs: dict[Any, Job], folder: Path) -> list[dict[Any, Outcome]]:
    """Run jobs one after the other in so many processes, as torchrun would start them; the outcomes by job, for each
    rank."""
    torch.save(jobs, folder / "jobs.pt")
    worker, log, server = Path(__file__).parent / "train_worker.py", folder / "log.txt", command_server()
    arguments = (folder / "jobs.pt", folder)
    processes = server.launch(arguments, ranks, program=worker, log=log, **meeting_place())
    assert server.wait(processes) == [0] * ranks, log.read_text()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]
