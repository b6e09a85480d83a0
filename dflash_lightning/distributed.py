"""Which of several processes this one is, as its launcher (torchrun, srun) says; groups that share a target; and how
ranks meet that finish at different times."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
from torch import distributed

from dflash_lightning.errors import ConfigError, LostRankError

T = TypeVar("T")
# The members of a group wait for each other while a large target is read from a slow disk.
TIMEOUT = timedelta(hours=2)


class Place(NamedTuple):
    """Rank of this process among ``world_size``, and among those of its node, which is one of ``num_nodes``."""

    rank: int
    world_size: int
    local_rank: int
    num_nodes: int = 1


class Group(NamedTuple):
    """The processes that hold one target together; the leader is the one of them that writes.

    Attributes:
        number: of this group among all.
        count: how many groups there are.
        leads: whether this process is the leader.
    """

    number: int
    count: int
    leads: bool


def launched_place() -> Place:
    """The place given by torchrun or srun; a process started by hand is the only one.

    Of srun's variables the step's are read. Those of the job (SLURM_NTASKS, which Lightning goes by) are also set for a
    process that a batch script starts without srun, which is alone, and for a shell on an allocated node.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE")
    if distributed.is_torchelastic_launched():
        return Place(*(int(os.environ[name]) for name in names))
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES")
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return Place(*(int(os.environ[name]) for name in names))
    return Place(0, 1, 0)


def form_groups(place: Place, size: int) -> Group:
    """Make `size` processes of neighbouring ranks a torch.distributed world of their own; return this process's.

    Each group is a whole world, not a subgroup, so that what a group does (load, compute, end) never waits for another
    one. A process alone is a group without torch.distributed.

    Raises:
        ConfigError: the processes can't be divided into groups of that size.
    """
    if size > 1:
        if not distributed.is_torchelastic_launched() or place.world_size % size:
            raise ConfigError(
                f"{size} processes are to hold a target together, but this is process {place.rank + 1} of "
                f"{place.world_size}. Start a multiple of {size} processes with torchrun."
            )
        store, _, _ = next(distributed.rendezvous("env://"))
        gpu = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else None
        if gpu:
            torch.cuda.set_device(gpu)
        distributed.init_process_group(
            "nccl" if gpu else "gloo",
            store=distributed.PrefixStore(f"target {place.rank // size}", store),
            rank=place.rank % size,
            world_size=size,
            timeout=TIMEOUT,
            device_id=gpu,
        )
    return Group(place.rank // size, place.world_size // size, place.rank % size == 0)


@contextmanager
def world_of_all(place: Place) -> Iterator[distributed.ProcessGroup | None]:
    """All launched processes as a gloo group, for `gather_when_all_are_done`; None for a process alone.

    All of them enter together, and work on their own until they gather.
    """
    if place.world_size == 1:
        yield None
        return
    address = "env://"
    if not distributed.is_torchelastic_launched():
        # Here, because Lightning takes seconds to import, which every command would pay.
        from lightning.fabric.plugins.environments import SLURMEnvironment

        node = SLURMEnvironment.resolve_root_node_address(os.environ["SLURM_STEP_NODELIST"])
        port = os.environ.get("MASTER_PORT", 15000 + int(os.environ["SLURM_JOB_ID"][-4:]))  # as Lightning chooses it
        address = f"tcp://{node}:{port}"
    distributed.init_process_group(
        "gloo", init_method=address, rank=place.rank, world_size=place.world_size, timeout=TIMEOUT
    )
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()


def gather_when_all_are_done(
    mine: T, group: distributed.ProcessGroup, timeout: timedelta, work: str, advice: str
) -> list[T]:
    """The value of every rank, on every rank, where ranks finish at very different times.

    They wait for each other on the host, whatever backend trains: no collective of the device is left waiting, which
    would end the run by its own, shorter watchdog.

    Args:
        mine: this rank's value; anything that pickles.
        group: a gloo group of all ranks.
        timeout: how long the first one waits for the last one.
        work: what they were doing, for the error.
        advice: what to do when one is lost or late, for the error.

    Raises:
        LostRankError: on every rank that waited, when one has ended or wasn't done in time.
    """
    try:
        distributed.monitored_barrier(group, timeout, wait_all_ranks=True)
    except RuntimeError as error:
        raise LostRankError(
            f"{work}: rank {distributed.get_rank()} was done and waited for the others in vain "
            f"({' '.join(str(error).split())}). If one has ended, its own log says why; it may also have been slower "
            f"by more than {timeout.total_seconds() / 60:g} minutes. {advice}"
        ) from error
    values: list[T] = [mine] * distributed.get_world_size(group)
    distributed.all_gather_object(values, mine, group=group)
    return values


def is_of_lost_rank(error: Exception) -> bool:
    """Whether a collective failed. NCCL's own errors have a type; gloo's only name the file that they come from."""
    return isinstance(error, distributed.DistError) or "gloo/transport" in str(error)


def leaders_value(value: T) -> T:
    """The group leader's `value`, in every member."""
    if not distributed.is_initialized():
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]
