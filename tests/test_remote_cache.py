"""A cache in an object store is the same cache: over HTTP, from an S3-compatible server that fails in many ways."""

import hashlib
import multiprocessing
import os
import random
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
import torch
from cache_helpers import (
    SHARD_SAMPLES,
    capture,
    faults_beside_index,
    make_manifest,
    make_sample,
    shard_samples,
    stored_files,
)
from capture_helpers import capture_arguments, random_texts, write_texts
from faulty_server import FaultyProxy, faulty_s3
from torch.utils.data import DataLoader

from dflash_lightning.cache import (
    FeatureCache,
    ObjectStoreSettings,
    StagingSettings,
    create_or_join,
    describe,
    object_store,
    open_store,
    write_index,
)
from dflash_lightning.cache.object_store import PART_BYTES, ObjectStorage
from dflash_lightning.cli import run
from dflash_lightning.errors import CacheError

BUCKET = "features"
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["dflash_lightning.cache"])
FAULTS = ["503", "stall", "cut", "restart"]


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyProxy]:
    with faulty_s3(BUCKET) as proxy:
        yield proxy


@pytest.fixture
def s3(server, tmp_path) -> Iterator[ObjectStorage]:
    """An empty place in the bucket; short timeouts."""
    (tmp_path / "scratch").mkdir()
    settings = ObjectStoreSettings(endpoint=server.url, timeout=0.5, retries=5, scratch=tmp_path / "scratch")
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
    settings = ObjectStoreSettings(endpoint=server.url, timeout=0.5, retries=5)
    store = open_store(f"s3://{BUCKET}/finished", settings)
    capture(store)
    return store


@pytest.fixture(scope="module")
def damaged_in_turn(server) -> ObjectStorage:
    """A finished cache; each test damages an object and puts it right again."""
    store = open_store(f"s3://{BUCKET}/damaged", ObjectStoreSettings(endpoint=server.url, timeout=2.0))
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


def wait_until(condition) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_writing_survives(s3, server, reference, kind):
    met = ["PUT manifest.json", "PUT shards/000001/features/c/0/0", "PUT shards/000002/COMMITTED", "GET list-type=2"]
    faults = [server.add(kind, *request.split(), times=1 if kind == "restart" else 2) for request in met]
    capture(s3)
    assert [fault.done for fault in faults] == [fault.times for fault in faults]
    server.faults.clear()
    assert objects_of(s3) == reference
    assert faults_beside_index(s3) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("staged", [False, True])
def test_reading_survives(stored, server, tmp_path, kind, staged):
    server.faults.clear()
    met = ["manifest.json", "000001/COMMITTED", "000002/features/c/0/0", "000000/input_ids/c/0"]
    faults = [server.add(kind, "GET", name, times=1 if kind == "restart" else 2) for name in met]
    read_all(FeatureCache(stored, staging=staging_in(tmp_path, staged)))
    assert [fault.done for fault in faults] == [fault.times for fault in faults]
    server.faults.clear()


@pytest.mark.parametrize("kind", ["503", "stall"])
@pytest.mark.parametrize("staged", [False, True])
def test_what_stays_broken_is_named(stored, server, tmp_path, kind, staged):
    settings = ObjectStoreSettings(endpoint=server.url, timeout=0.2, retries=1)
    cache = FeatureCache(open_store(stored.location, settings), staging=staging_in(tmp_path, staged))
    server.add(kind, "GET", "000002/features/c/0/0", times=1000)
    with pytest.raises(CacheError, match=rf"{stored.location}/shards/000002/features/c/0/0: the object store failed"):
        cache.read(len(cache) - 3)
    server.faults.clear()
    cache.read(len(cache) - 3)


def test_a_failing_store_is_not_called_damage(stored, server):
    cache = FeatureCache(open_store(stored.location, ObjectStoreSettings(endpoint=server.url, retries=0)))
    cache.read(0)
    for index in (0, len(cache) - 3):  # of a shard that is open, and of one that isn't
        server.add("503", "GET", "/features/c/0/0", times=1)
        with pytest.raises(CacheError, match="the object store failed") as caught:
            cache.read(index)
        assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("kind", ["503", "drop", "stall", "cut"])
@pytest.mark.parametrize("request_", ["listing", "create"])
def test_retries_have_one_limit(s3, server, kind, request_):
    """Whether obstore repeats the request or we do."""
    store = open_store(s3.location, ObjectStoreSettings(endpoint=server.url, timeout=0.2, retries=2))
    method, ask = {
        "listing": ("GET", store.entries),
        "create": ("PUT", lambda: store.create("new", b"content")),
    }[request_]
    fault = server.add(kind, method, times=1000)
    with pytest.raises(CacheError, match="the object store failed"):
        ask()
    assert fault.done == 3


def test_retries_end_in_time(s3, server, monkeypatch):
    monkeypatch.setattr(object_store, "LONGEST_RETRYING", 0.0)
    fault = server.add("cut", "GET", "list-type=2", times=1000)
    with pytest.raises(CacheError, match="the object store failed"):
        s3.entries()
    assert fault.done == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["features/c/0/0", "COMMITTED"])
def test_a_killed_upload_is_resumed(s3, server, reference, name):
    fault = server.add("503", "PUT", f"{s3.location.removeprefix('s3:/')}/shards/000002/{name}", times=1000)
    process = start(capture, s3)
    wait_until(lambda: fault.done)
    process.kill()
    process.join(60)
    server.faults.clear()
    assert len(os.listdir(s3.settings.scratch)) == 2, "the shard in preparation, and its lock"
    assert [(fault.shard, fault.object) for fault in faults_beside_index(s3)] == [(2, "COMMITTED"), (3, "COMMITTED")]
    assert FeatureCache(s3, require_complete=False).complete is False
    # Something that the finished shard doesn't have, as another version of the code may have left it.
    s3.replace("shards/000002/features/c/9/9", b"old")
    before = len(server.requests)
    capture(s3)
    written = {
        path.split("?")[0].rsplit("/shards/")[-1][:6] for method, path in server.requests[before:] if method == "PUT"
    }
    assert written == {"000002", "000003"}
    assert objects_of(s3) == reference
    assert faults_beside_index(s3) == []
    assert os.listdir(s3.settings.scratch) == []


@pytest.mark.parametrize("kind", ["503", "cut"])
def test_large_objects_travel_in_parts(s3, server, tmp_path, kind):
    content = random.Random(0).randbytes(2 * PART_BYTES + 1000)
    (tmp_path / "shard").mkdir()
    (tmp_path / "shard/large").write_bytes(content)
    sent = server.add(kind, "PUT", "partNumber=2", times=2)
    s3.commit(tmp_path / "shard", "shards/000000", b"marker")
    received = server.add(kind, "GET", "000000/large", times=2)
    assert b"".join(s3.parts("shards/000000/large", len(content))) == content
    assert (sent.done, received.done) == (2, 2)
    assert s3.sha256("shards/000000/large") == hashlib.sha256(content).hexdigest()


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


def flip(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 4]) + data[-4:]


def shorten(data: bytes) -> bytes:
    return data[:-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("features/c/0/0", None),
        ("features/c/0/0", shorten),
        ("features/c/0/0", flip),
        ("features/zarr.json", flip),
        ("input_ids/c/0", flip),
    ],
)
def test_damage_is_found(damaged_in_turn, tmp_path, name, damage):
    stored = f"shards/000002/{name}"
    data = damaged_in_turn.read(stored)
    if damage is None:
        obstore.delete(damaged_in_turn._client, stored)
    else:
        damaged_in_turn.replace(stored, damage(data))
    (fault,) = faults_beside_index(damaged_in_turn)
    assert (fault.shard, fault.object) == (2, name)
    for staging in (staging_in(tmp_path, False), staging_in(tmp_path)):
        cache = FeatureCache(damaged_in_turn, staging=staging)
        with pytest.raises(CacheError, match=f"shard 000002, object {name}: "):
            cache.read(len(cache) - 3)
    damaged_in_turn.replace(stored, data)


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
def test_a_target_is_captured_into_a_bucket(s3, server, llama_folder, tmp_path):
    data = write_texts(tmp_path / "data", llama_folder, random_texts(20))
    run(capture_arguments(llama_folder, data, tmp_path / "cache"))
    reach = ["--object-store.endpoint", server.url]
    run(capture_arguments(llama_folder, data, s3.location, *reach))
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


@pytest.mark.slow
def test_damaged_shards_are_captured_anew(server, llama_folder, tmp_path, capsys):
    url, reach = f"s3://{BUCKET}/{uuid.uuid4().hex}", ["--object-store.endpoint", server.url]
    data = write_texts(tmp_path / "data", llama_folder, random_texts(8))
    run([*capture_arguments(llama_folder, data, url), *reach])
    store = open_store(url, ObjectStoreSettings(endpoint=server.url))
    shards = range(FeatureCache(store).manifest.num_shards)
    objects = ("input_ids/c/0", "features/c/0/0", "offsets/c/0", "zarr.json")
    names = [f"shards/{shard:06d}/{name}" for shard in shards for name in objects] + ["manifest.json"]
    sound = {name: store.read(name) for name in names}
    store.replace("manifest.json", sound["manifest.json"][:-1])
    store.remove("shards/000000")
    store.replace("shards/000001/features/c/0/0", sound["shards/000001/features/c/0/0"].swapcase())
    store.replace("shards/000002/COMMITTED", b"{}")
    with pytest.raises(CacheError, match=r"3 faults, and 1 of \d shards isn't committed"):
        run(["cache", "verify", url, *reach])
    run(["cache", "verify", url, "--repair", *reach])
    assert "4 faults repaired; every object is there" in capsys.readouterr().out
    assert {name: store.read(name) for name in names} == sound
    assert faults_beside_index(store) == []


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
