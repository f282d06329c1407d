# shellcheck shell=bash disable=SC2154,SC2034 # the scripts set run_dir, max_requeues and survive, and use overrides
# Sourced by the sbatch scripts, in the batch shell on the first node: meeting place, stop requests, requeue, verdict.

# The address of the first node, and a port derived from the job's id on which nobody answers there.
choose_meeting_place() {
    local i port
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    for ((i = 0; i < 50; i++)); do
        port=$((20000 + (SLURM_JOB_ID + 211 * i) % 10000))
        if ! (exec 3<>"/dev/tcp/$MASTER_ADDR/$port") 2>/dev/null; then
            MASTER_PORT=$port
            export MASTER_ADDR MASTER_PORT
            return
        fi
    done
    echo "staleflow: MASTER_PORT: 50 ports of $MASTER_ADDR from $((20000 + SLURM_JOB_ID % 10000)) on are in use" >&2
    exit 2
}

# Files of this start of the job: a requeued job keeps its id.
open_attempt() {
    local attempt_dir=$run_dir/slurm/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
    (umask 077 && mkdir -p "$attempt_dir")
    export STALEFLOW_ATTEMPT=$attempt_dir
    touch "$attempt_dir/started"
    if [ -z "${SLURM_JOB_END_TIME:-}" ]; then # older Slurm does not set it; the ranks stop in time for a checkpoint
        local end
        end=$(scontrol show job -o "$SLURM_JOB_ID" | grep -o ' EndTime=[^ ]*')
        if end=$(date -d "${end# EndTime=}" +%s 2>/dev/null); then export SLURM_JOB_END_TIME=$end; fi
    fi
    rm -f "$run_dir/STOP" # a request to an earlier start
    overrides=()
    if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then overrides=(checkpoint.resume=auto); fi
    echo "staleflow: job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, $SLURM_JOB_NODELIST, $MASTER_ADDR:$MASTER_PORT"
}

# Slurm tells this shell that time is nearly up (--signal=B:USR1@...), or that the job is cancelled (TERM).
request_stop() {
    echo "staleflow: $1: asking the ranks to stop with a checkpoint"
    echo "$1" >"$run_dir/STOP" # seen by rank 0 whatever started the ranks
}

# Run the launcher in the background, since bash handles a signal only between commands, and wait for its real end.
run_and_wait() {
    trap 'request_stop "time is nearly up (USR1)"' USR1
    trap 'request_stop "cancelled (TERM)"' TERM
    "$@" &
    wait_for $!
    trap - USR1 TERM
}

# srun's own code hides the failing rank's: the ranks noted the first one that ended, and the job the first cause.
# With fault.survive_rollout other ranks may have died; then rank 0's word counts.
finish() {
    local failed cause
    if [ "$survive" = 1 ] && [ -s "$STALEFLOW_ATTEMPT/rank_0_ended" ]; then
        read -r code <"$STALEFLOW_ATTEMPT/rank_0_ended"
    fi
    cause=$(find "$run_dir" -path '*/attempt_*/first_failure.json' -newer "$STALEFLOW_ATTEMPT/started" -exec cat {} +)
    if [ -n "$cause" ]; then echo "staleflow: cause: $cause" >&2; fi
    if [ "$survive" = 1 ] && [ "$code" = 0 ] && [ -s "$STALEFLOW_ATTEMPT/first_failure" ]; then
        echo "staleflow: the job went on without: $(cut -d' ' -f2- "$STALEFLOW_ATTEMPT/first_failure")" >&2
        rm "$STALEFLOW_ATTEMPT/first_failure"
    fi
    if [ -s "$STALEFLOW_ATTEMPT/first_failure" ]; then
        read -r code failed <"$STALEFLOW_ATTEMPT/first_failure"
        echo "staleflow: first to end: $failed, exit code $code; logs: $run_dir/attempt_*/" >&2
    elif [ "$code" = 0 ] && [ -e "$STALEFLOW_ATTEMPT/stopped" ]; then
        requeue
    fi
    echo "staleflow: ended with exit code $code"
    exit "$code"
}

requeue() {
    local how=requeue
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_requeues" ]; then
        echo "staleflow: stopped with a checkpoint; not requeued, since this was start $max_requeues (--max-requeues)" >&2
        exit 85
    fi
    if grep -qs hold "$run_dir/STOP"; then how=requeuehold; fi
    echo "staleflow: stopped with a checkpoint: scontrol $how $SLURM_JOB_ID"
    scontrol "$how" "$SLURM_JOB_ID" && sleep 60 # Slurm ends this shell
    echo "staleflow: scontrol $how failed; submit again with checkpoint.resume=auto" >&2
    exit 85
}
