"""What decoding computes on and in: from the name of a device, as a user gives it, to one that this process has."""

from pathlib import Path
from typing import Literal

import psutil
import torch

from dflash_lightning.errors import ConfigError

Dtype = Literal["bfloat16", "float32"]
# Names in `torch.cpu.get_capabilities`.
BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
# The control groups that this process is in.
OWN_GROUPS = Path("/proc/self/cgroup")
# By the controller that a line there names (version 2 names none): folder of the groups, files of the limit and of what
# is used, and the entry of memory.stat for what makes room.
GROUP_FILES = {
    "": (".", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


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

    Other CPUs compute products of many tokens correctly, but several times slower than in float32. A single token's are
    faster in bfloat16 everywhere, as half the bytes are read.
    """
    return device.type != "cpu" or any(torch.cpu.get_capabilities().get(name) for name in BFLOAT16_INSTRUCTIONS)


def free_memory(device: torch.device, groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still take: of a GPU, or of the machine and of the control groups that it is in.

    Not seen are groups that are mounted elsewhere, or above what a container shows of them.

    Args:
        groups: where control groups (version 1, 2 or both) are mounted; a container or a SLURM job has a limit there.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    lines = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []
    own = {name: place for _, names, place in (line.split(":", 2) for line in lines) for name in names.split(",")}
    for controller, (root, *files) in GROUP_FILES.items():
        place = groups / root / own.get(controller, "/").lstrip("/")
        rooms = [_room(group, *files) for group in (place, *place.parents) if group.is_relative_to(groups / root)]
        free = min([free, *(room for room in rooms if room is not None)])
    return free


def _room(group: Path, limit: str, used: str, reclaimable: str) -> int | None:
    """Bytes that are left in a control group; None if it has no limit, or a file of it is missing."""
    if not all((group / name).is_file() for name in (limit, used, "memory.stat")):
        return None
    most = (group / limit).read_text().strip()
    counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return None if most == "max" else int(most) - int((group / used).read_text()) + int(counts.get(reclaimable, 0))
