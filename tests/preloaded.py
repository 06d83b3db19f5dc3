"""Processes that start as if torch were imported already: for tests that start the same ranks a thousand times.

Importing torch takes a rank seconds, and forming a process group and building a tiny model takes it a quarter of one.
So one server imports everything once, and forks off a process for each one that is asked of it: it has its own words,
environment, folder, session and output, and runs `train.main`, torchrun or a script from the first line on. The server
itself never has a second thread, so that forking is safe.

A rank that real torchrun starts is `preloaded_rank.py`, which asks the server in its place, hands on the signals it
gets, and ends as the rank did, by the same signal or code. To torchrun it is the rank.
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.preloaded_rank import ask

ROOT = Path(__file__).parents[1]
RANK_PROGRAM = Path(__file__).with_name("preloaded_rank.py")
SOCKET = "PRELOADED_SOCKET"
"""Environment variable by which `preloaded_rank.py` finds the server."""
FIRST = "PRELOADED_FIRST"
"""Environment variable with a function ("package.module:name") that a rank calls before `train.main`."""
START_SECONDS = 300
NOT_A_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Child:
    """A process that the server has forked off for this one."""

    pid: int
    connection: socket.socket
    code: int | None = None
    """Its exit code, or minus the signal that has killed it; None while it runs."""

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        return self.wait(0) if self.code is None else self.code

    def wait(self, seconds: float) -> int | None:
        """Wait so long for the end; returns the exit code, None if there is none yet."""
        if self.code is None and select.select([self.connection], [], [], seconds)[0]:
            told = self.connection.recv(64)
            self.connection.close()
            assert told, "the server of preloaded processes has died"
            self.code = int(told)
        return self.code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal; nothing happens if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass
class Server:
    """The server, for as long as the `with` block lasts; whatever it has forked off is killed at its end.

    temporary: TMPDIR of all processes.
    prefix: words before the server's own, such as `ip netns exec NAME`, which everything that it forks off inherits.
    root: the checkout whose modules are imported.
    """

    temporary: Path
    prefix: tuple[str, ...] = ()
    root: Path = ROOT
    _folder: tempfile.TemporaryDirectory = field(default_factory=tempfile.TemporaryDirectory)

    def __enter__(self) -> Self:
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.address = os.path.join(self._folder.name, "socket")
        self._process = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "tests.preloaded", self.address],
            cwd=self.root,
            env=self.environment(),
            stdin=subprocess.PIPE,  # its end tells the server that this process is gone
            start_new_session=True,  # Ctrl-C is for this process
        )
        deadline = time.monotonic() + START_SECONDS
        while not os.path.exists(self.address):
            assert self._process.poll() is None, "the server of preloaded processes did not start"
            assert time.monotonic() < deadline, "the server of preloaded processes does not start"
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    def environment(self) -> dict[str, str]:
        """What a process needs that is to use the server."""
        kept = {name: value for name, value in os.environ.items() if name not in NOT_A_LAUNCHERS}
        return kept | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), SOCKET: self.address}

    def start(
        self,
        words: Sequence[str],
        folder: Path,
        output: Path,
        environment: Mapping[str, str] | None = None,
        errors: Path | None = None,
    ) -> Child:
        """Start a process.

        Args:
            words: `torchrun`, `train.py` or the path of a script, and what follows.
            folder: its current folder.
            output: a file to which its standard output is appended.
            environment: what is added to this process's.
            errors: the file for its standard error; None: `output`.
        """
        with output.open("ab") as out, (errors or output).open("ab") as err, open(os.devnull, "rb") as nothing:
            files = (nothing.fileno(), out.fileno(), err.fileno())
            variables = self.environment() | dict(environment or {})
            connection, pid = ask(self.address, list(words), str(folder), variables, files)
        return Child(pid, connection)

    def start_ranks(
        self, n: int, words: str, folder: Path, output: Path, environment: Mapping[str, str] | None = None
    ) -> list[Child]:
        """Start the ranks of a job without torchrun; their store is here, as torchrun's would be with it."""
        import torch.distributed as dist

        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        world = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "localhost", "MASTER_PORT": self._store.port}
        world |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        variables = {name: str(value) for name, value in world.items()} | dict(environment or {})
        started = []
        for rank in range(n):
            own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(self.start(["train.py", *shlex.split(words)], folder, output, own))
        return started

    def torchrun(
        self,
        options: str,
        words: str,
        folder: Path,
        output: Path,
        environment: Mapping[str, str] | None = None,
        errors: Path | None = None,
    ) -> Child:
        """Start torchrun, whose ranks are preloaded, too; see `start`."""
        command = ["torchrun", *options.split(), str(RANK_PROGRAM), *shlex.split(words)]
        return self.start(command, folder, output, environment, errors)

    def ranks(self) -> dict[int, int]:
        """Process ids by rank of all ranks that are alive."""
        ranks = {}
        for pid in children(self.pid):
            name = _read(Path(f"/proc/{pid}/comm")).strip()
            if name.startswith("rank-") and state(pid) != "Z":
                ranks[int(name.removeprefix("rank-"))] = pid
        return dict(sorted(ranks.items()))


def children(pid: int) -> list[int]:
    """Process ids of a process's children."""
    return [int(child) for child in _read(Path(f"/proc/{pid}/task/{pid}/children")).split()]


def state(pid: int) -> str:
    """R, S, D, T (stopped), Z (ended, and nobody has asked for its code) ..., or "" if there is no such process."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].strip()[:1]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


# --------------------------------------------------------------------------- the server


def serve(address: str) -> None:
    """Fork off processes until standard input ends."""
    import torch.distributed.run
    import torch.utils.tensorboard

    import trainer.run  # noqa: F401

    torch.set_num_threads(1)
    woken, waker = socket.socketpair()
    for each in (woken, waker):
        each.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    started: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, woken, listener, *started.values()], [], [])
        if woken in ready:
            woken.recv(4096)
        if 0 in ready:
            break
        if listener in ready:
            _accept(listener, started, woken, waker)
        for pid, connection in started.items():
            if connection in ready:  # who asked for the process has ended
                _kill(pid)
        _reap(started)
    signal.set_wakeup_fd(-1)
    for pid in started:
        _kill(pid)
        os.waitpid(pid, 0)


def _accept(listener: socket.socket, started: dict[int, socket.socket], *others: socket.socket) -> None:
    connection, _ = listener.accept()
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    size, request = int.from_bytes(head, "little"), b""
    while len(request) < size:
        request += connection.recv(size - len(request))
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (listener, connection, *others, *started.values()):
            each.close()
        _become(*json.loads(request), files)
    for file in files:
        os.close(file)
    started[pid] = connection
    try:
        connection.send(pid.to_bytes(8, "little"))
    except BrokenPipeError:  # who asked has been killed meanwhile
        _kill(pid)


def _become(words: list[str], folder: str, environment: dict[str, str], files: list[int]) -> None:
    """Be the process that was asked for; never returns."""
    code = 1
    try:
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        # The server's streams know whether its own files can seek, which these may not.
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115 - stays open
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # TMPDIR may be another one
        name = "torchrun" if words[0] == "torchrun" else f"rank-{environment.get('RANK', 0)}"
        Path("/proc/self/comm").write_text(name)
        code = _run(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(words: list[str]) -> int:
    if words[0] == "torchrun":
        from torch.distributed.run import main as torchrun

        sys.argv = words
        torchrun(words[1:])
        return 0
    if words[0] != "train.py":
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))  # as Python does for a file
        runpy.run_path(words[0], run_name="__main__")
        return 0
    from train import main

    sys.argv = words
    if first := os.environ.get(FIRST):
        module, name = first.split(":")
        getattr(importlib.import_module(module), name)()
    return main()


def _reap(started: dict[int, socket.socket]) -> None:
    for pid in list(started):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            connection = started.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # who asked for it has ended first
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1])
