#!/bin/bash
# mpirun.sh RANKS_PER_NODE CONFIG [section.key=value ...] - start all ranks with mpirun (Open MPI, MPICH or Intel MPI).
#
# In a Slurm allocation: RANKS_PER_NODE on each of its nodes; otherwise on this machine. MPI only starts the ranks and
# tells them where rank 0 is; rank.sh binds, so mpirun must not (Open MPI would give each rank a single core).
set -eu
[ $# -ge 2 ] || { echo "usage: mpirun.sh RANKS_PER_NODE CONFIG [section.key=value ...]" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${STALEFLOW_PYTHON:-python}
mpirun=${STALEFLOW_MPIRUN:-mpirun}
ranks_per_node=$1
shift
command -v "$mpirun" >/dev/null || {
    echo "mpirun.sh: $mpirun not found: load the site's MPI in launch/sites/*.env, or set STALEFLOW_MPIRUN" >&2
    exit 2
}

nodes=${SLURM_JOB_NUM_NODES:-1}
ranks=$((nodes * ranks_per_node))
if "$mpirun" --version 2>&1 | grep -q 'Open MPI'; then
    if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
    flags=(-n "$ranks" --bind-to none --map-by "ppr:$ranks_per_node:node:OVERSUBSCRIBE")
else
    flags=(-n "$ranks" -ppn "$ranks_per_node")
fi
exec "$mpirun" "${flags[@]}" "$here/rank.sh" "$python" -m staleflow run "$@"
