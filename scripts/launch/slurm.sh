#!/bin/bash
# A run of several hosts on SLURM: sbatch scripts/launch/slurm.sh JOB [--table.key VALUE ...]
#
# Two minutes before the time limit, SLURM sends SIGUSR1 to this script, which passes it on; Keel saves and ends, and the
# job is put back into the queue. It resumes from its newest checkpoint. A mistake in the job (exit code 78) is not
# repeated. Slurm itself requeues it when a node fails. The run folder and the data must be visible to all hosts, unless
# they are in object storage.
# KEEL_PORT is the port of torchrun's store on the first host; without it, one of 29500 to 32499 that follows from the
# job's number, since jobs that share a host would meet in one store.
#SBATCH --job-name=keel
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -u

FOLDER=${KEEL_RUN_FOLDER:?set KEEL_RUN_FOLDER to the run folder: export KEEL_RUN_FOLDER=runs/my_run}
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
FIRST_HOST=$(head -n 1 <<<"$HOSTS")
PORT=${KEEL_PORT:-$((29500 + SLURM_JOB_ID % 3000))}
# What an earlier launch has said, which has a time in it.
BEFORE=$(python scripts/launch/state.py "$FOLDER")
# srun passes it to all hosts: the key of the hash that Keel's values in torchrun's store have (docs/stopping.md).
export KEEL_SECRET="${KEEL_SECRET:-$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')}"

# By itself torchrun would die of SIGUSR1: --signals-to-handle makes it pass it on, and wait for the ranks.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "${KEEL_RANKS_PER_HOST:-8}" \
    --rdzv-backend c10d --rdzv-endpoint "$FIRST_HOST:$PORT" --rdzv-id "$SLURM_JOB_ID" \
    --signals-to-handle SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout 100 \
    train.py --config "$@" --job.output_dir "$FOLDER" --job.grace_seconds 100 &
STEP=$!
trap 'scancel --signal=USR1 "$SLURM_JOB_ID.0"' USR1
trap 'scancel --signal=TERM "$SLURM_JOB_ID.0"' TERM

# `wait` returns early when a trapped signal arrives; of a process that has ended it returns the exit code, each time.
wait "$STEP"
while kill -0 "$STEP" 2>/dev/null; do
    wait "$STEP"
done
wait "$STEP"
CODE=$?

# torchrun turns every exit code into 1, so status.json decides; that of an earlier launch would requeue forever a job
# that fails before it writes its own.
NOW=$(python scripts/launch/state.py "$FOLDER")
STATE=unknown
if [ -n "$NOW" ] && [ "$NOW" != "$BEFORE" ]; then
    STATE=${NOW%% *}
fi
echo "the run is $STATE (torchrun's exit code: $CODE)"
if [ "$STATE" = preempted ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 75
fi
exit "$CODE"
