"""A cache in a bucket of an S3-compatible server that can fail, and the same cache in a folder to compare with."""

import multiprocessing
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cache_helpers import SHARD_SAMPLES, capture, make_sample, stored_files
from faulty_server import FaultyProxy, faulty_s3

from dflash_lightning.cache import FeatureCache, ObjectStoreSettings, StagingSettings, open_store
from dflash_lightning.cache.object_store import ObjectStorage

BUCKET = "features"
# A request that stalls is given up soon. Many retries: on a busy machine even a sound one may take that long.
IMPATIENT = {"timeout": 0.5, "retries": 12}
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["dflash_lightning.cache"])


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyProxy]:
    with faulty_s3(BUCKET) as proxy:
        yield proxy


@pytest.fixture
def s3(server, tmp_path) -> Iterator[ObjectStorage]:
    """An empty place in the bucket; short timeouts."""
    (tmp_path / "scratch").mkdir()
    settings = ObjectStoreSettings(endpoint=server.url, **IMPATIENT, scratch=tmp_path / "scratch")
    server.faults.clear()
    yield open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}/cache", settings)
    server.faults.clear()


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> dict[str, bytes]:
    """The files of the same cache in a local folder."""
    folder = tmp_path_factory.mktemp("reference") / "cache"
    capture(folder)
    return stored_files(folder)


@pytest.fixture(scope="module")
def stored(server) -> ObjectStorage:
    """A finished cache that no test changes."""
    settings = ObjectStoreSettings(endpoint=server.url, **IMPATIENT)
    store = open_store(f"s3://{BUCKET}/finished", settings)
    capture(store)
    return store


def objects_of(store: ObjectStorage) -> dict[str, bytes]:
    """Every object but the markers, which name their producer."""
    return {name: store.read(name) for name in store._listed("") if not name.endswith("/COMMITTED")}


def read_all(cache: FeatureCache) -> None:
    """Read every sample and compare it, bit for bit, with what was captured."""
    assert len(cache) == sum(SHARD_SAMPLES)
    for i in range(len(cache)):
        read, given = cache.read(i), make_sample(i)
        assert read.sample_id == given.sample_id
        assert read.input_ids.tolist() == given.input_ids.tolist()
        assert read.loss_mask.tolist() == given.loss_mask.tolist()
        assert torch.equal(read.features.view(torch.uint16), given.features.view(torch.uint16))


def staging_in(folder: Path, staged: bool = True) -> StagingSettings:
    return StagingSettings(folder=folder / "staging" if staged else None, max_gb=1)


def start(function, *args):
    process = PROCESSES.Process(target=function, args=args)
    process.start()
    return process
