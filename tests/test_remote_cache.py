"""A cache in an object store is the same cache: over HTTP, from an S3-compatible server."""
# Fixtures are imported.
# ruff: noqa: F401, F811

import os
import re

import pytest
import torch
from cache_helpers import capture, faults_beside_index, make_manifest, make_sample, shard_samples, stored_files
from capture_helpers import capture_arguments, random_texts, write_texts
from page_commands import command_line, commands_run_by
from remote_helpers import BUCKET, objects_of, read_all, reference, s3, server, staging_in, start, stored
from torch.utils.data import DataLoader

from dflash_lightning.cache import FeatureCache, ObjectStoreSettings, create_or_join, describe, open_store, write_index
from dflash_lightning.cache.object_store import ObjectStorage
from dflash_lightning.cli import run
from dflash_lightning.errors import CacheError


@pytest.mark.parametrize("world", [1, 3])
def test_what_is_written_remotely_is_what_is_written_locally(s3, reference, world):
    processes = [start(capture, s3, rank, world) for rank in range(world)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * world
    assert objects_of(s3) == reference
    assert faults_beside_index(s3) == []
    assert os.listdir(s3.settings.scratch) == []


@pytest.mark.parametrize("staged", [False, True])
def test_what_is_read_remotely_is_what_was_captured(stored, server, tmp_path, staged):
    cache = FeatureCache(stored, staging=staging_in(tmp_path, staged))
    assert cache.num_bytes == bytes_of_shards(stored)
    read_all(cache)
    before = len(server.requests)
    cache.read(0)
    requests = [("GET", "/features/finished/shards/000000/features/c/0/0")]
    assert server.requests[before:] == ([] if staged else requests)


def test_of_two_manifests_one_wins(s3):
    create_or_join(s3, make_manifest())
    create_or_join(s3, make_manifest(), rank=1)
    with pytest.raises(CacheError, match="max_length: cache has 512, this run has 64") as caught:
        create_or_join(s3, make_manifest(max_length=64))
    assert s3.location in str(caught.value)


def test_a_place_that_holds_something_else_is_refused(s3):
    s3.replace("thesis/chapter-1.tex", b"")
    with pytest.raises(CacheError, match=r"not empty and has no manifest\.json; found thesis"):
        create_or_join(s3, make_manifest())


def test_a_second_writer_of_one_shard_is_noticed(s3, monkeypatch):
    writer, rival = (create_or_join(s3, make_manifest(), rank=rank) for rank in (0, 1))
    create = ObjectStorage.create

    def late(self, name, data):
        monkeypatch.setattr(ObjectStorage, "create", create)
        rival.write_shard(0, shard_samples(0))
        return create(self, name, data)

    monkeypatch.setattr(ObjectStorage, "create", late)
    with pytest.raises(CacheError, match=r"shards/000000 of s3://.* another process"):
        writer.write_shard(0, shard_samples(0))
    assert writer.committed() == {0}


def test_a_removed_shard_is_made_anew(s3, reference):
    capture(s3)
    write_index(s3)
    create_or_join(s3, make_manifest()).remove(1)
    assert s3.read("index") == b"", "it is withdrawn"
    assert [fault.shard for fault in faults_beside_index(s3)] == [1]
    capture(s3)
    assert write_index(s3)
    assert {name: data for name, data in objects_of(s3).items() if name != "index"} == reference
    s3.remove("shards/000009")


class Features:
    """A data set of feature sums, for data workers."""

    def __init__(self, cache: FeatureCache):
        self.cache = cache

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.cache.read(index).features


@pytest.mark.slow
@pytest.mark.parametrize(("method", "staged"), [("forkserver", False), ("forkserver", True), ("spawn", False)])
def test_data_workers(stored, tmp_path, method, staged):
    cache = FeatureCache(stored, staging=staging_in(tmp_path, staged))
    cache.read(0)
    workers = 1 if method == "spawn" else 2
    loader = DataLoader(
        Features(cache), batch_size=None, num_workers=workers, multiprocessing_context=method, timeout=120
    )
    for i, features in enumerate(loader):
        assert torch.equal(features, make_sample(i).features)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_worker_is_told_what_to_do(stored):
    loader = DataLoader(Features(FeatureCache(stored)), batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(CacheError, match="by forkserver or spawn"):
        list(loader)


@pytest.mark.usefixtures("stored")
def test_a_plain_http_server_is_read(server, tmp_path):
    url = f"{server.url}/{BUCKET}/finished"
    for staging in (staging_in(tmp_path, False), staging_in(tmp_path)):
        assert torch.equal(FeatureCache(url, staging=staging).read(3).features, make_sample(3).features)
    with pytest.raises(CacheError, match=r"http://.* for reading only"):
        create_or_join(f"{server.url}/{BUCKET}/new", make_manifest())


def test_a_public_bucket_is_read_without_credentials(stored, server, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    before = len(server.authorizations)
    cache = FeatureCache(open_store(stored.location, ObjectStoreSettings(endpoint=server.url, anonymous=True)))
    assert torch.equal(cache.read(0).features, make_sample(0).features)
    assert server.authorizations[before:] == []


def test_credentials_come_from_the_environment(s3, server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-this-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    signed = open_store(s3.location, ObjectStoreSettings(endpoint=server.url, region="eu-north-1"))
    create_or_join(signed, make_manifest())
    assert "Credential=key-of-this-test/" in server.authorizations[-1]
    assert "/eu-north-1/s3/" in server.authorizations[-1]


@pytest.mark.slow
def test_a_target_is_captured_into_a_bucket_by_the_commands_of_the_docs(s3, server, llama_folder, tmp_path, capsys):
    data = write_texts(tmp_path / "data", llama_folder, random_texts(20))
    _, *capture = capture_arguments(llama_folder, data, tmp_path / "cache")
    run(["capture", *capture])
    place = capture.index("--cache")
    del capture[place : place + 2]
    for command in commands_run_by(__file__):
        changes = {"s3://bucket/qwen3-8b": [s3.location], "http://minio:9000": [server.url], "...": capture}
        # The server of these tests in Amazon's place.
        run([*command_line(command, changes)[1:], "--object-store.endpoint", server.url])
    assert "every object is there" in " ".join(capsys.readouterr().out.split())
    assert objects_of(s3) == stored_files(tmp_path / "cache")


def test_commands_take_a_url(s3, server, capsys):
    capture(s3)
    write_index(s3)
    reach = ["--object-store.endpoint", server.url]
    run(["cache", "info", s3.location, *reach])
    assert s3.location in capsys.readouterr().out
    run(["cache", "verify", s3.location, *reach])
    assert "every object is there" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(CacheError, match=r"s3://nowhere/.*NoSuchBucket"):
        create_or_join(open_store("s3://nowhere/cache", s3.settings), make_manifest())


def bytes_of_shards(store: ObjectStorage) -> int:
    return sum(size for name, size in store._listed("shards").items() if not name.endswith("/COMMITTED"))


def test_describe(stored):
    told = describe(stored)
    assert told["path"] == stored.location
    assert told["complete"]
    assert told["bytes"] == bytes_of_shards(stored)


@pytest.mark.parametrize("url", ["ftp://host/cache", "memory:///cache", "s3://"])
def test_other_urls_are_refused(url):
    with pytest.raises(CacheError, match=f"{url.rstrip('/')}.* can't be used"):
        open_store(url)


def test_a_file_url_is_a_folder(tmp_path, reference):
    capture(open_store(f"file://{tmp_path}/a%20cache"))
    assert stored_files(tmp_path / "a cache") == reference
    assert open_store(f"file://localhost{tmp_path}/a%20cache").location == str(tmp_path / "a cache")


@pytest.mark.parametrize("url", ["file://dev/shm/x", "file://", "file:///data/run#2", "file:///data/run?2"])
def test_a_file_url_of_another_machine_or_form_is_refused(url):
    with pytest.raises(CacheError, match=f"{re.escape(url)} can't be used: expected file:///absolute/path"):
        open_store(url)


def test_an_empty_path_is_refused():
    with pytest.raises(CacheError, match="the path of the cache is empty"):
        FeatureCache("")
