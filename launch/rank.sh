#!/bin/bash
# rank.sh COMMAND... - one rank of a job: limits, node-local caches, NUMA binding, and who failed first.
#
# Every launcher starts this, and this starts the rank. Reads the launcher's variables for rank and local rank, and
#   STALEFLOW_ATTEMPT     folder in which ranks note the first failure, or a stop with a checkpoint (sbatch scripts)
#   STALEFLOW_NODE_CACHE  node-local folder for compiled kernels       [$TMPDIR or /tmp, then staleflow-USER]
#   STALEFLOW_BIND        "numa" (default) or "none"
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/functions.sh
source "$here/functions.sh"

rank=${RANK:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:-0}}}}
local_rank=${LOCAL_RANK:-${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${SLURM_LOCALID:-0}}}}

# Soft limits up to the hard ones: pinned memory needs memlock, sockets and shared memory need open files.
ulimit -S -l "$(ulimit -H -l)" 2>/dev/null
ulimit -S -n "$(ulimit -H -n)" 2>/dev/null
ulimit -S -c 0

# Kernels are compiled per node: on a shared filesystem hundreds of ranks would lock and overwrite each other's files.
cache=${STALEFLOW_NODE_CACHE:-${TMPDIR:-/tmp}/staleflow-$(id -un)}
if (umask 077 && mkdir -p "$cache") 2>/dev/null; then
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
    export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$cache/vllm}
    export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$cache/cuda}
fi
export PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # models are local folders; compute nodes often have no way out
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# The NUMA node of this rank's device. Local rank 0 is the host and has none; local rank r has visible device r - 1,
# or device 0 where the launcher shows each task its own device only.
numa_node() {
    local visible bus device=$((local_rank - 1))
    [ "$device" -ge 0 ] && command -v nvidia-smi >/dev/null || return 1
    IFS=, read -r -a visible <<<"${CUDA_VISIBLE_DEVICES:-}"
    [ "${#visible[@]}" != 1 ] || device=0
    bus=$(nvidia-smi --id="${visible[$device]:-$device}" --query-gpu=pci.bus_id --format=csv,noheader 2>/dev/null) || return 1
    bus=${bus,,}
    cat "/sys/bus/pci/devices/${bus#0000}/numa_node" 2>/dev/null
}
bind=()
if [ "${STALEFLOW_BIND:-numa}" = numa ] && node=$(numa_node) && [ "$node" -ge 0 ] 2>/dev/null; then
    if command -v numactl >/dev/null; then
        bind=(numactl "--cpunodebind=$node" "--preferred=$node")
    elif command -v taskset >/dev/null; then # cores only; memory then follows by first touch
        bind=(taskset -c "$(cat "/sys/devices/system/node/node$node/cpulist")")
    fi
fi

# Signals go on to the rank, once: srun signals every process of the step by itself, other launchers only this one.
under_srun=no
if [ -n "${SLURM_STEP_ID:-}" ] && [ -z "${PMIX_NAMESPACE:-}${TORCHELASTIC_RUN_ID:-}" ]; then under_srun=yes; fi
# shellcheck disable=SC2317,SC2329 # called by the traps
pass_on() { [ "$under_srun" = yes ] || kill "-$1" "$child" 2>/dev/null; }
for name in TERM INT USR1; do
    # shellcheck disable=SC2064 # the name is meant now
    trap "pass_on $name" "$name"
done
if [ -n "${NSYS_RANKS:-}" ]; then set -- "$here/nsys.sh" "$@"; fi
"${bind[@]}" "$@" &
child=$!
wait_for "$child"

# Slurm and torchrun end all ranks when one exits with a code; a stop with a checkpoint (85) is no failure, so the batch
# script is told by a file. A later failure is mostly the consequence of the first: that file is made once (noclobber).
if [ -n "${STALEFLOW_ATTEMPT:-}" ]; then
    if [ "$rank" = 0 ]; then echo "$((code == 85 ? 0 : code))" >"$STALEFLOW_ATTEMPT/rank_0_ended"; fi
    if [ "$code" = 85 ]; then
        touch "$STALEFLOW_ATTEMPT/stopped"
        code=0
    elif [ "$code" != 0 ]; then
        (set -C; echo "$code rank $rank on $(hostname)" >"$STALEFLOW_ATTEMPT/first_failure") 2>/dev/null
    fi
fi
exit "$code"
