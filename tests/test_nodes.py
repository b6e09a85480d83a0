"""Two hosts, as network namespaces with an address each: capture and training through conf/cluster/torchrun.sh, and
what becomes of a training when one of them fails."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from cache_helpers import stored_files
from capture_helpers import capture_arguments, random_texts, write_texts
from command_client import command_server, meeting_place
from fit_helpers import PATIENCE, checkpoints, fit_config, identity, wait_for
from page_commands import ROOT, command_line, commands_run_by

from dflash_lightning.checkpoints import read_training_checkpoint
from dflash_lightning.cli import run
from dflash_lightning.training.resume import take_back

SCRIPT = ROOT / "conf" / "cluster" / "torchrun.sh"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# How long a rank waits for another: short only where the other one is out of reach.
TIMEOUT_SECONDS = 15
# Until the launcher has reported the worker's error, on a busy machine.
MARGIN_SECONDS = 300

pytestmark = pytest.mark.slow


def ip(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


class Nodes:
    """Two hosts joined by a cable, and what runs on them."""

    def __init__(self, script: Path):
        self.script = script
        self.names = [f"dflash-{os.getpid()}-{node}" for node in range(2)]
        self.ports = [f"df{os.getpid() % 10**8}n{node}" for node in range(2)]

    def connect(self) -> str | None:
        """Make the hosts; what went wrong, if something did."""
        commands = [("netns", "add", name) for name in self.names]
        first, second = self.ports
        commands.append(
            ("link", "add", first, "netns", self.names[0], "type", "veth", "peer", second, "netns", self.names[1])
        )
        for name, port, address in zip(self.names, self.ports, ADDRESSES, strict=True):
            commands.append(("-n", name, "addr", "add", f"{address}/24", "dev", port))
            commands += [("-n", name, "link", "set", device, "up") for device in (port, "lo")]
        return next((error for command in commands if (error := ip(*command).stderr)), None)

    def remove(self) -> None:
        for name in self.names:
            for process in ip("netns", "pids", name).stdout.split():
                os.kill(int(process), signal.SIGKILL)
            ip("netns", "del", name)

    def start(self, *command: str | Path) -> list[subprocess.Popen]:
        """A command on both hosts, as a user would start it there."""
        return [
            subprocess.Popen(
                ["ip", "netns", "exec", name, str(self.script), str(node), *map(str, command)],
                env={
                    **os.environ,
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "GLOO_SOCKET_IFNAME": port,
                },
                stderr=subprocess.PIPE,
                text=True,
            )
            for node, (name, port) in enumerate(zip(self.names, self.ports, strict=True))
        ]

    def run(self, *command: str | Path) -> None:
        """A command on both hosts, to its end."""
        processes = self.start(*command)
        for process in processes:
            errors = process.communicate(timeout=PATIENCE)[1]
            assert process.returncode == 0, errors

    def worker(self, node: int) -> int:
        """The process that a host's launcher has started."""
        for process in map(int, ip("netns", "pids", self.names[node]).stdout.split()):
            if b"dflash_lightning" in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[:4]:
                return process
        raise AssertionError(f"nothing runs on host {node}")

    def cable(self, state: str) -> None:
        ip("-n", self.names[1], "link", "set", self.ports[1], state)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[Nodes]:
    edited = SCRIPT.read_text()
    for line, ours in (
        ("NODES=2", "NODES=2"),
        ("PROCESSES_PER_NODE=8", "PROCESSES_PER_NODE=1"),
        ("FIRST_NODE=10.0.0.1", f"FIRST_NODE={ADDRESSES[0]}"),
    ):
        assert f"\n{line}\n" in edited
        edited = edited.replace(f"\n{line}\n", f"\n{ours}\n")
    script = tmp_path_factory.mktemp("cluster") / "torchrun.sh"
    script.write_text(edited)
    script.chmod(0o755)
    nodes = Nodes(script)
    try:
        if problem := nodes.connect():
            pytest.skip(f"network namespaces can't be made here: {problem.strip()}")
        yield nodes
    finally:
        nodes.remove()


@pytest.fixture(scope="module")
def cache(nodes, llama_folder, tmp_path_factory) -> Path:
    """Captured by both hosts."""
    folder = tmp_path_factory.mktemp("nodes")
    data = write_texts(folder / "data", llama_folder, random_texts(24))
    nodes.run(*capture_arguments(llama_folder, data, folder / "cache"))
    run(capture_arguments(llama_folder, data, folder / "by_one"))
    assert stored_files(folder / "cache") == stored_files(folder / "by_one")
    return folder / "cache"


def write_config(llama_folder: Path, cache: Path, folder: Path, timeout_seconds: float = PATIENCE) -> Path:
    """A run of 40 steps that saves a checkpoint after every second one."""
    config = fit_config(llama_folder, cache, folder, [checkpoints(folder, "last", every_n_train_steps=2)])
    config["model"]["drafter"]["target_layer_ids"] = [1, 3, 4]
    config["data"]["batch_tokens"] = 180
    config["trainer"] |= {"max_steps": 40, "limit_val_batches": 0}
    config["trainer"]["strategy"]["init_args"] = {"timeout_minutes": timeout_seconds / 60}
    file = folder / "fit.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def last_step(checkpoint: Path) -> int:
    take_back(checkpoint)
    return read_training_checkpoint(checkpoint).step


def expect_lost_rank(process: subprocess.Popen, within: float) -> None:
    errors = process.communicate(timeout=within)[1]
    assert process.returncode == 1, errors  # the launcher's
    assert "lost another process of the run" in errors
    assert "--resume auto" in errors


def test_a_lost_host_ends_the_other_and_a_restart_goes_on_exactly(nodes, cache, llama_folder, tmp_path):
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    server = command_server()
    alone = ["fit", "--config", write_config(llama_folder, cache, undisturbed)]
    assert server.wait(server.launch([*alone, "--trainer.devices", "2"], 2, **meeting_place())) == [0, 0]

    [command] = commands_run_by(__file__)
    script, node, *fit = command_line(command, {"run.yaml": [str(write_config(llama_folder, cache, disturbed))]})
    assert (ROOT / script, node) == (SCRIPT, "0")
    last = disturbed / "checkpoints" / "last.ckpt"
    first, second = nodes.start(*fit)
    wait_for(last.exists)
    os.kill(nodes.worker(1), signal.SIGKILL)
    expect_lost_rank(first, MARGIN_SECONDS)
    second.communicate(timeout=MARGIN_SECONDS)
    step = last_step(last)
    assert 2 <= step < 40

    before = identity(last)
    write_config(llama_folder, cache, disturbed, TIMEOUT_SECONDS)
    first, second = nodes.start(*fit)
    wait_for(lambda: identity(last) not in (None, before))
    nodes.cable("down")
    expect_lost_rank(first, TIMEOUT_SECONDS + MARGIN_SECONDS)
    expect_lost_rank(second, TIMEOUT_SECONDS + MARGIN_SECONDS)
    nodes.cable("up")
    write_config(llama_folder, cache, disturbed)
    assert step < last_step(last) < 40

    nodes.run(*fit)
    expected, found = (
        read_training_checkpoint(folder / "checkpoints" / "last.ckpt") for folder in (undisturbed, disturbed)
    )
    assert expected.step == found.step == 40
    assert expected.state_dict.keys() == found.state_dict.keys()
    for name, weights in expected.state_dict.items():
        assert torch.equal(weights, found.state_dict[name]), name
