"""Processes that work on the parts of a preparation, and how far they are."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing.sharedctypes import Synchronized
from typing import Protocol, TypeVar

from configs.errors import OutageError
from trainer.data.text.shard import read_bytes

_PROGRESS_SECONDS = 1.0
_KILLED = (
    "a process that prepared text was killed (out of memory?). "
    "Run the same command again: finished shards are kept. Fewer processes need less memory"
)
Progress = Callable[[int, int | None, str], None]
"""Called with the bytes of text done, the total bytes (None: not known yet), and a message."""


class Part(Protocol):
    """What can be worked on."""

    @property
    def n_bytes(self) -> int:
        """Its size; the work calls `read_bytes.add` with as many bytes in all."""
        ...


_Part = TypeVar("_Part", bound=Part)
_Result = TypeVar("_Result")


def on_all(
    work: Callable[[_Part], _Result],
    parts: Sequence[_Part],
    processes: int,
    progress: Progress,
    done: int = 0,
    message: str = "",
) -> Generator[tuple[_Part, _Result], None, None]:
    """Apply a function to parts in several processes; yields each result as it is finished, and shows progress.

    Args:
        done: bytes that were done before.

    Raises:
        OutageError: a process was killed.
    """
    total = done + sum(part.n_bytes for part in parts)
    progress(done, total, message)
    processes = min(processes, len(parts))
    if processes <= 1:
        yield from _on_all_here(work, parts, progress, done, total, message)
        return
    counter = multiprocessing.get_context("spawn").Value("q", done)
    with _pool(processes, counter) as pool:
        futures = {pool.submit(work, part): part for part in parts}
        left = set(futures)
        while left:
            finished, left = wait(left, _PROGRESS_SECONDS, FIRST_COMPLETED)
            for future in finished:
                try:
                    yield futures[future], future.result()
                except BrokenProcessPool:
                    progress(counter.value, total, message)  # raises if a signal to the whole process group is why
                    raise OutageError(_KILLED) from None
            progress(counter.value, total, message)


def do_all(
    work: Callable[[_Part], None],
    parts: Sequence[_Part],
    processes: int,
    progress: Progress,
    done: int = 0,
    message: str = "",
) -> None:
    """Apply a function without a result to parts, as `on_all` does."""
    with closing(on_all(work, parts, processes, progress, done, message)) as results:
        for _ in results:
            pass


def _on_all_here(
    work: Callable[[_Part], _Result], parts: Sequence[_Part], progress: Progress, done: int, total: int, message: str
) -> Generator[tuple[_Part, _Result], None, None]:
    shown_at = time.monotonic()

    def add(n_bytes: int) -> None:
        nonlocal done, shown_at
        done += n_bytes
        if time.monotonic() - shown_at > _PROGRESS_SECONDS:
            shown_at = time.monotonic()
            progress(done, total, message)

    read_bytes.add = add
    for part in parts:
        yield part, work(part)
        progress(done, total, message)


@contextmanager
def _pool(processes: int, counter: "Synchronized[int]") -> Iterator[ProcessPoolExecutor]:
    """Worker processes that end with this one, and at once if it leaves this context with an exception."""
    before = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")  # forking after torch's threads have started may hang
    pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_start_worker, initargs=(counter,))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    pool.shutdown()


def _start_worker(counter: "Synchronized[int]") -> None:
    """Let a worker count what it reads, leave Ctrl-C to the parent, and exit if the parent is killed."""
    read_bytes.add_to(counter)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
