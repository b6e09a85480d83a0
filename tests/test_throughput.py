"""What counts as a step's time and what as waiting for data, on a clock that only the test moves."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers import MASK_TOKEN_ID
from lightning.pytorch.callbacks import ModelCheckpoint
from training_helpers import RecordSteps, make_trainer, random_sample, write_cache

from callbacks import Throughput
from datamodules import FeatureCacheDataModule
from datamodules.loader import MicroBatchDataset
from dflash_lightning.config import DrafterSettings
from dflash_lightning.training.module import DFlashModule

DRAFTER = DrafterSettings(num_layers=1, block_size=4, target_layer_ids=[1, 3], mask_token_id=MASK_TOKEN_ID)
ACCUMULATION, STEPS = 2, 8


class Clock:
    """Stands for the module `time`, in seconds that are exact in binary."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Compute(L.Callback):
    """Lets each micro-batch take `compute` seconds, and each validation 1,000."""

    def __init__(self, clock: Clock, compute: float):
        self.clock, self.compute = clock, compute

    def on_after_backward(self, *_: Any) -> None:
        self.clock.now += self.compute

    def on_validation_start(self, *_: Any) -> None:
        self.clock.now += 1000


class SlowCheckpoint(ModelCheckpoint):
    """Takes 100 seconds to save after each step. Lightning calls it after all other callbacks."""

    def __init__(self, clock: Clock, folder: Path):
        super().__init__(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        self.clock = clock

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.clock.now += 100


@pytest.fixture(scope="module")
def cache(llama_folder, tmp_path_factory) -> str:
    samples = [random_sample(f"s{i}", 14 + i, 3, 64, seed=i) for i in range(17)]
    path = tmp_path_factory.mktemp("data") / "cache"
    return str(write_cache(path, samples, target=llama_folder, layer_ids=[1, 3], hidden_size=32))


@pytest.fixture
def train(cache, llama_folder, monkeypatch):
    """Trains on a loader and a device of given seconds a micro-batch; returns what was logged."""
    clock, read = Clock(), MicroBatchDataset.__getitem__
    monkeypatch.setattr("callbacks.throughput.time", clock)
    monkeypatch.setattr("datamodules.loader.time", clock)

    def run(folder: Path, *, wait: float, compute: float, resume: Path | None = None) -> RecordSteps:
        def slow_read(dataset, plan):
            clock.now += wait
            return read(dataset, plan)

        monkeypatch.setattr(MicroBatchDataset, "__getitem__", slow_read)
        logger = RecordSteps()
        trainer = make_trainer(
            "plain",
            max_steps=STEPS,
            accumulate_grad_batches=ACCUMULATION,
            logger=logger,
            enable_checkpointing=True,
            callbacks=[SlowCheckpoint(clock, folder), Throughput(), Compute(clock, compute)],
            val_check_interval=3 * ACCUMULATION,
            check_val_every_n_epoch=None,
        )
        data = FeatureCacheDataModule(cache, batch_tokens=90, num_anchors=3, validation_fraction=0.1)
        trainer.fit(DFlashModule(str(llama_folder), DRAFTER), datamodule=data, ckpt_path=resume)
        return logger

    return run


@pytest.mark.parametrize(("wait", "compute", "share"), [(0.0, 0.5, 0.0), (1.5, 0.5, 0.75)])
def test_only_a_slow_loader_counts_as_waiting(train, tmp_path, wait, compute, share):
    logged = train(tmp_path, wait=wait, compute=compute)
    assert logged.values("perf/data_wait_share") == [share] * STEPS
    step = ACCUMULATION * (wait + compute)
    assert logged.values("perf/step_seconds") == [step] * STEPS
    assert logged.values("perf/training_seconds") == [step * (n + 1) for n in range(STEPS)]


def test_memory_is_what_the_kernel_counts(train, tmp_path):
    def peak() -> float:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) / 2**20

    before = peak()
    logged = train(tmp_path, wait=0.0, compute=0.5)
    assert logged.values("perf/device_memory_gib") == [0.0] * STEPS
    # The kernel adds up its pages from time to time, so that the two counts of it differ by some of them.
    for value in logged.values("perf/host_memory_gib"):
        assert 0.98 * before <= value <= 1.02 * peak()


def test_totals_go_on_after_a_resume(train, tmp_path):
    whole = train(tmp_path / "whole", wait=0.25, compute=0.5)
    resumed = train(tmp_path / "resumed", wait=0.25, compute=0.5, resume=tmp_path / "whole" / "step=3.ckpt")
    for name in ("perf/training_seconds", "perf/label_tokens"):
        assert resumed.values(name) == whole.values(name)[3:]
        assert len(resumed.values(name)) == STEPS - 3
