#!/bin/bash
# Run on every node, with the same HEAD (the name of any one of them) and JOB.
#   HEAD=node1 JOB=first bash examples/cluster/torchrun.sh --checkpoint /shared/run.pt
# NODES may be a range: torchrun begins with as many as there are, and restarts where one goes or comes.
set -euo pipefail

# Seen by all nodes, as any of them may come to have rank 0, whose cache counts.
export PLANNER_CACHE="${PLANNER_CACHE:-$HOME/.cache/planner}"
# Each life of the run gets a store of its own: the old one holds addresses of ranks that are gone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes "${NODES:-2:4}" --nproc-per-node "${GPUS:-8}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "$JOB" \
    "$(dirname "$0")/train.py" "$@"
