#!/bin/bash
# A run on one host on SLURM: sbatch scripts/launch/slurm_one_host.sh JOB [--table.key VALUE ...]
#
# Two minutes before the time limit, SLURM sends SIGUSR1 to this script, which passes it on to `keel train`. Its exit code
# is 75 when everything is saved, and the job is put back into the queue. It resumes from its newest checkpoint. Other
# codes end the job: 0 is done, 78 is a mistake in the job file.
#SBATCH --job-name=keel
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -u

keel train "$@" --ranks "${KEEL_RANKS:-8}" &
KEEL=$!
trap 'kill -USR1 "$KEEL"' USR1
trap 'kill -TERM "$KEEL"' TERM

# `wait` returns early when a trapped signal arrives; of a process that has ended it returns the exit code, each time.
wait "$KEEL"
while kill -0 "$KEEL" 2>/dev/null; do
    wait "$KEEL"
done
wait "$KEEL"
CODE=$?

if [ "$CODE" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
