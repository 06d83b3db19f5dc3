#!/bin/bash
# One host of a run that goes on when hosts are lost, and takes in those that join (docs/stopping.md). On every host:
#
#   export KEEL_RENDEZVOUS=login1:29500 KEEL_JOB=my_run KEEL_RUN_FOLDER=/shared/runs/my_run
#   export KEEL_SECRET_FILE=~/my_run.secret      # made once: (umask 077; openssl rand -hex 32 >~/my_run.secret)
#   scripts/launch/elastic.sh JOB [--table.key VALUE ...]
#
# The secret (a file that only you can read, or KEEL_SECRET itself) is the same on all hosts, and the key of the hash that
# each of Keel's values in the store has (docs/stopping.md, "The network"). KEEL_RENDEZVOUS is where
# scripts/launch/rendezvous.py runs. All hosts have the data, and share the run folder, unless it is in object storage.
# torchrun alone re-forms the job while its agent lives. This loop starts the agent again when it has ended: because the
# store was gone, the host was cut off, or a host died while the ranks were being numbered. A mistake in the job (exit code
# 78) ends it on all hosts.
set -u

FOLDER=${KEEL_RUN_FOLDER:?set KEEL_RUN_FOLDER to the run folder}
RENDEZVOUS=${KEEL_RENDEZVOUS:?set KEEL_RENDEZVOUS to HOST:PORT of scripts/launch/rendezvous.py}
JOB=${KEEL_JOB:?set KEEL_JOB to a name for this launch, the same on all hosts}
if [ -n "${KEEL_SECRET_FILE:-}" ]; then
    if [ -n "$(find -L "$KEEL_SECRET_FILE" -perm /077)" ]; then
        echo "others may read KEEL_SECRET_FILE, $KEEL_SECRET_FILE: chmod 600 it" >&2
        exit 78
    fi
    KEEL_SECRET=$(cat "$KEEL_SECRET_FILE") || exit 78
fi
export KEEL_SECRET="${KEEL_SECRET:?set KEEL_SECRET, or KEEL_SECRET_FILE to a file that has it, the same on all hosts}"
CONF=${KEEL_RENDEZVOUS_CONF:-is_host=false,last_call_timeout=10,join_timeout=86400,read_timeout=60,close_timeout=1}
ERRORS=$(mktemp)
trap 'rm -f "$ERRORS"' EXIT

# torch would keep the address of the first round's first host on the other hosts, even when that host is lost.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

# torchrun closes a rendezvous for good when an agent fails. The hosts then meet in the next round, whose number is in the
# store.
store() { python "$(dirname "$0")/rendezvous.py" "$1" "$RENDEZVOUS" "$JOB" "${@:2}"; }
pause() { sleep "${KEEL_PAUSE_SECONDS:-5}"; }

# Of a rank that has ended with exit code 78 torchrun says so, and would start it again a thousand times.
is_mistake() { grep -q "(exitcode: 78)" "$ERRORS"; }
stop_at_mistake() {
    until is_mistake; do
        sleep 1
    done
    kill "$AGENT"
}

AGENT=
CLOSED=
STOPPED=
for SIGNAL in TERM INT USR1; do
    # shellcheck disable=SC2064 # the signal's name is filled in now
    trap "STOPPED=SIG$SIGNAL; [ -n \"\$AGENT\" ] && kill -$SIGNAL \$AGENT 2>/dev/null" "$SIGNAL"
done

while [ -z "$STOPPED" ]; do
    if ! ROUND=$(store meet ${CLOSED:+"$CLOSED"}); then
        CLOSED= # another store may take its place, in which no round is closed
        pause
        continue
    fi
    if [ "$ROUND" = ended ]; then
        echo "the job $JOB has come to its end; a further launch needs another KEEL_JOB" >&2
        exit 0
    fi
    [ -n "$STOPPED" ] && break
    # tee outlives what is sent to all processes of a terminal, or of a step of Slurm: the ranks still have to say something.
    torchrun --nnodes "${KEEL_HOSTS:-1:64}" --nproc-per-node "${KEEL_RANKS_PER_HOST:-8}" --max-restarts 1000 \
        --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "$JOB-$ROUND" --rdzv-conf "$CONF" \
        ${KEEL_LOCAL_ADDR:+--local-addr "$KEEL_LOCAL_ADDR"} --signals-to-handle SIGTERM,SIGINT,SIGUSR1 \
        train.py --config "$@" --job.output_dir "$FOLDER" --elastic.enable true 2> >(trap "" TERM INT USR1 && exec tee "$ERRORS" >&2) &
    AGENT=$!
    stop_at_mistake &
    WATCH=$!
    CODE=
    while kill -0 "$AGENT" 2>/dev/null; do # `wait` returns early when a trapped signal arrives
        wait "$AGENT"
        CODE=$?
    done
    AGENT= # its number may become another process's
    kill "$WATCH" 2>/dev/null
    if is_mistake; then
        echo "the job has a mistake, and is not started again" >&2
        grep -m 1 "^error: " "$ERRORS" >&2
        store ended
        exit 78
    fi
    if [ "$CODE" = 0 ]; then
        store ended # for hosts that were away
        exit 0
    fi
    [ -n "$STOPPED" ] && break
    echo "torchrun has ended ($CODE); starting it again" >&2
    pause # meanwhile tee writes the last lines
    CLOSED=
    grep -q RendezvousClosedError "$ERRORS" && CLOSED=$ROUND
done
# A stop while lost ranks are replaced finds no rank that could write it into status.json, which says failed.
python "$(dirname "$0")/state.py" "$FOLDER" "$STOPPED" >/dev/null
exit 75
