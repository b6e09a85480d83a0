"""The feature cache: what the target computed, once, stored for every epoch of training.

A cache is a folder, or a place in an object store, of shards, each one Zarr v3 group with one writer;
`docs/cache-format.md` describes it byte by byte. Producers call `create_or_join` and `CacheWriter.write_shard`, or
`BackgroundWriter` around it; training reads through `FeatureCache`. Nothing here knows of drafters, of Lightning or of
the program that ran the target.
"""

from dflash_lightning.cache.background import BackgroundWriter
from dflash_lightning.cache.bench import bench_reading
from dflash_lightning.cache.describe import describe
from dflash_lightning.cache.location import open_store
from dflash_lightning.cache.manifest import CacheManifest, TargetIdentity
from dflash_lightning.cache.object_store import ObjectStoreSettings
from dflash_lightning.cache.reader import FeatureCache, write_index
from dflash_lightning.cache.sample_reader import SampleLocation, SampleReader
from dflash_lightning.cache.samples import Quarantined, Sample, count_anchor_candidates
from dflash_lightning.cache.staging import StagingSettings
from dflash_lightning.cache.store import CacheStore
from dflash_lightning.cache.verify import Fault, restore_manifest, verify
from dflash_lightning.cache.writer import CacheWriter, create_or_join

__all__ = [
    "BackgroundWriter",
    "CacheManifest",
    "CacheStore",
    "CacheWriter",
    "Fault",
    "FeatureCache",
    "ObjectStoreSettings",
    "Quarantined",
    "Sample",
    "SampleLocation",
    "SampleReader",
    "StagingSettings",
    "TargetIdentity",
    "bench_reading",
    "count_anchor_candidates",
    "create_or_join",
    "describe",
    "open_store",
    "restore_manifest",
    "verify",
    "write_index",
]
