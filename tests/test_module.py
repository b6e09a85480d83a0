"""What the Lightning module logs, optimizes, saves and refuses."""

import numpy as np
import pytest
import torch
from helpers import MASK_TOKEN_ID
from training_helpers import DealtData, GivenSample, Job, make_trainer, random_sample

from dflash_lightning.checkpoints import CHECKPOINT_KEY
from dflash_lightning.config import DrafterSettings
from dflash_lightning.errors import ConfigError, TargetError
from dflash_lightning.target import load_tables
from dflash_lightning.training.losses import LossSettings
from dflash_lightning.training.module import DFlashModule, OptimizerSettings

DRAFTER = DrafterSettings(num_layers=1, block_size=4, target_layer_ids=[1, 3], mask_token_id=MASK_TOKEN_ID)


def make_job(folder, **changes) -> Job:
    """Twelve steps of two samples with two anchors each."""
    steps = [
        [GivenSample(random_sample(f"{n}-{i}", 20, 3, 64, seed=2 * n + i), np.array([4, 9])) for i in range(2)]
        for n in range(12)
    ]
    module = DFlashModule(str(folder), DRAFTER)
    torch.manual_seed(0)
    module.configure_model()
    fields = {
        "target": str(folder),
        "drafter": DRAFTER,
        "loss": LossSettings(),
        "optimizer": OptimizerSettings(),
        "initial": module.drafter.state_dict(),
        "steps": steps,
        "max_steps": 12,
        "clip": 1.0,
    }
    return Job(**{**fields, **changes})


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_logged_value_is_the_mean_over_the_steps_since_the_last(llama_folder, accumulation):
    job = make_job(llama_folder, accumulation=accumulation)
    each = job.run().reported
    assert len(each) == 12
    windows = [each[:4], each[4:8], each[8:]]
    assert job.run(log_every_n_steps=4).reported == pytest.approx([np.mean(window) for window in windows], rel=1e-6)


def test_the_targets_tables_are_neither_optimized_nor_saved(qwen3_folder, tmp_path):
    job = make_job(qwen3_folder)
    module = DFlashModule(job.target, DRAFTER)
    trainer = make_trainer("plain", max_steps=2)
    trainer.fit(module, datamodule=DealtData(job.steps))
    optimized = [id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert sorted(optimized) == sorted(id(p) for p in module.drafter.parameters())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=False)
    assert set(checkpoint["state_dict"]) == {f"drafter.{name}" for name, _ in module.drafter.named_parameters()}
    assert checkpoint[CHECKPOINT_KEY]["drafter"] == module.drafter_config.to_dict()
    for used, stored in zip(("embedding", "head"), load_tables(job.target, dtype=torch.float32), strict=True):
        assert torch.equal(module._frozen[used], stored)


def test_warm_up_rises_to_the_peak_and_the_cosine_falls_to_zero():
    settings = OptimizerSettings(warmup_ratio=0.04)
    factors = [settings.scale(step, 300) for step in range(301)]
    assert factors[:12] == pytest.approx([(step + 1) / 12 for step in range(12)])
    naive = [0.5 * (1 + np.cos(np.pi * (step - 12) / 288)) for step in range(12, 301)]
    assert factors[12:] == pytest.approx(naive, abs=1e-12)
    assert OptimizerSettings(warmup_ratio=0.0).scale(0, 10) == 1.0


@pytest.mark.parametrize(
    ("option", "message"),
    [({"lr": 0.0}, "lr is 0.0"), ({"warmup_ratio": 1.0}, "warmup_ratio is 1.0"), ({"warmup_ratio": -0.1}, "-0.1")],
)
def test_optimizer_settings_out_of_range_are_refused(option, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerSettings(**option)


def test_a_schedule_without_an_end_is_refused(llama_folder):
    job = make_job(llama_folder)
    trainer = make_trainer("plain", max_epochs=1)
    with pytest.raises(ConfigError, match="max_steps is -1"):
        trainer.fit(DFlashModule(job.target, DRAFTER), datamodule=DealtData(job.steps))


@pytest.mark.parametrize("mask", [0, 2, 272])
def test_a_mask_token_with_another_meaning_is_refused(llama_folder, mask):
    with pytest.raises(ConfigError, match=f"Mask token id {mask}"):
        DFlashModule(str(llama_folder), DrafterSettings(target_layer_ids=[1], mask_token_id=mask))


def test_what_is_no_target_is_refused(tmp_path):
    with pytest.raises(TargetError, match="isn't a target"):
        DFlashModule(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_train_batches": 7}, "leaves 7 micro-batches .* a step takes 2"),
        ({"check_val_every_n_epoch": None, "val_check_interval": 3}, "val_check_interval 3 validates after every 3 "),
    ],
)
def test_epochs_and_validations_that_end_inside_a_step_are_refused(llama_folder, options, message):
    with pytest.raises(ConfigError, match=message):
        make_job(llama_folder, accumulation=2).run(**options)


def test_a_precision_that_would_not_be_trained_in_is_refused(llama_folder):
    with pytest.raises(ConfigError, match="precision is bf16-mixed"):
        make_job(llama_folder, precision="bf16-mixed").run()
