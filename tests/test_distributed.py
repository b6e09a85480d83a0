"""A process knows its place from what torchrun, srun or neither put into its environment; and how ranks meet."""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from dflash_lightning.distributed import Place, gather_when_all_are_done, launched_place, world_of_all
from dflash_lightning.errors import LostRankError

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


def meet(rank: int, folder: Path, port: int) -> None:
    """Two tasks of an srun meet; then rank 1 stays away until the other has given up."""
    task = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1"}
    os.environ |= {**SRUN_TASK, **task, "MASTER_PORT": str(port)}
    with world_of_all(launched_place()) as group:
        met = gather_when_all_are_done({rank: "x" * rank}, group, timedelta(minutes=5), "meeting", "Do.")
        assert met == [{0: ""}, {1: "x"}]
        message = folder / "message.txt"
        if rank == 1:
            while not message.exists():
                time.sleep(0.05)
            return
        with pytest.raises(LostRankError) as found:
            gather_when_all_are_done(rank, group, timedelta(seconds=3), "decoding at step 9", "Start again.")
        message.write_text(str(found.value))


@pytest.mark.slow
def test_ranks_meet_at_the_end_and_name_the_one_that_does_not_come(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(meet, (tmp_path, port), nprocs=2)
    message = (tmp_path / "message.txt").read_text()
    assert message.startswith("decoding at step 9: rank 0 was done and waited for the others in vain (")
    assert "slower by more than 0.05 minutes. Start again." in message
    assert "Ranks 1 failed" in message
