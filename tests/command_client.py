"""Commands in several processes that start in milliseconds, as forks of one that has imported everything."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def torchrun_environment(rank: int, world: int) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "GROUP_WORLD_SIZE": 1}
    return {"TORCHELASTIC_RUN_ID": "test", **{name: str(number) for name, number in place.items()}}


def srun_environment(rank: int, world: int) -> dict[str, str]:
    place = {"SLURM_STEP_NUM_TASKS": world, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_NODES": 1}
    return {name: str(number) for name, number in place.items()}


def meeting_place() -> dict[str, str]:
    """Where the processes of one torch.distributed world find each other: a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


class CommandServer:
    """Starts commands in forks of one process."""

    def __init__(self, *modules: str):
        """
        Args:
            modules: what to import before the first command.
        """
        program = Path(__file__).parent / "command_server.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program), *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert int(self.process.stdout.readline()) == self.process.pid

    def ask(self, **request) -> int:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def launch(
        self,
        arguments: list[str],
        world: int,
        launcher: Callable[[int, int], dict[str, str]] = torchrun_environment,
        **environment: str,
    ) -> list[int]:
        """Process ids of a command in `world` processes, each with the environment that a launcher gives it."""
        return [self.ask(arguments=arguments, environment=launcher(rank, world) | environment) for rank in range(world)]

    def wait(self, processes: list[int]) -> list[int]:
        """Exit codes; a negative one is the signal that ended the process."""
        return [self.ask(wait=process) for process in processes]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)


def kill(processes: list[int]) -> None:
    for process in processes:
        os.kill(process, signal.SIGKILL)
