#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
# One torchrun on each node. From the repository's folder:
#   sbatch examples/cluster/slurm.sh --checkpoint /shared/run.pt
# Where a node fails Slurm queues the job again; with `sbatch --nodes=3` it goes on with fewer.
set -euo pipefail

export PLANNER_CACHE="${PLANNER_CACHE:-$HOME/.cache/planner}" # on a disk that all nodes see
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1                   # a new store in each life of the run
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # reads all of it: with `head` scontrol could fail

srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$head:29400" --rdzv-id "$SLURM_JOB_ID" \
    examples/cluster/train.py "$@" # sbatch runs a copy of this file, in the folder where it was called
