"""The life of a process: the signals that stop it, the status that it leaves behind, the code that it exits with.

Imported and used before torch: a signal that arrives while torch is being imported (seconds) would otherwise kill the
process with nothing saved. A handler therefore only records the signal; the training loop asks at every step, agrees
with the other ranks, saves and ends. torchrun flattens the exit codes of its workers to 1, so the truth about how a
run ended is `status.json`.
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal, Self, TextIO

from configs.errors import KeelError
from configs.files import open_plain, write_even_if_full

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: run the same command again
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h

State = Literal["running", "done", "preempted", "failed"]
STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
)  # SIGUSR1 is SLURM's usual notice ahead of the time limit
_SECOND_INTERRUPT_SECONDS = 0.5  # two keystrokes of a person are further apart than one Ctrl-C that arrives twice


def exit_code(state: State, error: BaseException | None = None) -> int:
    """The exit code that reports how a run ended; an error of the user's brings its own (78: in the config)."""
    if isinstance(error, KeelError):
        return error.exit_code
    if error is not None:
        return EXIT_FAILED
    return {"done": EXIT_DONE, "preempted": EXIT_PREEMPTED}.get(state, EXIT_FAILED)


# --------------------------------------------------------------------------- signals


@dataclass
class StopRequest:
    """What the signal handlers have recorded; the training loop reads it once a step."""

    signal_number: int | None = None
    received_at: float = 0.0
    arrivals: int | None = None
    """File descriptor on which the numbers of signals arrive at once; Python's handlers wait for the main thread."""

    def __bool__(self) -> bool:
        """Whether this rank was asked to stop; the others may know nothing of it yet."""
        return self.signal_number is not None

    @property
    def reason(self) -> str:
        """The first signal's name ("SIGTERM"), or "" if there was none."""
        return "" if self.signal_number is None else signal.Signals(self.signal_number).name

    def arrived(self) -> int | None:
        """The number of a signal that has come; to be asked by one thread, which is not the main one.

        It knows of a signal also while the main thread is in a long call of C++ (a backward pass, a collective), after
        which `record` will be called.
        """
        if self.signal_number is None and self.arrivals is not None:
            with suppress(BlockingIOError):
                numbers = [number for number in os.read(self.arrivals, 4096) if number in STOP_SIGNALS]
                return numbers[0] if numbers else None
        return self.signal_number

    def wait(self, seconds: float) -> bool:
        """Sleep until a signal comes, but no longer than that; whether one came."""
        deadline = time.monotonic() + seconds
        while not self and time.monotonic() < deadline:
            time.sleep(0.05)  # Python goes on sleeping after a handler has returned
        return bool(self)

    def record(self, signal_number: int, _frame: FrameType | None) -> None:
        """The signal handler. The first signal is remembered; an impatient person's second Ctrl-C raises.

        Raises:
            KeyboardInterrupt: at a second SIGINT from the terminal. From anywhere else (torchrun forwards each one)
                it changes nothing: the checkpoint that the first one asked for is being written.
        """
        now = time.monotonic()
        if self.signal_number is None:
            self.signal_number, self.received_at = signal_number, now
        elif signal_number == signal.SIGINT and now - self.received_at > _SECOND_INTERRUPT_SECONDS and _at_terminal():
            raise KeyboardInterrupt


def install_signal_handlers() -> StopRequest:
    """Record SIGTERM, SIGINT and SIGUSR1 from now on; call it before torch is imported, in the main thread."""
    arrivals, wakeup = os.pipe()
    for end in (arrivals, wakeup):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))  # a child's signals are its own
    request = StopRequest(arrivals=arrivals)
    for number in STOP_SIGNALS:
        signal.signal(number, request.record)
    return request


def _at_terminal() -> bool:
    return os.isatty(0)  # sys.stdin may be closed or replaced


# --------------------------------------------------------------------------- status


def write_status(run_folder: Path, state: State, step: int, reason: str = "", **details: object) -> None:
    """Replace `status.json` of the run folder; rank 0 alone calls it.

    Args:
        run_folder: must exist.
        state: running, done, preempted (saved after a signal) or failed.
        step: optimizer steps completed since the start of the run.
        reason: why it ended: a signal's name, an error's message.
        details: further JSON values, such as the newest checkpoint.

    Raises:
        OSError: the disk refuses. A full one does not refuse if there is a status already.
    """
    status = {
        "state": state,
        "step": step,
        "reason": reason,
        "time": time.time(),  # seconds since the epoch, as in metrics.jsonl
        "host": socket.gethostname(),
        "pid": os.getpid(),
        **details,
    }
    write_even_if_full(run_folder / "status.json", json.dumps(status, indent=2) + "\n")


# --------------------------------------------------------------------------- hangs


class Watchdog:
    """A thread that dumps this rank's Python stacks when a step takes too long.

    The one moment at which a hang can be explained is before the collective's timeout ends the run, so it speaks up
    after half of that time. Every rank has its own: the telling stack is that of the rank which is *not* waiting in a
    collective. It reports a step once; a slow first step (compilation) that is reported does no harm.
    """

    def __init__(self, timeout_seconds: float, rank: int, log: Path | None = None) -> None:
        """
        Args:
            timeout_seconds: `job.timeout_seconds`; the stacks are dumped after half of it.
            rank: named in the dump.
            log: run.log, appended to as well as standard error.
        """
        self.timeout_seconds, self.patience_seconds = timeout_seconds, timeout_seconds / 2
        self.rank, self.log = rank, log
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.step(0, "start-up")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._closed.set()
        self._thread.join()

    def step(self, step: int, doing: str = "training") -> None:
        """Start the clock anew; called before each step, and with another `doing` before a validation or a save."""
        self._mark = (step, doing, time.monotonic())  # one assignment: the thread sees the old mark or the new one

    def _watch(self) -> None:
        reported = None
        while not self._closed.wait(min(1.0, self.patience_seconds / 4)):
            mark = self._mark
            if mark is not reported and time.monotonic() - mark[2] >= self.patience_seconds:
                reported = mark
                self._report(*mark[:2])

    def _report(self, step: int, doing: str) -> None:
        header = (
            f"\n[rank {self.rank}] step {step} ({doing}) has not ended for {self.patience_seconds:.0f} s; a collective "
            f"that waits {self.timeout_seconds:.0f} s (job.timeout_seconds) ends the run.\n"
            "Where the Python threads of this rank are:\n"
        )
        assert sys.__stderr__ is not None
        _dump_stacks(sys.__stderr__, header)  # not sys.stderr: a progress bar may have replaced it
        if self.log is not None:
            with (
                suppress(OSError),
                os.fdopen(open_plain(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a") as file,
            ):
                _dump_stacks(file, header)


def _dump_stacks(file: TextIO, header: str) -> None:
    """faulthandler writes to the file descriptor, past Python's buffer: hence the flush."""
    file.write(header)
    file.flush()
    faulthandler.dump_traceback(file, all_threads=True)
