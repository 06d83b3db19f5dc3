"""Runs a command that ends when the run ends, however that dies: python trainer/beside.py PROGRAM ARGUMENT ...

The standard input is a pipe from the run, and the command belongs to this process's group. It is nicer than the run.
"""

import os
import signal
import subprocess
import sys
import threading

NICENESS = 10
NOT_STARTED = 127


def main() -> int:
    """Run the command; returns its exit code, or 128 plus the number of the signal that ended it, as shells do."""
    os.nice(NICENESS)
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    try:
        code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{sys.argv[1]} can't be started: {error.strerror}", file=sys.stderr)
        return NOT_STARTED
    return code if code >= 0 else 128 - code


def _end_with_the_run() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
