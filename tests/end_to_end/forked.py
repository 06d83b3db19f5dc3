"""A job of several ranks without torchrun: FORKED_RANKS processes, forked off one that has imported torch.

Prints their process ids, waits for all of them, and prints their exit codes. Nobody ends the others when one dies.
"""

import os
import socket
import sys

import torch

from configs.command_line import load_for_run, parse_command_line
from trainer.lifecycle import install_signal_handlers
from trainer.run import run


def main() -> None:
    """Fork the ranks and wait for them."""
    n_ranks = int(os.environ["FORKED_RANKS"])
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    pids = [_fork(rank, n_ranks, port) for rank in range(n_ranks)]
    print("pids", *pids, flush=True)
    ends: dict[int, int] = {}
    while len(ends) < n_ranks:
        pid, status = os.wait()
        ends[pid] = os.waitstatus_to_exitcode(status)
    print("codes", *(ends[pid] for pid in pids), flush=True)


def _fork(rank: int, n_ranks: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n_ranks, "MASTER_ADDR": "localhost"}
        os.environ.update({name: str(value) for name, value in world.items()}, MASTER_PORT=str(port))
        stop = install_signal_handlers()
        torch.set_num_threads(1)
        code = run(load_for_run(parse_command_line(sys.argv[1:])), stop)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
