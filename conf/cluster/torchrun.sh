#!/bin/bash
# One command on several machines without a scheduler. Edit the three lines below and start it on every machine with the
# machine's number, 0 on the first, for example:
#   conf/cluster/torchrun.sh 0 capture --target Qwen/Qwen3-8B --data runs/data --cache runs/cache
#   conf/cluster/torchrun.sh 0 fit --config conf/train_qwen3_8b.yaml --resume auto
NODES=2
PROCESSES_PER_NODE=8
FIRST_NODE=10.0.0.1

# A machine with several networks needs the name of the right one, for example:
#   export NCCL_SOCKET_IFNAME=eth1 GLOO_SOCKET_IFNAME=eth1
node=$1
shift
if ! [[ "$node" =~ ^[0-9]+$ ]] || [ $# -eq 0 ]; then
    echo "usage: $0 NODE_NUMBER COMMAND ...   (NODE_NUMBER from 0 to $((NODES - 1)), COMMAND capture, fit or evaluate)" >&2
    exit 2
fi
if ! command -v torchrun > /dev/null; then
    echo "torchrun isn't in PATH: activate the environment first (source .venv/bin/activate)" >&2
    exit 2
fi
if [ "$1" = fit ]; then
    set -- "$@" --trainer.num_nodes "$NODES" --trainer.devices "$PROCESSES_PER_NODE"
fi
exec torchrun --nnodes "$NODES" --nproc-per-node "$PROCESSES_PER_NODE" --node-rank "$node" \
    --master-addr "$FIRST_NODE" --master-port 29500 -m dflash_lightning "$@"
