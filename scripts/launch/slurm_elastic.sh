#!/bin/bash
# An elastic run of several hosts on SLURM, which goes on when one is lost: sbatch scripts/launch/slurm_elastic.sh JOB ...
#
# When a node fails, the others load the newest checkpoint and go on without it. The first node is an exception, since this
# script and the store in which the hosts meet are on it: Slurm ends the job as FAILED, and the same command resumes it.
# Two minutes before the time limit, SLURM sends SIGUSR1 to this script, which passes it on; Keel saves and ends, and the
# job is put back into the queue. It resumes from its newest checkpoint, on as many nodes as it is given then. A mistake in
# the job (exit code 78) is not repeated. The run folder and the data must be visible to all hosts, unless they are in
# object storage.
#SBATCH --job-name=keel
#SBATCH --nodes=2-4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -u

FOLDER=${KEEL_RUN_FOLDER:?set KEEL_RUN_FOLDER to the run folder: export KEEL_RUN_FOLDER=runs/my_run}
FIRST_HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT=${KEEL_PORT:-$((29500 + SLURM_JOB_ID % 3000))}
# What an earlier launch has said, which has a time in it.
BEFORE=$(python scripts/launch/state.py "$FOLDER")
# srun passes these to all hosts (scripts/launch/elastic.sh says what they are).
export KEEL_SECRET="${KEEL_SECRET:-$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')}"
export KEEL_RENDEZVOUS="$FIRST_HOST:$PORT"
export KEEL_JOB="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
export KEEL_HOSTS="1:$SLURM_NNODES"

python scripts/launch/rendezvous.py "$PORT" --host "$FIRST_HOST" &
STORE=$!
srun --no-kill --kill-on-bad-exit=0 scripts/launch/elastic.sh "$@" &
STEP=$!
trap 'scancel --signal=USR1 "$SLURM_JOB_ID.0"' USR1
trap 'scancel --signal=TERM "$SLURM_JOB_ID.0"' TERM

while kill -0 "$STEP" 2>/dev/null && kill -0 "$STORE" 2>/dev/null; do
    sleep 1
done
kill "$STORE" 2>/dev/null || kill "$STEP" # the hosts would wait for another store
wait "$STEP"
CODE=$?

# srun's exit code is the highest of all nodes', also of those that were lost, so status.json decides; that of an earlier
# launch would requeue forever a job that fails before it writes its own.
NOW=$(python scripts/launch/state.py "$FOLDER")
STATE=unknown
if [ -n "$NOW" ] && [ "$NOW" != "$BEFORE" ]; then
    STATE=${NOW%% *}
fi
echo "the run is $STATE (srun's exit code: $CODE)"
case "$STATE" in
    done) exit 0 ;;
    preempted)
        scontrol requeue "$SLURM_JOB_ID"
        exit 75
        ;;
esac
exit "$((CODE ? CODE : 1))"
