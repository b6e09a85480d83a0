"""Which of several processes this one is, as its launcher (torchrun, srun) says."""

import os
from typing import NamedTuple

from lightning.fabric.plugins.environments import TorchElasticEnvironment


class Place(NamedTuple):
    """Rank of this process among ``world_size``, and among those of its node."""

    rank: int
    world_size: int
    local_rank: int


def launched_place() -> Place:
    """The place given by torchrun or srun; a process started by hand is the only one.

    Of srun's variables the step's are read. Those of the job (SLURM_NTASKS, which Lightning goes by) are also set for a
    process that a batch script starts without srun, which is alone, and for a shell on an allocated node.
    """
    if TorchElasticEnvironment.detect():
        elastic = TorchElasticEnvironment()
        return Place(elastic.global_rank(), elastic.world_size(), elastic.local_rank())
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1:
        return Place(int(os.environ["SLURM_PROCID"]), tasks, int(os.environ["SLURM_LOCALID"]))
    return Place(0, 1, 0)
