"""LightningDataModules of dflash_lightning."""

from datamodules.feature_cache import FeatureCacheDataModule

__all__ = ["FeatureCacheDataModule"]
