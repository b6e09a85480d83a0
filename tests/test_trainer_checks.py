"""Trainers that would train something else than they seem to are refused, with what to set instead."""

import lightning as L
import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from test_distributed import SRUN_TASK, TORCHRUN

from dflash_lightning.errors import ConfigError
from dflash_lightning.training.strategy import DFlashDeepSpeedStrategy
from dflash_lightning.training.trainer_checks import check_steps_are_whole, check_trainer


def trainer(**options) -> L.Trainer:
    return L.Trainer(**{"accelerator": "cpu", "logger": False, "enable_checkpointing": False, **options})


def replaced(strategy) -> L.Trainer:
    """A strategy that Lightning makes on GPUs only, in a trainer without one."""
    made = trainer()
    made._accelerator_connector.strategy = strategy
    return made


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16-mixed"}, "precision is bf16-mixed with SingleDeviceStrategy; expected 32-true, or"),
        ({"precision": "64-true"}, "precision is 64-true"),
        ({"precision": "16-mixed", "strategy": DFlashDeepSpeedStrategy()}, "precision is 16-mixed with DFlashDeep"),
        ({"precision": "bf16-true", "strategy": DFlashDeepSpeedStrategy()}, "precision is bf16-true"),
    ],
)
def test_a_precision_that_would_not_be_trained_in_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        check_trainer(trainer(**options))


def test_lightnings_own_deepspeed_and_other_strategies_are_refused():
    with pytest.raises(ConfigError, match=r"Lightning's own DeepSpeedStrategy.* Set trainer.strategy to \{class_"):
        check_trainer(replaced(DeepSpeedStrategy(config={"zero_optimization": {"stage": 2}}, stage=3)))
    with pytest.raises(ConfigError, match=r"trainer.strategy is FSDPStrategy; expected auto, ddp, or"):
        check_trainer(replaced(FSDPStrategy()))


@pytest.mark.parametrize("option", [{"offload_optimizer": True}, {"bucket_size": 1000}])
def test_options_without_effect_at_stage_0_are_refused(option):
    with pytest.raises(ConfigError, match="no effect at ZeRO stage 0"):
        DFlashDeepSpeedStrategy(stage=0, **option)


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        (TORCHRUN, {"devices": 1}, "started 4 processes on 2 nodes, but trainer.devices is 1 and trainer.num_nodes 1"),
        (TORCHRUN, {"devices": 4}, "Set trainer.devices to 2 and trainer.num_nodes to 2"),
        (TORCHRUN, {"devices": 2, "num_nodes": 2}, None),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}, {"devices": 2}, "started 1 processes"),
        (SRUN_TASK, {"devices": 8}, "Set trainer.devices to 4 and trainer.num_nodes to 2"),
        (SRUN_TASK, {"devices": 4, "num_nodes": 2}, None),
        ({}, {"devices": 2}, None),  # Lightning starts the second
    ],
)
def test_devices_and_nodes_are_those_of_the_launcher(monkeypatch, environment, options, message):
    made = trainer(**options)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if message is None:
        check_trainer(made)
    else:
        with pytest.raises(ConfigError, match=message):
            check_trainer(made)


def test_validations_by_the_clock_are_refused():
    by_the_clock = trainer(val_check_interval="00:00:10:00")
    with pytest.raises(ConfigError, match="is a time: each rank would validate by its own clock"):
        check_steps_are_whole(by_the_clock)


def test_several_nodes_without_a_launcher_are_refused():
    with pytest.raises(ConfigError, match="num_nodes is 2, but this process was started by hand"):
        check_trainer(trainer(num_nodes=2, strategy="ddp"))


@pytest.mark.parametrize(("max_steps", "told"), [(9, False), (10, True), (-1, False)])
def test_steps_after_the_last_validation_are_told_of(recwarn, max_steps, told):
    made = trainer(max_steps=max_steps, val_check_interval=6, check_val_every_n_epoch=None, accumulate_grad_batches=2)
    made.fit_loop.max_batches = 12
    made.val_check_batch = 6
    check_steps_are_whole(made)
    assert told == any("The last validation is 1 step before the end" in str(warning.message) for warning in recwarn)
