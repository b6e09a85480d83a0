"""``fit``: Lightning's own command line around our module and data module."""

import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from callbacks.acceptance import DecodedAcceptance
from callbacks.early_check import CheckedEarly
from callbacks.fault_watch import WatchForFaults
from callbacks.run_record import RunRecord
from callbacks.tensorboard_pages import TensorBoardPages, tensorboard_writers
from callbacks.training_progress import TrainingProgress
from datamodules import FeatureCacheDataModule
from dflash_lightning.distributed import is_of_lost_rank, launched_place
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import ConfigError, DFlashError, LostRankError
from dflash_lightning.nulls import refuse_nulls
from dflash_lightning.progress import say
from dflash_lightning.report import report
from dflash_lightning.training.module import DFlashModule
from dflash_lightning.training.resume import OneStart, check_same_run, choose_start
from dflash_lightning.training.trainer_checks import check_trainer
from dflash_lightning.usage import class_that_fails, first_of_ours, usage_errors
from dflash_lightning.wording import counted
from dflash_lightning.writable import check_writable

# Said by the libraries about each other; nothing that a user could act on.
HARMLESS_WARNINGS = (
    r"LightningCLI's args parameter is intended.*",
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
    r".*is not supported by the model summary.*",
    r"Checkpoint directory .* exists and is not empty.*",
    r".*`torch.jit.script_method` is deprecated.*",
    r".*The '(train|val)_dataloader' does not have many workers.*",
)


class FitCLI(LightningCLI):
    """LightningCLI with one subcommand, and one way to go on from a checkpoint."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """`fit` alone; what it skips is given by other settings, or has no effect with DeepSpeed."""
        given = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        return {"fit": {*given, "ckpt_path", "weights_only"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--resume",
            type=str | None,
            help="A checkpoint to go on from, or `auto`: the newest complete one among the folders that the "
            "ModelCheckpoint callbacks write to; none there starts anew.",
        )
        # A line of our own says what is trained.
        parser.set_defaults({"trainer.enable_model_summary": False})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """As Lightning does, and refuse what neither it nor jsonargparse refuses."""
        super().parse_arguments(parser, args)
        settings = self.config["fit"]
        refuse_nulls(self._parser("fit"), settings)
        if not isinstance(settings.seed_everything, bool) and not 0 <= settings.seed_everything < 2**32:
            raise ConfigError(f"seed_everything is {settings.seed_everything}; expected 0 to {2**32 - 1}.")

    def instantiate_trainer(self, **settings: Any) -> Trainer:
        """As Lightning does, with our progress; what it says of a wrong setting is for the user."""
        given = self.config_init["fit"]["trainer"]
        callbacks = list(given.callbacks or [])
        if given.enable_progress_bar is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.append(TrainingProgress())
        try:
            return super().instantiate_trainer(callbacks=callbacks, **settings)
        except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
            no_gpu = " `doctor` says why. To train on the CPU set trainer.accelerator to cpu, trainer.devices to 1."
            advice = no_gpu if "gpu backend" in str(error) else ""
            raise first_of_ours(error) or ConfigError(f"trainer: {error}{advice}") from error

    def fit(self, model: DFlashModule, datamodule: FeatureCacheDataModule) -> None:
        """Train from the chosen start."""
        check_trainer(self.trainer)  # before Lightning starts processes
        self.check_early()
        start = choose_start(self.config_init["fit"]["resume"], self.trainer)
        if start.message:
            rank_zero_info(start.message)
        if start.checkpoint is not None:
            check_same_run(start.checkpoint, model.making(), self.trainer)
            if 0 < self.trainer.max_steps <= start.step:
                rank_zero_info(f"nothing is left to train: trainer.max_steps is {self.trainer.max_steps}")
        rank_zero_info(_described(model))
        settings = self._parser("fit").dump(self.config["fit"])
        pages = TensorBoardPages(settings, start.step)
        self.trainer.callbacks += [OneStart(start), RunRecord(start.step), WatchForFaults(), pages]
        self.trainer.fit(model, datamodule=datamodule, ckpt_path=start.checkpoint)
        self._tell_best()
        for writer in tensorboard_writers(self.trainer):
            report(Path(writer.log_dir))

    def check_early(self, apart_from: type[CheckedEarly] | tuple[()] = ()) -> None:
        """Refuse folders that can't be written, and what callbacks refuse before the start.

        Args:
            apart_from: callbacks that aren't asked.

        Raises:
            DFlashError: with what to set instead.
        """
        if launched_place().rank == 0:  # logs are written by no other
            logs = [str(logger.save_dir) for logger in self.trainer.loggers if logger.save_dir]
            for folder in logs or [self.trainer.default_root_dir]:
                if "://" not in folder:
                    check_writable("the folder for logs", Path(folder), folder=True)
        for saver in self.trainer.checkpoint_callbacks:
            if isinstance(saver, ModelCheckpoint) and saver.dirpath:
                check_writable("dirpath of ModelCheckpoint", Path(saver.dirpath), folder=True)
        for callback in self.trainer.callbacks:
            if isinstance(callback, CheckedEarly) and not isinstance(callback, apart_from):
                callback.check()
        decodes = any(isinstance(callback, DecodedAcceptance) for callback in self.trainer.callbacks)
        for saver in self.trainer.checkpoint_callbacks:
            if not decodes and (monitor := getattr(saver, "monitor", None) or "").startswith("decode/"):
                raise ConfigError(
                    f"a ModelCheckpoint monitors {monitor}, which DecodedAcceptance measures, and that isn't among "
                    "trainer.callbacks. Add callbacks.DecodedAcceptance, or monitor val/loss."
                )

    def _tell_best(self) -> None:
        """Name the checkpoint to go on with: the first ModelCheckpoint's best."""
        saver = self.trainer.checkpoint_callback
        if self.trainer.is_global_zero and saver is not None and saver.best_model_path:
            say(f"best checkpoint: {saver.best_model_path}, for `evaluate --drafter` and `export --checkpoint`")


def _described(model: DFlashModule) -> str:
    """What is trained, in a line."""
    config = model.drafter_config
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in Drafter(config).parameters())
    return (
        f"drafter: {weights:,} weights, {counted(config.num_layers, 'layer')}, blocks of {config.block_size}, mask "
        f"token {config.mask_token_id}; reads layers {list(config.target_layer_ids)} of {model.target_name}"
    )


def fit(arguments: Sequence[str], cli: type[FitCLI] | None = None) -> FitCLI:
    """Train as the given command line arguments and YAML files say; returns the CLI with its trainer and module.

    Unknown keys are refused. The full configuration of the run is saved as ``config.yaml`` in its log folder.

    Args:
        cli: does something else than training with the same settings.
    """
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    program = "dflash-lightning fit"
    try:
        with usage_errors(program):
            return (cli or FitCLI)(
                DFlashModule,
                FeatureCacheDataModule,
                args=["fit", *arguments],
                seed_everything_default=0,
                save_config_kwargs={"overwrite": True},
                parser_kwargs={"exit_on_error": False, "fit": {"prog": program, "exit_on_error": False}},
                auto_configure_optimizers=False,
            )
    except DFlashError:
        raise
    except (ValueError, MisconfigurationException, FileNotFoundError) as error:
        if mistake := _users_mistake(error):
            raise mistake from error
        raise
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                f"the port at which the processes of this run would meet is in use: {str(error).splitlines()[0]}\n"
                "Another run on this machine has it. Give torchrun another --master-port, or set no MASTER_PORT for a "
                "run of one process."
            ) from error
        if not is_of_lost_rank(error):
            raise
        raise LostRankError(
            f"rank {launched_place().rank} lost another process of the run: {error}\nIts own log says why it ended; "
            "without a log its machine or network failed. Start all processes again with --resume auto."
        ) from error
    except SIGTERMException as stop:
        # Lightning would exit with 0, as if training had finished.
        raise SystemExit(128 + signal.SIGTERM) from stop


def _users_mistake(error: Exception) -> DFlashError | None:
    """What to tell the user: our own error where another library wrapped it, or its word on a setting."""
    if isinstance(error, MisconfigurationException | FileNotFoundError):
        return first_of_ours(error) or ConfigError(str(error))
    return first_of_ours(error) or class_that_fails(error)
