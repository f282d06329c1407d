#!/bin/bash
# nsys.sh COMMAND... - run a rank under Nsight Systems if it is one of NSYS_RANKS. rank.sh calls it when that is set.
#
#   NSYS_RANKS   ranks to record: "all" or "0,3,4"
#   NSYS_DIR     folder of the reports               [.]
#   NSYS_PLAN    plan.json of the job: puts the role into the report's name
#   NSYS_FLAGS   more flags for `nsys profile`
# A report per rank: NSYS_DIR/rank_R.ROLE.nsys-rep. Capture begins and ends with cudaProfilerStart/Stop if NSYS_RANGE=1.
set -u
rank=${RANK:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:-0}}}}
wanted=${NSYS_RANKS:-all}
if [ "$wanted" != all ] && [[ ",$wanted," != *",$rank,"* ]]; then exec "$@"; fi
command -v nsys >/dev/null || { echo "nsys.sh: nsys not found: load its module in launch/sites/*.env" >&2; exit 2; }

role=rank
if [ -n "${NSYS_PLAN:-}" ]; then
    role=$("${STALEFLOW_PYTHON:-python3}" -c \
        'import json, sys; print(json.load(open(sys.argv[1]))["ranks"][int(sys.argv[2])]["role"])' "$NSYS_PLAN" "$rank") || exit 2
fi
range=()
if [ "${NSYS_RANGE:-0}" = 1 ]; then range=(--capture-range=cudaProfilerApi --capture-range-end=stop); fi
mkdir -p "${NSYS_DIR:=.}"
# shellcheck disable=SC2086 # NSYS_FLAGS is a list
exec nsys profile --trace=cuda,nvtx,osrt --sample=none --kill=none --force-overwrite=true \
    --output="$NSYS_DIR/rank_$rank.$role" "${range[@]}" ${NSYS_FLAGS:-} "$@"
