"""A capture that is killed again and again, by any number of processes, ends as the cache of an undisturbed one."""

import json
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from cache_helpers import stored_files
from capture_helpers import capture_arguments, random_texts, write_texts
from command_client import command_server, kill, srun_environment, torchrun_environment
from fit_helpers import PATIENCE, wait_for

from dflash_lightning.cache import verify
from dflash_lightning.cli import run

NUM_SAMPLES = 120
NUM_KILLS = 20
MARKERS = "shards/*/COMMITTED"


@pytest.fixture(scope="module")
def server():
    return command_server()


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, llama_folder):
    """Makes the arguments of a capture into a folder."""
    data = write_texts(tmp_path_factory.mktemp("kills") / "data", llama_folder, random_texts(NUM_SAMPLES))
    return partial(capture_arguments, llama_folder, data)


@pytest.fixture(scope="module")
def undisturbed(arguments, tmp_path_factory) -> Path:
    """A cache written by one process in one go."""
    cache = tmp_path_factory.mktemp("undisturbed") / "cache"
    run(arguments(cache))
    assert verify(cache) == []
    return cache


def markers(cache: Path) -> dict[str, tuple[int, int]]:
    """Which file, written when, is the commit marker of each shard."""
    return {file.parent.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in cache.glob(MARKERS)}


def assert_the_same(cache: Path, undisturbed: Path) -> None:
    """Byte for byte, but for the markers' producer; and no file besides."""
    assert stored_files(cache) == stored_files(undisturbed)
    assert verify(cache) == []
    for file in undisturbed.glob(MARKERS):
        expected, found = (
            json.loads((root / file.relative_to(undisturbed)).read_text()) for root in (undisturbed, cache)
        )
        for record in (expected, found):
            del record["producer"], record["sha256"]
        assert found == expected


def wait_for_a_moment(cache: Path, draw: random.Random) -> None:
    """Wait until a drawn number of shards is begun or committed, and a drawn time longer; or just that time."""
    before, committed = set(cache.glob("shards/*")), len(markers(cache))
    moment, target = draw.choice(["start", "begun", "begun", "committed", "committed"]), committed + draw.choice([1, 2])
    if moment == "begun":
        wait_for(lambda: not set(cache.glob("shards/.tmp-*")) <= before)
    elif moment == "committed":
        wait_for(lambda: len(markers(cache)) >= target)
    end = time.monotonic() + draw.uniform(0.0, 0.4 if moment == "start" else 0.2)
    # Not so long that the cache is finished before the kills are.
    while time.monotonic() < end and len(markers(cache)) <= target:
        time.sleep(0.001)


@pytest.mark.slow
def test_killed_at_20_random_moments_with_changing_process_counts(server, arguments, undisturbed, tmp_path):
    cache = tmp_path / "cache"
    draw = random.Random(20)
    written = {}
    for number in range(NUM_KILLS):
        world = number % 3 + 1
        processes = server.launch(arguments(cache), world, draw.choice([torchrun_environment, srun_environment]))
        wait_for_a_moment(cache, draw)
        kill(processes)
        assert server.wait(processes) == [-signal.SIGKILL] * world, f"kill {number}: a process had ended before"
        now = markers(cache)
        assert written.items() <= now.items(), "a committed shard was written again, or is lost"
        if (cache / "manifest.json").exists():
            broken = {fault.shard for fault in verify(cache)}
            assert not broken & {int(shard) for shard in now}, "a shard was committed that isn't whole"
        written = now
    assert written
    processes = server.launch(arguments(cache), 3)
    wait_for(lambda: len(markers(cache)) > len(written))
    kill(processes[1:2])  # the others go on
    assert server.wait(processes) == [0, -signal.SIGKILL, 0]
    assert server.wait(server.launch(arguments(cache), 2, srun_environment)) == [0, 0]
    assert written.items() <= markers(cache).items()
    assert_the_same(cache, undisturbed)


def torchrun(world: int, arguments: list[str]) -> subprocess.Popen:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return subprocess.Popen([*launch, "-m", "dflash_lightning", *arguments])


@pytest.mark.slow
def test_torchrun_killed_twice_then_finished_by_one_process(arguments, undisturbed, tmp_path):
    """The real command, with its start; the first kill takes the whole tree, the second one worker alone."""
    cache = tmp_path / "cache"
    launched = torchrun(2, arguments(cache))
    wait_for(lambda: markers(cache))
    # torchrun's workers are in sessions of their own, and would outlive it.
    tree = [*psutil.Process(launched.pid).children(recursive=True), launched]
    kill([member.pid for member in tree])
    for member in tree:
        member.wait(timeout=PATIENCE)
    written = markers(cache)
    launched = torchrun(3, arguments(cache))
    wait_for(lambda: markers(cache).keys() > written.keys())
    workers = [child for child in psutil.Process(launched.pid).children() if "capture" in child.cmdline()]
    assert len(workers) == 3
    kill([workers[0].pid])
    assert launched.wait(timeout=PATIENCE) == 1, "torchrun stops the others when one has died"
    assert written.items() < markers(cache).items()
    run(arguments(cache))
    assert_the_same(cache, undisturbed)
