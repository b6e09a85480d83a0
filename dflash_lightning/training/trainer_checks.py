"""What Lightning's trainer has to be like; anything else is refused, as it would train something else or not at all."""

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed import is_torchelastic_launched

from dflash_lightning.distributed import launched_place
from dflash_lightning.errors import ConfigError
from dflash_lightning.training.strategy import DFlashDeepSpeedStrategy
from dflash_lightning.wording import counted

OURS = "{class_path: dflash_lightning.training.strategy.DFlashDeepSpeedStrategy, init_args: {stage: 2}}"


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse a strategy, precision, accumulation or number of processes with which training would go wrong.

    Raises:
        ConfigError: with what to set instead.
    """
    check_settings(trainer)
    _check_world(trainer)


def check_settings(trainer: L.Trainer) -> None:
    """The part of `check_trainer` that doesn't depend on how this process was started."""
    if trainer.accumulate_grad_batches < 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}; expected 1 or more micro-batches "
            "a step."
        )
    if trainer.log_every_n_steps < 1:
        raise ConfigError(f"trainer.log_every_n_steps is {trainer.log_every_n_steps}; expected 1 or more steps.")
    if trainer.limit_train_batches == 0:
        raise ConfigError("trainer.limit_train_batches is 0, so that nothing would be trained; leave it out.")
    if trainer.overfit_batches:
        raise ConfigError(
            "trainer.overfit_batches would put Lightning's own sampler in the place of ours. To overfit, prepare and "
            "capture a few prompts."
        )
    if isinstance(getattr(trainer, "val_check_interval", None), int):
        _check_interval(trainer, trainer.val_check_interval)
    _check_strategy(trainer)
    _check_precision(trainer)


def _check_strategy(trainer: L.Trainer) -> None:
    strategy, name = trainer.strategy, type(trainer.strategy).__name__
    if isinstance(strategy, DeepSpeedStrategy) and not isinstance(strategy, DFlashDeepSpeedStrategy):
        raise ConfigError(
            f"trainer.strategy is Lightning's own {name}. It divides the gradient by accumulate_grad_batches twice, "
            f"and ignores its other settings where a DeepSpeed `config` is given. Set trainer.strategy to {OURS}."
        )
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        raise ConfigError(f"trainer.strategy is {name}; expected auto, ddp, or {OURS}, which shards.")


def _check_precision(trainer: L.Trainer) -> None:
    precision = str(trainer.precision)
    with_deepspeed = isinstance(trainer.strategy, DeepSpeedStrategy)
    if precision != "32-true" and not (precision == "bf16-mixed" and with_deepspeed):
        raise ConfigError(
            f"trainer.precision is {precision} with {type(trainer.strategy).__name__}; expected 32-true, or bf16-mixed "
            f"(bf16 weights, float32 masters) with trainer.strategy {OURS}."
        )


def _check_world(trainer: L.Trainer) -> None:
    place = launched_place()
    if place.world_size == 1 and not is_torchelastic_launched():
        if trainer.num_nodes > 1:
            raise ConfigError(
                f"trainer.num_nodes is {trainer.num_nodes}, but this process was started by hand and would wait for "
                "the others in vain. Start it on every node by torchrun or srun (conf/cluster/), or set it to 1."
            )
        return  # by hand, or by Lightning on this machine
    devices, nodes = trainer.num_devices, trainer.num_nodes
    if (devices * nodes, nodes) != (place.world_size, place.num_nodes):
        per_node = place.world_size // place.num_nodes
        raise ConfigError(
            f"the launcher started {place.world_size} processes on {place.num_nodes} nodes, but trainer.devices is "
            f"{devices} and trainer.num_nodes {nodes}. Set trainer.devices to {per_node} and trainer.num_nodes to "
            f"{place.num_nodes}, or start other processes."
        )


def check_steps_are_whole(trainer: L.Trainer) -> None:
    """Refuse epochs and validations that end inside an optimizer step, to be called when training starts.

    DeepSpeed would go on counting over the end of such an epoch, and a checkpoint made there would lack the gradient
    that was summed up.

    Raises:
        ConfigError: with what to set instead.
    """
    accumulation = trainer.accumulate_grad_batches
    if not hasattr(trainer, "val_check_interval"):  # Lightning sets it to numbers only
        raise ConfigError(
            "trainer.val_check_interval is a time: each rank would validate by its own clock, in the middle of steps. "
            "Give a number of micro-batches, or a share of the epoch."
        )
    if trainer.num_training_batches % accumulation:
        raise ConfigError(
            f"trainer.limit_train_batches leaves {trainer.num_training_batches} micro-batches of each rank in an "
            f"epoch, and a step takes {accumulation} (trainer.accumulate_grad_batches). Set it to a multiple."
        )
    if trainer.val_check_batch not in (None, float("inf")):
        _check_interval(trainer, trainer.val_check_batch)
    _warn_of_unseen_end(trainer)


def _check_interval(trainer: L.Trainer, batches: int) -> None:
    accumulation = trainer.accumulate_grad_batches
    if batches % accumulation:
        raise ConfigError(
            f"trainer.val_check_interval {trainer.val_check_interval} validates after every {batches} micro-batches, "
            f"and a step takes {accumulation} (trainer.accumulate_grad_batches). Set it to a multiple."
        )


def _warn_of_unseen_end(trainer: L.Trainer) -> None:
    """Tell of steps after the last validation, which is where checkpoints are saved."""
    by_batches = trainer.check_val_every_n_epoch is None and trainer.val_check_batch not in (None, float("inf"))
    if trainer.max_steps < 1 or not by_batches:
        return
    after = trainer.max_steps % max(1, trainer.val_check_batch // trainer.accumulate_grad_batches)
    if after:
        rank_zero_warn(
            f"The last validation is {counted(after, 'step')} before the end of the training, at step "
            f"{trainer.max_steps - after} of {trainer.max_steps}. What comes after it is neither decoded nor saved by "
            "a ModelCheckpoint that saves at validations. Choose a trainer.val_check_interval that divides max_steps."
        )
