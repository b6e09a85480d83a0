"""Whatever an object store does, it is survived, or named: errors, silence, cuts, restarts, kills, damage."""
# Fixtures are imported.
# ruff: noqa: F401, F811

import hashlib
import os
import random
import time
import uuid

import obstore
import pytest
from cache_helpers import capture, faults_beside_index
from capture_helpers import capture_arguments, random_texts, write_texts
from remote_helpers import BUCKET, objects_of, read_all, reference, s3, server, staging_in, start, stored

from dflash_lightning.cache import FeatureCache, ObjectStoreSettings, object_store, open_store
from dflash_lightning.cache.object_store import PART_BYTES, ObjectStorage
from dflash_lightning.cli import run
from dflash_lightning.errors import CacheError

FAULTS = ["503", "stall", "cut", "restart"]


@pytest.fixture(scope="module")
def damaged_in_turn(server) -> ObjectStorage:
    """A finished cache; each test damages an object and puts it right again."""
    store = open_store(f"s3://{BUCKET}/damaged", ObjectStoreSettings(endpoint=server.url, timeout=2.0))
    capture(store)
    return store


def wait_until(condition) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


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
    # Not so impatient that a busy machine makes sound requests fail.
    settings = ObjectStoreSettings(endpoint=server.url, timeout=2.0, retries=1)
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
    content = random.Random(0).randbytes(PART_BYTES + 1000)
    (tmp_path / "shard").mkdir()
    (tmp_path / "shard/large").write_bytes(content)
    sent = server.add(kind, "PUT", "partNumber=2", times=2)
    s3.commit(tmp_path / "shard", "shards/000000", b"marker")
    received = server.add(kind, "GET", "000000/large", times=2)
    assert b"".join(s3.parts("shards/000000/large", len(content))) == content
    assert (sent.done, received.done) == (2, 2)
    assert s3.sha256("shards/000000/large") == hashlib.sha256(content).hexdigest()


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
