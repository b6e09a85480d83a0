"""Whether processes on this machine can train together: two of them add two numbers.

``python -m dflash_lightning.doctor.ranks BACKEND PORT RANK`` is one of these processes.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import distributed

from dflash_lightning.doctor.verdict import Verdict

RANKS = 2
PATIENCE = timedelta(seconds=120)
ADVICE = {
    "gloo": "gloo listens on the address of this machine's own name: `getent hosts $(hostname)` should give one that "
    "it has. A line `127.0.0.1 NAME` in /etc/hosts helps, or the variable GLOO_SOCKET_IFNAME=lo for one machine.",
    "nccl": "in a container, --ipc host and --shm-size; `NCCL_DEBUG=INFO` makes a training say how far NCCL came.",
}


def check_ranks() -> Iterator[Verdict]:
    """A sum over two processes by gloo, and by NCCL where there are GPUs (on one of them where there is one)."""
    yield add_up("gloo", RANKS)
    if torch.cuda.is_available():
        yield add_up("nccl", min(RANKS, torch.cuda.device_count()))


def add_up(backend: str, ranks: int) -> Verdict:
    """Start so many processes on loopback and let them sum their numbers, 1 to ``ranks``."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    start = time.perf_counter()
    command = [sys.executable, "-m", __spec__.name, backend, str(store.port)]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=PATIENCE.total_seconds()))
        except subprocess.TimeoutExpired:
            process.kill()
            outputs.append((process.communicate()[0], f"no answer within {PATIENCE.total_seconds():.0f} seconds"))
    # NCCL logs to stdout as well.
    sums = [next(reversed(output.split()), "") for output, _ in outputs]
    expected = sum(range(1, ranks + 1))
    if sums == [str(expected)] * ranks:
        seconds = time.perf_counter() - start
        return Verdict(backend, "ok", f"{ranks} processes summed their numbers over loopback in {seconds:.1f} s")
    failed = [error for process, (_, error) in zip(processes, outputs, strict=True) if process.returncode]
    said = next((error.strip().splitlines()[-1] for error in failed if error.strip()), f"sums {sums}")
    return Verdict(
        backend, "fails", f"{ranks} processes couldn't sum their numbers over loopback: {said}", ADVICE[backend]
    )


def _take_part(backend: str, port: int, rank: int, ranks: int) -> int:
    """Sum over all ranks of 1 + rank."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    number = torch.tensor([1 + rank], device=device)
    distributed.all_reduce(number)
    distributed.destroy_process_group()
    return int(number)


if __name__ == "__main__":
    print(_take_part(sys.argv[1], *map(int, sys.argv[2:])))  # noqa: T201
