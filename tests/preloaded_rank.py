"""What torchrun starts as a rank: it has one forked off the server of tests/preloaded.py, and stands for it.

As `preloaded_rank.py torchrun ...` it stands for torchrun, as `preloaded_rank.py python SCRIPT ...` for a script.
"""

import array
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def ask(
    address: str, words: list[str], folder: str, environment: dict[str, str], files: tuple[int, int, int]
) -> tuple[socket.socket, int]:
    """Have the server fork off a process; returns the connection that tells its end, and its process id."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = json.dumps([words, folder, environment]).encode()
    descriptors = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    connection.sendmsg([len(request).to_bytes(8, "little")], descriptors)
    connection.sendall(request)
    return connection, int.from_bytes(connection.recv(8), "little")


def main() -> None:
    """Start the rank, hand on every signal, end as it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a process to hand them on to
    words = ["train.py", *sys.argv[1:]]
    if sys.argv[1:2] == ["torchrun"]:  # it stands for torchrun itself, whose ranks are then preloaded, too
        words = [__file__ if word == "train.py" else word for word in sys.argv[1:]]
    elif sys.argv[1:2] == ["python"]:  # it stands for Python, and runs a script
        words = sys.argv[2:]
    connection, pid = ask(os.environ["PRELOADED_SOCKET"], words, os.getcwd(), dict(os.environ), (0, 1, 2))
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = int(connection.recv(64) or b"1")
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code in FORWARDED else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
