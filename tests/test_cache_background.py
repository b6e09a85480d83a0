"""Shards written in the background: the same cache, one shard at a time, and errors at once."""

import errno
import multiprocessing
import os
import signal
import threading

import pytest
from cache_helpers import SHARD_SAMPLES, capture, faults_beside_index, make_manifest, shard_samples, stored_files

from dflash_lightning.cache import BackgroundWriter, create_or_join
from dflash_lightning.cache import writer as writer_module
from dflash_lightning.errors import CacheError

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["dflash_lightning.cache"])


def capture_in_background(path, step=None, signal_number=signal.SIGKILL):
    """Capture in this process, which sends itself a signal before its `step`-th fsync."""
    fsync, count = os.fsync, 0

    def dying(descriptor):
        nonlocal count
        if count == step:
            os.kill(os.getpid(), signal_number)
        count += 1
        fsync(descriptor)

    os.fsync = dying
    writer = create_or_join(path, make_manifest())
    with BackgroundWriter(writer) as background:
        for shard in range(len(SHARD_SAMPLES)):
            if not writer.is_committed(shard):
                background.write_shard(shard, shard_samples(shard))
    os.fsync = fsync


@pytest.fixture
def held(monkeypatch):
    """Event that a write waits for, once its arrays are on disk."""
    go, write_arrays = threading.Event(), writer_module.write_arrays

    def waiting(*args, **kwargs):
        write_arrays(*args, **kwargs)
        assert go.wait(60)

    monkeypatch.setattr(writer_module, "write_arrays", waiting)
    yield go
    go.set()


def test_the_cache_is_the_one_that_is_written_in_the_foreground(tmp_path):
    capture(tmp_path / "foreground")
    capture_in_background(tmp_path / "background")
    assert stored_files(tmp_path / "background") == stored_files(tmp_path / "foreground")
    assert faults_beside_index(tmp_path / "background") == []


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("step", [3, 40, 75, 120])
def test_ended_by_a_signal_at_any_step_then_resumed(tmp_path, step, signal_number):
    process = PROCESSES.Process(target=capture_in_background, args=(tmp_path / "cache", step, signal_number))
    process.start()
    process.join(60)
    assert process.exitcode == -signal_number
    capture_in_background(tmp_path / "cache")
    capture(tmp_path / "reference")
    assert stored_files(tmp_path / "cache") == stored_files(tmp_path / "reference")


def test_the_caller_goes_on_while_one_shard_is_written_and_waits_with_the_second(tmp_path, held):
    writer = create_or_join(tmp_path, make_manifest())
    with BackgroundWriter(writer) as background:
        background.write_shard(0, shard_samples(0))
        background.check()
        assert not writer.is_committed(0)
        second = threading.Thread(target=background.write_shard, args=(1, shard_samples(1)))
        second.start()
        second.join(0.2)
        assert second.is_alive(), "two shards were in memory"
        held.set()
        second.join(60)
        assert writer.is_committed(0)
    assert writer.is_committed(1)


def full_disk(*_args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_then(writer, then):
    with BackgroundWriter(writer) as background:
        background.write_shard(0, shard_samples(0))
        while then == "check":
            background.check()
        if then == "next shard":
            background.write_shard(1, shard_samples(1))
            pytest.fail("the second shard was taken")
        if then == "interrupt":
            raise KeyboardInterrupt


@pytest.mark.parametrize("then", ["check", "next shard", "leave"])
def test_a_failed_write_stops_the_caller_with_its_own_message(tmp_path, monkeypatch, then):
    writer = create_or_join(tmp_path, make_manifest())
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(CacheError, match="no space left"):
        write_then(writer, then)
    assert list((tmp_path / "shards").iterdir()) == []


def test_after_an_error_of_the_caller_the_shard_in_work_is_finished(tmp_path):
    writer = create_or_join(tmp_path, make_manifest())
    with pytest.raises(KeyboardInterrupt):
        write_then(writer, "interrupt")
    assert writer.is_committed(0)
