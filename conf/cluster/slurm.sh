#!/bin/bash
# One command on all nodes of a SLURM job. Edit the two lines of #SBATCH below and ENVIRONMENT, then, for example:
#   sbatch conf/cluster/slurm.sh capture --target Qwen/Qwen3-8B --data runs/data --cache runs/cache
#   sbatch conf/cluster/slurm.sh fit --config conf/train_qwen3_8b.yaml --resume auto
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8

# All #SBATCH lines stand before the first command: SLURM reads none after it.
#SBATCH --job-name=dflash --time=24:00:00 --output=dflash-%j.log --open-mode=append
# Five minutes before the time is up all tasks get SIGUSR1. Training saves a checkpoint and ends with 75 (SaveOnSignal);
# capture and evaluate are ended by it (138) and go on from what they have written. Either way the job queues again.
#SBATCH --requeue --signal=USR1@300
ENVIRONMENT=.venv/bin/activate

source "$ENVIRONMENT" || exit 1
if [ "$1" = fit ]; then
    set -- "$@" --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE"
fi
# After the first task has ended the others get ten minutes: a crash of one doesn't keep the machines.
srun --wait=600 python -m dflash_lightning "$@"
code=$?
if [ "$code" -eq 75 ] || [ "$code" -eq 138 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
