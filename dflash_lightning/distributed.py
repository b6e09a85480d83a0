"""Which of several processes this one is, as its launcher (torchrun, srun) says."""

from typing import NamedTuple

from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment


class Place(NamedTuple):
    """Rank of this process among ``world_size``, and among those of its node."""

    rank: int
    world_size: int
    local_rank: int


def launched_place() -> Place:
    """The place given by torchrun or srun; a process started by hand is the only one."""
    for environment in (TorchElasticEnvironment, SLURMEnvironment):
        if environment.detect():
            found = environment()
            return Place(found.global_rank(), found.world_size(), found.local_rank())
    alone = LightningEnvironment()
    return Place(alone.global_rank(), 1, alone.local_rank())
