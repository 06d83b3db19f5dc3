"""How a run stands, for the launch files:

    python scripts/launch/state.py RUN [SIGNAL]

prints the state in the run's status.json (running, done, preempted, failed) and when it was written, in seconds since
the epoch. It prints "none 0" if there is no status. RUN is a run folder, or its place in object storage: s3://bucket/run.
With the name of a signal, a run that no launch has, and that is not done, is preempted by it from then on.
"""

import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from checkpoint.bucket import QUICK, Bucket
from checkpoint.bucket_storage import BucketStorage, taken
from checkpoint.lock import FolderInUse, lock
from configs.errors import KeelError, files_that_fail
from configs.places import is_url, standing_for
from trainer.lifecycle import read_status, status_in, write_status

_OPEN = ("running", "failed")
"""States of a run that is not at its end; a launch that fails is followed by another while elastic.sh runs."""


def main(words: list[str]) -> None:
    """Run the command line."""
    if len(words) not in (1, 2) or words[0].startswith("-"):
        sys.exit(__doc__)
    run, *signals = words
    try:
        with files_that_fail():
            status = _status(run)
            if signals and status.get("state") in _OPEN:
                _preempt(run, signals[0])
                status = _status(run)
    except KeelError as error:
        sys.exit(str(error))
    print(status.get("state", "none"), status.get("time", 0))


def _status(run: str) -> dict[str, Any]:
    if not is_url(run):
        return read_status(Path(run))
    try:
        return status_in(Bucket(run, QUICK, QUICK).get("status.json"))
    except FileNotFoundError:
        return {}


def _preempt(run: str, signal_name: str) -> None:
    """Write that the run was stopped, unless a launch has it, which writes that itself."""
    in_bucket: AbstractContextManager[BucketStorage | None] = taken(run, _warn) if is_url(run) else nullcontext()
    with suppress(FolderInUse), in_bucket as storage:
        folder = standing_for(run)
        if storage is None:
            lock(folder, _warn)
        last = read_status(folder)
        if last.get("state") in _OPEN:
            write_status(folder, "preempted", last["step"], f"{signal_name}, after: {last['reason']}")
        if storage:
            storage.push_status()


def _warn(complaint: str) -> None:
    print(f"warning: {complaint}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
