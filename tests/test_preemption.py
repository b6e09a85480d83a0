"""Told to stop, a training saves itself and goes on later: the callback on two ranks, and the SLURM script."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from capture_helpers import capture_arguments, random_texts, write_texts
from command_client import command_server, meeting_place
from fit_helpers import PATIENCE, checkpoints, fit_config, identity, wait_for
from page_commands import command_line, commands_run_by

from dflash_lightning.checkpoints import read_training_checkpoint
from dflash_lightning.cli import run

SLURM_SCRIPT = Path(__file__).parents[1] / "conf" / "cluster" / "slurm.sh"
# These stand in for SLURM: one task, and SIGUSR1 for it as soon as it has saved its first checkpoint.
SBATCH = """#!/bin/bash
exec bash "$@"
"""
SRUN = """#!/bin/bash
[ "$1" = --wait=600 ] || exit 1
shift
"$@" &
if [ -n "$SIGNAL_AFTER" ]; then
    until [ -e "$SIGNAL_AFTER" ]; do sleep 0.05; done
    kill -USR1 $!
fi
wait $!
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$REQUEUED"
"""
# What SLURM gives to the only task of a job on one node; Lightning takes its place from it.
TASK = {
    **{"SLURM_JOB_ID": "81", "SLURM_JOB_NAME": "dflash", "SLURM_NNODES": "1", "SLURM_NTASKS": "1"},
    **{"SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    **{"SLURM_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "1"},
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(llama_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("preemption")
    data = write_texts(folder / "data", llama_folder, random_texts(24))
    run([*capture_arguments(llama_folder, data, folder / "cache")])
    return folder / "cache"


def write_config(llama_folder: Path, cache: Path, folder: Path, **trainer) -> Path:
    """A run of 40 steps, one newest checkpoint after step 4; later ones only where SaveOnSignal saves."""
    callbacks = [checkpoints(folder, "last", every_n_train_steps=4), {"class_path": "callbacks.SaveOnSignal"}]
    config = fit_config(llama_folder, cache, folder, callbacks)
    config["model"]["drafter"]["target_layer_ids"] = [1, 3, 4]
    config["data"]["batch_tokens"] = 180
    config["trainer"] |= {"max_steps": 40, "limit_val_batches": 0, **trainer}
    folder.mkdir()
    file = folder / "fit.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def newest(folder: Path):
    return read_training_checkpoint(folder / "checkpoints" / "last.ckpt")


def assert_same_weights(folder: Path, other: Path) -> None:
    expected, found = newest(folder), newest(other)
    assert expected.step == found.step == 40
    for name, weights in expected.state_dict.items():
        assert torch.equal(weights, found.state_dict[name]), name


def test_a_signal_to_one_rank_stops_all_after_the_same_step(llama_folder, cache, tmp_path):
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += ["-m", "dflash_lightning"]
    server, fit = command_server(), ["fit", "--resume", "auto", "--config"]
    alone = [*fit, str(write_config(llama_folder, cache, undisturbed, devices=2))]
    assert server.wait(server.launch(alone, 2, **meeting_place())) == [0, 0]

    command = [*fit, str(write_config(llama_folder, cache, disturbed, devices=2))]
    process = subprocess.Popen([*launch, *command], stderr=subprocess.PIPE, text=True)
    wait_for((disturbed / "checkpoints" / "last.ckpt").exists)
    worker = psutil.Process(process.pid).children()[1]
    worker.send_signal(signal.SIGUSR1)
    errors = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 1, errors  # the launcher's
    assert "exitcode  : 75" in errors  # of the first; the launcher ends the second if it is still on its way out
    assert newest(disturbed).step < 40

    assert server.wait(server.launch(command, 2, **meeting_place())) == [0, 0]
    assert_same_weights(undisturbed, disturbed)


def test_the_slurm_script_queues_a_stopped_training_again(llama_folder, cache, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    activate = tmp_path / "activate"
    activate.write_text(f"PATH={tools}:{Path(sys.executable).parent}:$PATH\n")
    script = SLURM_SCRIPT.read_text()
    line = "\nENVIRONMENT=.venv/bin/activate\n"
    assert line in script
    directives, commands = script.split(line, 1)
    assert "--signal=USR1" in directives
    assert "#SBATCH" not in commands  # SLURM reads none after the first command
    job = tmp_path / "slurm.sh"
    job.write_text(script.replace(line, f"\nENVIRONMENT={activate}\n"))

    folder, requeued = tmp_path / "run", tmp_path / "requeued"
    [sbatch] = commands_run_by(__file__)
    ours = {"conf/cluster/slurm.sh": [str(job)], "run.yaml": [str(write_config(llama_folder, cache, folder))]}
    command = [str(tools / "sbatch"), *command_line(sbatch, ours)[1:]]
    environment = {**os.environ, **TASK, "REQUEUED": str(requeued)}
    last = folder / "checkpoints" / "last.ckpt"

    first = subprocess.run(command, env={**environment, "SIGNAL_AFTER": str(last)}, check=False, timeout=PATIENCE)
    assert first.returncode == 75
    assert requeued.read_text() == "requeue 81\n"
    assert newest(folder).step < 40
    assert not list(folder.glob("hpc_ckpt*"))  # Lightning's own way

    before = identity(last)
    subprocess.run(command, env=environment, check=True, timeout=PATIENCE)
    assert newest(folder).step == 40
    assert identity(last) != before
    assert requeued.read_text() == "requeue 81\n"
