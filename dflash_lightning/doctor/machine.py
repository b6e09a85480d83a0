"""Checks of the machine: accelerators, memory, disk, open files."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.filesize import decimal

from dflash_lightning.devices import computes_bfloat16_fast
from dflash_lightning.doctor.verdict import Verdict
from dflash_lightning.wording import counted

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY = GIB
"""Loader workers hand their batches over in shared memory; containers have 64 MB of it unless told otherwise."""
LEAST_DISK = 5 * GIB
LEAST_OPEN_FILES = 4096
"""A process keeps 256 shards open, with some files each, and loader workers hand over each tensor as a file."""


def check_machine(folder: Path) -> Iterator[Verdict]:
    """All of them.

    Args:
        folder: where runs are written; it needn't exist.
    """
    yield check_accelerators()
    yield check_compiler()
    yield check_memory()
    yield check_shared_memory(free_disk(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None)
    for name, place in {"disk": folder, "temporary files": Path(tempfile.gettempdir())}.items():
        yield check_disk(name, place, free_disk(place))
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def free_disk(folder: Path) -> int:
    """Free bytes where a folder lies or would lie."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free


def check_accelerators() -> Verdict:
    """The GPUs, each by a product of matrices that is compared with the CPU's."""
    count = torch.cuda.device_count()
    if not count:
        if torch.version.cuda is not None:
            return Verdict(
                "accelerators",
                "doubtful",
                f"torch is built for CUDA {torch.version.cuda}, but sees no GPU; it would train on the CPU",
                "`nvidia-smi` says whether the driver sees one and is new enough for that CUDA. CUDA_VISIBLE_DEVICES "
                "may hide it; a container needs `--gpus all`.",
            )
        return check_cpu(computes_bfloat16_fast(torch.device("cpu")))
    names = [torch.cuda.get_device_properties(number) for number in range(count)]
    shown = ", ".join(f"{gpu.name} with {gpu.total_memory / GIB:.0f} GiB" for gpu in names)
    factors = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for number in range(count):
        try:
            product = (factors[0].to(f"cuda:{number}") @ factors[1].to(f"cuda:{number}")).cpu()
        except RuntimeError as error:  # an older driver, no kernels for it, taken by another process
            reason = str(error).splitlines()[0]
            return Verdict(
                "accelerators",
                "fails",
                f"{shown}; cuda:{number} can't compute: {reason}",
                "`nvidia-smi` shows its driver and who uses it; torch must be built for it.",
            )
        if not torch.allclose(product.float(), (factors[0] @ factors[1]).float(), atol=0.25):
            return Verdict(
                "accelerators",
                "fails",
                f"{shown}; cuda:{number} multiplies wrongly",
                "Don't use it: CUDA_VISIBLE_DEVICES.",
            )
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return Verdict(
            "accelerators",
            "doubtful",
            f"{shown}, without bfloat16",
            "Train with trainer.precision 32-true, or elsewhere.",
        )
    return Verdict("accelerators", "ok", shown)


def check_cpu(bfloat16: bool) -> Verdict:
    """A CPU that is to compute.

    Args:
        bfloat16: whether it has instructions that make such products fast.
    """
    found = f"no GPU: the CPU computes, {counted(os.cpu_count(), 'core')}"
    if not bfloat16:
        return Verdict(
            "accelerators",
            "doubtful",
            f"{found}, without instructions for bfloat16, in which it computes many tokens correctly but slowly",
            "Train with trainer.precision 32-true, and give prepare, capture, evaluate and generate --dtype float32.",
        )
    return Verdict("accelerators", "ok", found)


def check_compiler() -> Verdict:
    """FlexAttention is compiled on a GPU, and Triton wants a C compiler for that."""
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler or not torch.cuda.is_available():
        return Verdict("C compiler", "ok", compiler or "none, and none is needed without a GPU")
    return Verdict("C compiler", "fails", "none; torch.compile needs one on a GPU", "Install gcc.")


def check_memory() -> Verdict:
    """What the machine has, for those who plan; how much a run needs depends on the target."""
    values = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(values[name].split()[0]) * 1024 / GIB for name in ("MemAvailable", "MemTotal"))
    return Verdict("memory", "ok", f"{free:.1f} of {total:.1f} GiB are free")


def check_shared_memory(free: int | None) -> Verdict:
    """Room for what loader workers hand over."""
    if free is None:
        return Verdict("shared memory", "doubtful", f"there is no {SHARED_MEMORY}", "Set data.num_workers to 0.")
    if free < LEAST_SHARED_MEMORY:
        return Verdict(
            "shared memory",
            "doubtful",
            f"{decimal(free)} are free in {SHARED_MEMORY}; loader workers die of a bus error when it is full",
            "Start the container with --shm-size 8g (or --ipc host), or set data.num_workers to 0.",
        )
    return Verdict("shared memory", "ok", f"{decimal(free)} are free in {SHARED_MEMORY}")


def check_disk(name: str, folder: Path, free: int) -> Verdict:
    """Room for checkpoints; `cache plan` says what a cache takes."""
    found = f"{decimal(free)} are free for {folder}"
    if free < LEAST_DISK:
        return Verdict(name, "doubtful", found, "Free some, or write elsewhere. `cache plan` says what a cache takes.")
    return Verdict(name, "ok", found)


def check_open_files(limit: int) -> Verdict:
    """How many files a process may have open."""
    if limit < LEAST_OPEN_FILES:
        return Verdict(
            "open files",
            "doubtful",
            f"a process may open {limit}; caches of many shards with loader workers need more",
            f"`ulimit -n 65536` before the start (at least {LEAST_OPEN_FILES}).",
        )
    return Verdict("open files", "ok", f"a process may open {limit:,}")
