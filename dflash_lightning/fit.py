"""``fit``: Lightning's own command line around our module and data module."""

import signal
import warnings
from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import SIGTERMException

from datamodules import FeatureCacheDataModule
from dflash_lightning.module import DFlashModule

# Said by the libraries about each other; nothing that a user could act on.
HARMLESS_WARNINGS = (
    r"LightningCLI's args parameter is intended.*",
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
    r".*is not supported by the model summary.*",
    r".*Experiment logs directory .* exists and is not empty.*",
    r".*`torch.jit.script_method` is deprecated.*",
    r".*The '(train|val)_dataloader' does not have many workers.*",
)


def fit(arguments: Sequence[str]) -> LightningCLI:
    """Train as the given command line arguments and YAML files say; returns the CLI with its trainer and module.

    Unknown keys are refused. The full configuration of the run is saved as ``config.yaml`` in its log folder.
    """
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    try:
        return LightningCLI(
            DFlashModule,
            FeatureCacheDataModule,
            args=["fit", *arguments],
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"fit": {"prog": "dflash-lightning fit"}},
        )
    except SIGTERMException as stop:
        # Lightning would exit with 0, as if training had finished.
        raise SystemExit(128 + signal.SIGTERM) from stop
