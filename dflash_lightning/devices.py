"""What decoding computes on and in: from the name of a device, as a user gives it, to one that this process has."""

from pathlib import Path
from typing import Literal

import psutil
import torch

from dflash_lightning.errors import ConfigError

Dtype = Literal["bfloat16", "float32"]
# Names in `torch.cpu.get_capabilities`.
BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The device called `name`; `auto` is the GPU of this process, or the CPU on a machine without GPUs.

    Args:
        name: auto, cpu, cuda or cuda:N.
        local_rank: number of this process on its node; each takes its own GPU.

    Raises:
        ConfigError: There is no such kind of device, or not so many of them.
    """
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if name == "auto":
        name = f"cuda:{local_rank}" if gpus else "cpu"
    if name not in ("cpu", *gpus) and not (name == "cuda" and gpus):
        raise ConfigError(
            f"device is {name!r}; expected auto or one that this machine has: {', '.join(['cpu', *gpus])}."
        )
    return torch.device(name)


def computes_bfloat16_fast(device: torch.device) -> bool:
    """Whether bfloat16 is the faster dtype: on GPUs, and on CPUs that have instructions for its products.

    Other CPUs compute it correctly, but several times slower than float32.
    """
    return device.type != "cpu" or any(torch.cpu.get_capabilities().get(name) for name in BFLOAT16_INSTRUCTIONS)


def free_memory(device: torch.device, groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still take: of a GPU, or of the machine and of the control groups that it is in.

    Args:
        groups: where control groups (version 2) are mounted; a container or a job of SLURM has a limit there.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    own = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), "0::/")
    place = groups / own.removeprefix("0::/")
    for group in (place, *place.parents):
        if group.is_relative_to(groups) and (group / "memory.max").is_file():
            limit = (group / "memory.max").read_text().strip()
            if limit != "max":
                counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / "memory.current").read_text()) - int(counts["inactive_file"])  # which makes room
                free = min(free, int(limit) - used)
    return free
