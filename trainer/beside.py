"""Runs a command that ends when the run ends, however that dies: trainer/beside.py CHECKPOINT PROGRAM ARGUMENT ...

The tensors of the checkpoint are brought first, if they are in object storage. The standard input is a pipe
from the run, and the command belongs to this process's group. It is nicer than the run.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # Keel, of which nothing else is imported

from checkpoint.bucket_storage import with_tensors
from configs.errors import UserError

NICENESS = 10
NOT_STARTED = 127


def main() -> int:
    """Run the command; returns its exit code, or 128 plus the number of the signal that ended it, as shells do."""
    os.nice(NICENESS)
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
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
