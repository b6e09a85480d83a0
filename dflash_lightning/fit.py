"""``fit``: Lightning's own command line around our module and data module."""

from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI

from datamodules import FeatureCacheDataModule
from dflash_lightning.module import DFlashModule


def fit(arguments: Sequence[str]) -> LightningCLI:
    """Train as the given command line arguments and YAML files say; returns the CLI with its trainer and module.

    Unknown keys are refused. The full configuration of the run is saved as ``config.yaml`` in its log folder.
    """
    return LightningCLI(
        DFlashModule,
        FeatureCacheDataModule,
        args=["fit", *arguments],
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"fit": {"prog": "dflash-lightning fit"}},
    )
