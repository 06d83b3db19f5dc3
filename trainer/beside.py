"""Runs a command that ends when the run ends, however that dies: trainer/beside.py CHECKPOINT PROGRAM ARGUMENT ...

The tensors of the checkpoint are brought first, if they are in object storage. The standard input is a pipe
from the run, and the command belongs to this process's group. It is nicer than the run.

Slurm and systemd send a stop's signal to all processes of a job. This one then ends the command as well, which may not
obey, and would be left alone.
"""

import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # Keel, of which nothing else is imported

from checkpoint.bucket_storage import with_tensors
from configs.errors import UserError

NICENESS = 10
NOT_STARTED = 127
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Those of a run."""


def main() -> int:
    """Run the command; returns its exit code, or 128 plus the number of the signal that ended it, as shells do."""
    os.nice(NICENESS)
    for number in STOP_SIGNALS:
        signal.signal(number, _end)
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    checkpoint, *words = sys.argv[1:]
    try:
        with_tensors(Path(checkpoint))
    except (OSError, UserError) as error:
        print(error, file=sys.stderr)
        return NOT_STARTED
    try:
        code = subprocess.call(words, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{words[0]} can't be started: {error.strerror}", file=sys.stderr)
        return NOT_STARTED
    return code if code >= 0 else 128 - code


def _end_with_the_run() -> None:
    while os.read(0, 1):
        pass
    _end()


def _end(*_: object) -> None:
    """End the command and all that it has started, which may be in sessions of their own, as torchrun's ranks are."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(stat.parent.name))
    descendants = list(children[os.getpid()])
    for pid in descendants:
        descendants += children[pid]
    for pid in descendants:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
