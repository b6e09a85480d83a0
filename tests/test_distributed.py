"""A process knows its place from what torchrun, srun or neither put into its environment."""

import os

import pytest

from dflash_lightning.distributed import Place, launched_place

# As Slurm sets them: a batch script has the job's variables, and each task of an srun its step's as well.
BATCH_SCRIPT = {
    **{"SLURM_JOB_ID": "81", "SLURM_JOB_NAME": "capture.sh", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"},
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
}
SRUN_TASK = {
    **BATCH_SCRIPT,
    **{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"},
    **{"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"},
}
SHELL_ON_A_NODE = {**SRUN_TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "GROUP_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Place(0, 1, 0)),
        (TORCHRUN, Place(3, 4, 1, 2)),
        (SRUN_TASK, Place(5, 8, 1, 2)),
        ({**SRUN_TASK, "SLURM_JOB_NAME": "interactive"}, Place(5, 8, 1, 2)),  # srun inside salloc
        (BATCH_SCRIPT, Place(0, 1, 0)),
        (SHELL_ON_A_NODE, Place(0, 1, 0)),
        # one srun task a node, each a torchrun
        ({**SRUN_TASK, **TORCHRUN}, Place(3, 4, 1, 2)),
    ],
)
def test_place(monkeypatch, environment, place):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched_place() == place
