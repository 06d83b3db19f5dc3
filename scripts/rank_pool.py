"""A pool of ranks, as processes on this machine that are started once and reused.

Importing torch takes seconds, on which a test suite or a parity table would spend its time if it started new processes
for each case. The workers of a pool are kept (but see MANY_THREADS); each case forms a new process group of as many as
it needs.
"""

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import IO, Any, cast

import torch
import torch.distributed as dist

from parallelisms.mesh import end_process_group

MANY_THREADS = 100
"""A worker with more threads is replaced: compiled code with DTensors keeps its process groups alive (torch 2.13, in
the guards of its graphs), with 24 threads per mesh, and 200 idle threads take a third of a core."""

PRELOADED = ("torch._dynamo", "torch._inductor.compile_fx", "trainer.run")
"""Modules imported before workers are forked, besides this one, because each import takes seconds."""


class RankLost(RuntimeError):
    """A rank's process ended by a signal, or its collective by a time-out.

    Once in some 10,000 jobs on gloo (torch 2.13), either has happened by itself: a corrupted heap, or a collective that
    one rank waited for. Repeated, the jobs were right; neither valgrind nor 1.4 million collectives without Keel showed
    why. So callers may try once more, in plain sight.
    """


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    crash: IO[str]
    """Receives the stack of a worker that dies outside of Python, or is asked for its position."""

    def end(self) -> str:
        """Describe how the worker ended."""
        self.process.join(timeout=5)
        self.crash.seek(0)
        return f"{self.crash.read()}the process died (exit code {self.process.exitcode})"

    def position(self) -> str:
        """Describe where the worker is: its result, if it has one by now, otherwise its stack."""
        if self.connection.poll(1):
            with suppress(EOFError):
                return str(self.connection.recv()[1])
            return self.end()
        os.kill(cast(int, self.process.pid), signal.SIGUSR1)
        time.sleep(0.5)  # faulthandler writes within milliseconds
        self.crash.seek(0)
        return self.crash.read()


@dataclass
class RankPool:
    """A pool of up to `size` worker processes; `close()` ends them."""

    size: int
    timeout_seconds: int = 120
    backend: str = "gloo"
    _workers: list[_Worker] = field(default_factory=list)

    def run(self, ranks: int, function: Callable, *arguments: Any) -> list[Any]:
        """Call `function(*arguments)` on `ranks` ranks of a new process group and return what each returned.

        The function must be importable (a module's top level), arguments and results picklable.

        Raises:
            RankLost: a rank's process ended by a signal, or a collective by a time-out.
            RuntimeError: a rank raised; its traceback is the message.
        """
        if ranks > self.size:
            raise ValueError(f"{ranks} ranks requested from a pool of {self.size}")
        while len(self._workers) < ranks:
            self._workers.append(_start_worker(self.backend))
        workers = self._workers[:ranks]
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            for rank, worker in enumerate(workers):
                worker.connection.send((self.backend, rank, ranks, store, self.timeout_seconds, function, arguments))
            try:
                return self._collect(workers)
            except BaseException:  # also Ctrl-C; a rank that is left may wait for another in a collective
                self.close(patience_seconds=0)
                raise

    def _collect(self, workers: list[_Worker]) -> list[Any]:
        results: dict[int, Any] = {}
        retired = []
        pending = {worker.connection: rank for rank, worker in enumerate(workers)}
        while pending:
            for ready in wait(list(pending)):
                connection = cast(Connection, ready)
                rank = pending.pop(connection)
                try:
                    is_error, results[rank], retires = connection.recv()
                except EOFError:
                    is_error = True
                    results[rank] = workers[rank].end()
                    retires = True
                if retires:
                    retired.append(workers[rank])
                if is_error:  # the others may be waiting for it in a collective
                    rank, results[rank] = _cause(workers, rank, results[rank])
                    timed_out = "Timed out" in results[rank]
                    was_killed = (workers[rank].process.exitcode or 0) < 0
                    error = RankLost if timed_out or was_killed else RuntimeError
                    others = _positions(workers, pending.values()) if timed_out else ""
                    raise error(f"{others}rank {rank} of {len(workers)}: {results[rank]}")
        _end(retired, patience_seconds=5)
        self._workers = [worker for worker in self._workers if worker not in retired]
        return [results[rank] for rank in range(len(workers))]

    def close(self, patience_seconds: float = 5) -> None:
        """End the workers; those still busy after `patience_seconds` are killed."""
        _end(self._workers, patience_seconds)
        self._workers = []


def _cause(workers: list[_Worker], rank: int, error: str) -> tuple[int, str]:
    """Return the rank to blame and its error: if another rank has died, `rank` may have failed because of that."""
    dead = wait([worker.process.sentinel for worker in workers], timeout=1)
    for other, worker in enumerate(workers):
        if worker.process.sentinel in dead:
            return other, worker.end()
    return rank, error


def _positions(workers: list[_Worker], ranks: Iterable[int]) -> str:
    """Describe where ranks are for which another rank has waited until its time-out: there lies the cause."""
    return "".join(f"meanwhile, rank {rank} of {len(workers)}: {workers[rank].position()}\n" for rank in ranks)


def fork_server(*preloaded: str) -> Any:
    """The context of a fork server that imports modules once; it and what it forks end silently at Ctrl-C."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.silent_interrupts", *preloaded])
    return context


def _start_worker(backend: str) -> _Worker:
    if "nccl" in backend:  # CUDA cannot be used after a fork of a process that has queried it
        context: Any = multiprocessing.get_context("spawn")
    else:
        context = fork_server(__name__, *PRELOADED)
    here, there = context.Pipe()
    crash = tempfile.NamedTemporaryFile("r")  # noqa: SIM115  it is open for as long as the worker lives
    process = context.Process(target=_work, args=(there, crash.name), daemon=True)
    process.start()
    there.close()
    return _Worker(process, here, crash)


def _end(workers: list[_Worker], patience_seconds: float) -> None:
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.process.join(patience_seconds)
        worker.process.kill()
        worker.process.join()
        worker.crash.close()


def _work(connection: Connection, crash: str) -> None:
    try:
        report = open(crash, "r+")  # noqa: SIM115
    except FileNotFoundError:  # the pool was closed before this process began
        return
    faulthandler.enable(report)
    faulthandler.register(signal.SIGUSR1, report)
    torch.set_num_threads(1)
    n_modules = 0
    while True:
        if len(sys.modules) > n_modules:
            gc.collect()
            gc.freeze()  # imported objects are never garbage; collecting among them takes a third of a second per case
            n_modules = len(sys.modules)
        try:
            backend, rank, ranks, store, timeout, function, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        except Exception:  # the function or an argument cannot be imported here
            connection.send((True, traceback.format_exc(), False))
            continue
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        try:
            dist.init_process_group(
                backend,
                store=dist.FileStore(store, ranks),
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=timeout),
            )
            result = (False, function(*arguments))
            dist.barrier()
        except BaseException:  # torch's CheckpointException is not an Exception; the caller must see all errors
            result = (True, traceback.format_exc())
        if dist.is_initialized():
            end_process_group()
        retires = _threads() > MANY_THREADS
        try:
            connection.send((*result, retires))
        except BrokenPipeError:  # the pool was closed meanwhile
            return
        if retires:
            # The caller fetches tensors from this process, through a separate socket, after it receives the message.
            with suppress(EOFError):
                connection.recv()
            return


def _threads() -> int:
    """Count the threads of this process, including gloo's, which Python does not see; 0 without /proc."""
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else 0
