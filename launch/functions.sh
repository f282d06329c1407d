# shellcheck shell=bash
# Sourced by rank.sh and by the sbatch scripts.

# Wait for the end of a child, through any number of trapped signals; `code` is its exit code.
wait_for() {
    local again
    while :; do
        wait "$1"
        code=$?
        [ "$code" -gt 128 ] || return 0
        kill -0 "$1" 2>/dev/null && continue # only a signal of ours ended the wait
        wait "$1"                            # bash keeps the code of a child that ended meanwhile; 127: told already
        again=$?
        [ "$again" = 127 ] || code=$again
        return 0
    done
}
