"""How a run stands, for the launch files:

    python scripts/launch/state.py RUN

prints the state in the run's status.json (running, done, preempted, failed) and when it was written, in seconds since
the epoch. It prints "none 0" if there is no status. RUN is a run folder, or its place in object storage: s3://bucket/run.
"""

import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from checkpoint.bucket import QUICK, Bucket
from configs.errors import KeelError
from configs.places import is_url
from trainer.lifecycle import read_status, status_in


def main(words: list[str]) -> None:
    """Run the command line."""
    if len(words) != 1 or words[0].startswith("-"):
        sys.exit(__doc__)
    try:
        status = _status(words[0])
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


if __name__ == "__main__":
    main(sys.argv[1:])
