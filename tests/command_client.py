"""Commands and programs in processes that start in milliseconds, as forks of one that has imported everything.

An import of Lightning, DeepSpeed and transformers takes ten seconds of a core; a test that isn't about how a command is
started needn't pay them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from fit_helpers import LAUNCHER, PATIENCE


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


def environment_here() -> dict[str, str]:
    """That of this process, without what a training in it has left there."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER}


class Finished(NamedTuple):
    """A process that has ended."""

    code: int
    output: str
    errors: str


class CommandServer:
    """Starts commands, and programs of Python, in forks of one process."""

    def __init__(self, *modules: str):
        """
        Args:
            modules: what to import before the first command.
        """
        program = Path(__file__).parent / "command_server.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program), *modules],
            env=environment_here(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert int(self.process.stdout.readline()) == self.process.pid

    def ask(self, **request) -> int | None:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the command server has ended"
        return json.loads(line)

    def start(
        self,
        *arguments: object,
        folder: Path | None = None,
        program: Path | None = None,
        log: Path | None = None,
        errors: Path | None = None,
        **environment: str,
    ) -> int:
        """Process id of a command of ours, or of a program with these arguments.

        Args:
            folder: where it works.
            log: file that gets what it prints, on stderr too unless there is a file of `errors`.
            environment: beside that of this process as it is now.
        """
        return self.ask(
            arguments=list(map(str, arguments)),
            environment=environment_here() | environment,
            folder=folder and str(folder),
            program=program and str(program),
            log=log and str(log),
            errors=errors and str(errors),
        )

    def launch(
        self,
        arguments: Sequence[object],
        world: int,
        launcher: Callable[[int, int], dict[str, str]] = torchrun_environment,
        folder: Path | None = None,
        program: Path | None = None,
        log: Path | None = None,
        **environment: str,
    ) -> list[int]:
        """The same in `world` processes, each with the environment that a launcher gives it."""
        return [
            self.start(*arguments, folder=folder, program=program, log=log, **launcher(rank, world) | environment)
            for rank in range(world)
        ]

    def wait(self, processes: Sequence[int]) -> list[int]:
        """Exit codes; a negative one is the signal that ended the process.

        When one of them fails, other than by a kill, the rest are ended: they might wait for it.
        """
        codes: dict[int, int] = {}
        deadline = time.monotonic() + PATIENCE
        while running := [process for process in processes if process not in codes]:
            ended = {process: code for process in running if (code := self.ask(wait=process)) is not None}
            codes |= ended
            running = [process for process in running if process not in ended]
            late = time.monotonic() > deadline
            if late or any(code not in (0, -signal.SIGKILL) for code in ended.values()):
                kill(running)
            assert not (late and running), "it never came to an end"
            time.sleep(0.01)
        return [codes[process] for process in processes]

    def run(self, *arguments: object, program: Path | None = None) -> Finished:
        """Run a command or a program to its end."""
        with TemporaryDirectory() as folder:
            log, errors = Path(folder) / "log", Path(folder) / "errors"
            code = self.wait([self.start(*arguments, program=program, log=log, errors=errors)])[0]
            return Finished(code, log.read_text(), errors.read_text())


@cache
def command_server() -> CommandServer:
    """The one server of this process; it ends with it."""
    return CommandServer(
        *("dflash_lightning.training.fit", "dflash_lightning.capture.command", "dflash_lightning.evaluation.command"),
        *("callbacks", "deepspeed"),
        *(f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "qwen3")),
    )


def kill(processes: list[int]) -> None:
    for process in processes:
        os.kill(process, signal.SIGKILL)
