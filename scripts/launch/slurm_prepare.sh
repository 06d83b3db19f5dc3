#!/bin/bash
# Text prepared on many hosts by a SLURM array. The words are those of `keel prepare`, twice the same:
#   SHARDS=$(sbatch --parsable --array=0-63 scripts/launch/slurm_prepare.sh my_text --output FOLDER --tokenizer FILE)
#   sbatch --dependency=afterok:$SHARDS scripts/launch/slurm_prepare.sh my_text --output FOLDER --tokenizer FILE
#
# Each task of the array makes one shard; the job without an array puts them together. If shards fail, it names them: run
# them again, as sbatch --array=3,17-20 with KEEL_SHARDS=64 in the environment, since N then does not follow from the
# array. A task that is requeued continues. Text, tokenizer and output must be visible to all nodes.
# With s3:// names for text, tokenizer and output, nodes need no shared disk (docs/buckets.md).
#SBATCH --job-name=keel-prepare
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A-%a.log
set -u

PART=(--finish)
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    PART=(--shard "$SLURM_ARRAY_TASK_ID/${KEEL_SHARDS:-$((SLURM_ARRAY_TASK_MAX + 1))}")
fi
exec keel prepare "$@" "${PART[@]}" --processes "${SLURM_CPUS_PER_TASK:-1}"
