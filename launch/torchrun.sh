#!/bin/bash
# torchrun.sh RANKS_PER_NODE CONFIG [section.key=value ...] - start this node's ranks with torchrun.
#
# Without Slurm: all ranks on this machine. In a Slurm step: once per node (srun --ntasks-per-node=1), where node ids
# come from Slurm, so that rank 0 is on the first node. MASTER_ADDR and MASTER_PORT as set by the sbatch script.
set -eu
[ $# -ge 2 ] || { echo "usage: torchrun.sh RANKS_PER_NODE CONFIG [section.key=value ...]" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${STALEFLOW_PYTHON:-python}
ranks_per_node=$1
shift

trap '' USR1 # a request to stop is for the ranks; torchrun's agent would die of it
if [ -n "${SLURM_STEP_ID:-}" ] && [ "${SLURM_STEP_NUM_NODES:-1}" -gt 1 ]; then
    where=(--nnodes="$SLURM_STEP_NUM_NODES" --node-rank="$SLURM_NODEID"
        --master-addr="${MASTER_ADDR:?not set}" --master-port="${MASTER_PORT:?not set}")
else
    where=(--standalone)
fi
exec "$python" -m torch.distributed.run "${where[@]}" --nproc-per-node="$ranks_per_node" --max-restarts=0 \
    --no-python "$here/rank.sh" "$python" -m staleflow run "$@"
