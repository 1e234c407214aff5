#!/usr/bin/env bash
# Keeps one process of a cluster running where no launcher does: scripts/keep_running.sh COMMAND [ARGUMENT ...]
#
# Starts the command again when it dies. Ends with the command's exit code once that says that it left on its own
# accord (table in docs/operations.md), or once MAX_RESTARTS restarts in a row have not lived for QUICK_SECONDS.
# SIGTERM and SIGINT are passed on; after one of them nothing is started again.
#
# Where SIGNS names a folder that all processes see, and PROCESS_ID the number of this one, loops tell each other
#   SIGNS/restart   that a process asked for all to restart (exit 76): the coordinator's loop kills the coordinator
#                   then, without which the nodes end, too; the loops start all of them again
#   SIGNS/ended-N   the exit code with which the loop of process N ended
set -u

MAX_RESTARTS=${MAX_RESTARTS:-10}
QUICK_SECONDS=${QUICK_SECONDS:-30}
FIRST_WAIT_SECONDS=${FIRST_WAIT_SECONDS:-1}
LONGEST_WAIT_SECONDS=${LONGEST_WAIT_SECONDS:-30}
LOOK_SECONDS=${LOOK_SECONDS:-2}
PROCESS_ID=${PROCESS_ID:-}
SIGNS=${SIGNS:-}

child=
stopped_by=

pass_on() {
    stopped_by=$1
    interrupted=1
    [[ -z $child ]] || kill -s "$1" "$child" 2>/dev/null
}

say() {
    echo "[process $PROCESS_ID] $*" >&2
}

read_restart_sign() {
    cat "$SIGNS/restart" 2>/dev/null
}

kill_when_restart_is_asked_for() { # of the process $1, where the sign was $2 when it started
    while [[ $(read_restart_sign) == "$2" ]]; do
        sleep "$LOOK_SECONDS"
    done
    kill -KILL "$1" 2>/dev/null
}

run_once() { # sets code
    local watch='' sign=''
    [[ -z $SIGNS ]] || sign=$(read_restart_sign)
    # The input never ends: a coordinator takes the end of its input for the end of its launcher.
    MECEFO_STARTED=$(date +%s.%N) "$@" <&3 &
    child=$!
    if [[ -n $SIGNS && $PROCESS_ID == 0 ]]; then
        kill_when_restart_is_asked_for "$child" "$sign" >/dev/null 2>&1 3<&- &
        watch=$!
    fi
    while true; do
        interrupted=
        wait "$child" 2>/dev/null
        code=$?
        [[ -n $interrupted ]] || break # else it was the signal that ended the wait
    done
    child=
    [[ -z $watch ]] || kill "$watch" 2>/dev/null
}

end() {
    [[ -z $SIGNS ]] || echo "$code" >"$SIGNS/ended-$PROCESS_ID"
    exit "$code"
}

exec 3<> <(:)
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT
restarts=0
wait_seconds=0
while true; do
    began=$SECONDS
    run_once "$@"
    lived=$((SECONDS - began))
    case $code in
        0 | 2 | 3 | 4 | 5 | 6 | 75 | 130) end ;;
        76) [[ -z $SIGNS ]] || echo "process $PROCESS_ID $(date +%s) $RANDOM" >"$SIGNS/restart" ;;
    esac
    [[ -z $stopped_by ]] || end
    if ((lived >= QUICK_SECONDS)); then
        restarts=0
    fi
    if ((restarts >= MAX_RESTARTS)); then
        say "exit code $code after $lived s; given up after $restarts restarts in a row"
        end
    fi
    if ((restarts == 0)); then
        wait_seconds=0
    elif ((restarts == 1)); then
        wait_seconds=$FIRST_WAIT_SECONDS
    else
        wait_seconds=$((2 * wait_seconds < LONGEST_WAIT_SECONDS ? 2 * wait_seconds : LONGEST_WAIT_SECONDS))
    fi
    restarts=$((restarts + 1))
    say "exit code $code after $lived s; it restarts in $wait_seconds s"
    sleep "$wait_seconds" &
    child=$!
    wait "$child"
    child=
    [[ -z $stopped_by ]] || end
done
