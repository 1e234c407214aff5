#!/usr/bin/env bash
# Trains on a SLURM cluster; submit it from the repository's root, on a file system that all machines share:
#
#   sbatch scripts/slurm.sh quickstart --mesh.num_nodes 4 --train.microbatches_per_node 4
#
# Arguments are those of train.py. One task is one process: task 0 the coordinator, the next mesh.num_nodes tasks the
# nodes, the rest spares. A process that dies is started again inside its task (scripts/keep_running.sh) and so keeps
# its number. PYTHON names the interpreter; MAX_RESTARTS and the like go to keep_running.sh.
#
#SBATCH --job-name=mecefo_jax
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=4
#SBATCH --ntasks=6
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
set -u

export SIGNS=$PWD/runs/slurm-$SLURM_JOB_ID
rm -rf "$SIGNS" # a job that was requeued keeps its number
mkdir -p "$SIGNS"

stopping=
# Not through srun: it answers SIGTERM by killing its tasks. Without --batch, scancel spares this shell.
trap 'stopping=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM

# JAX finds the coordinator's address from SLURM's variables: the step's first machine, and a port made of the job's
# number, so that all meet there again after the coordinator has died. With --no-kill, a task on a machine that was
# lost never counts as ended, and --wait has no effect: hence the signs.
# shellcheck disable=SC2016 # to be expanded in the task
srun --no-kill --kill-on-bad-exit=0 --wait=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash -c '
    export PROCESS_ID=$SLURM_PROCID PYTHONUNBUFFERED=1
    exec bash scripts/keep_running.sh "$@" --cluster.process_id "$SLURM_PROCID"
' task "${PYTHON:-python}" train.py "$@" \
    --faults.scenario live --cluster.coordinator auto --cluster.num_processes "$SLURM_NTASKS" &
srun=$!

codes() {
    cat "$SIGNS"/ended-* 2>/dev/null
}

verdict() { # the exit code of the run, once it has ended or nobody is left to go on with it
    local code
    code=$(codes | grep -xE '0|[2-6]' | sort -n | head -n 1)
    if [[ -z $code ]] && { [[ -e $SIGNS/ended-0 ]] || (($(codes | wc -l) >= SLURM_NTASKS - 1)); }; then
        code=$(codes | grep -xE '75|130' | head -n 1)
        code=${code:-1}
    fi
    echo "$code"
}

while [[ -z $(verdict) ]] && kill -0 "$srun" 2>/dev/null; do
    sleep "${LOOK_SECONDS:-2}" &
    wait $!
done
code=$(verdict)
if [[ $code == 0 ]]; then # the others end by themselves, too
    for ((seconds = 0; seconds < 60; seconds++)); do
        kill -0 "$srun" 2>/dev/null || break
        sleep 1
    done
fi
if [[ -n $stopping && $code == 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID" # the state is saved: go on when there is time again
fi
exit "${code:-1}" # which ends what still runs
