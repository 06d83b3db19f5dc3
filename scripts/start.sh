#!/bin/sh
# Train a model on a machine that has nothing but Python: make the environment .venv, install Keel in it, and train
# debug.toml, or another job. Repeated, it trains at once.
#
#   sh scripts/start.sh                                           debug.toml, in the current folder
#   sh scripts/start.sh my_text.toml --training.steps 100         the words of `keel train`
set -eu
root=$(CDPATH="" cd -- "$(dirname -- "$0")/.." && pwd -P)
. "$root/scripts/environment.sh"
prepare_environment ""

job=debug.toml
case ${1-} in "" | -*) ;; *) job="" ;; esac
for word in "$@"; do
    case $word in --config | --config=*) job="" ;; esac
done
export KEEL_LAUNCHER="sh '$0'"
exec "$venv/bin/keel" train ${job:+"$job"} "$@"
