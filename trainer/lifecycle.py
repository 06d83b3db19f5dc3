"""The life of a process: the signals that stop it, the status file that it leaves, and its exit code.

This file is imported and used before torch: a signal that arrives while torch is being imported (seconds) would
otherwise kill the process with nothing saved. A handler only records the signal; the training loop checks for it at
every step, agrees with the other ranks, saves and ends. torchrun flattens the exit codes of its workers to 1, so only
`status.json` says for certain how a run ended.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from configs.errors import KeelError
from configs.files import write_even_if_full
from configs.untrusted import MAX_JSON_BYTES, parse_json, read_file

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
LAUNCHER = "KEEL_LAUNCHER"
"""Environment variable that names what has started a run, if not train.py or torchrun."""
SILENT_SECONDS = 120.0
"""Age at which the status of a run that says that it is running is out of date; it is renewed every 30 s."""
_SECOND_INTERRUPT_SECONDS = 0.5  # a person's two keystrokes are further apart than one Ctrl-C that arrives twice


def exit_code(state: State, error: BaseException | None = None) -> int:
    """The exit code that reports how a run ended; a user's mistake has its own code (78: in the config)."""
    if isinstance(error, KeelError):
        return error.exit_code
    if error is not None:
        return EXIT_FAILED
    return {"done": EXIT_DONE, "preempted": EXIT_PREEMPTED}.get(state, EXIT_FAILED)


# --------------------------------------------------------------------------- signals


@dataclass
class StopRequest:
    """Whether this process was asked to stop, by a signal or by its launcher's end; read once per step."""

    signal_number: int | None = None
    received_at: float = 0.0
    arrivals: int | None = None
    """File descriptor that receives signal numbers immediately; Python's handlers have to wait for the main thread."""

    launcher: int | None = None
    """Process id of the launcher, without which this process ends, too (0: it is gone); None: it has none."""

    def __bool__(self) -> bool:
        """Whether this rank was asked to stop; the other ranks may not know it yet."""
        return self.signal_number is not None or self.has_lost_launcher

    @property
    def has_lost_launcher(self) -> bool:
        """Whether the launcher is gone: the kernel has given this process another parent."""
        return self.launcher is not None and os.getppid() != self.launcher

    @property
    def reason(self) -> str:
        """The first signal's name ("SIGTERM"), that the launcher is gone, or "" if there is no reason to stop."""
        if self.signal_number is None and self.has_lost_launcher:
            return "the end of its launcher"
        return _name(self.signal_number)

    def arrived(self) -> str:
        """Like `reason`; call it from a single thread other than the main thread.

        It sees a signal even while the main thread is in a long C++ call (a backward pass, a collective), before
        `record` can run.
        """
        if self.signal_number is None and self.arrivals is not None:
            with suppress(BlockingIOError):
                for number in os.read(self.arrivals, 4096):
                    if number in (*STOP_SIGNALS, signal.SIGHUP):
                        return _name(number)
        return self.reason

    def wait(self, seconds: float) -> bool:
        """Sleep until a signal arrives, at most for `seconds`; returns whether one did."""
        deadline = time.monotonic() + seconds
        while not self and time.monotonic() < deadline:
            time.sleep(0.05)  # short, since Python resumes sleeping after a handler has returned
        return bool(self)

    def record(self, signal_number: int, _frame: FrameType | None) -> None:
        """Record the first signal; this is the signal handler.

        Raises:
            KeyboardInterrupt: a second SIGINT came from the terminal, from an impatient person. One from elsewhere
                (torchrun forwards each) is ignored, since the checkpoint that the first one requested is being written.
        """
        now = time.monotonic()
        if self.signal_number is None:
            self.signal_number = signal_number
            self.received_at = now
        elif signal_number == signal.SIGINT and now - self.received_at > _SECOND_INTERRUPT_SECONDS and _at_terminal():
            raise KeyboardInterrupt


@contextmanager
def handling_stops(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let another handler have the signals to stop, in this block of the main thread."""
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


def install_signal_handlers() -> StopRequest:
    """Record SIGTERM, SIGINT and SIGUSR1 from now on; call it in the main thread, before torch is imported.

    SIGHUP, which comes when a terminal is closed, is ignored: run.log has the output. Under torchrun, which ends when
    it gets one, and sends it to its workers, it is a signal to stop. So is the end of torchrun itself.
    """
    arrivals, wakeup = os.pipe()
    for end in (arrivals, wakeup):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))  # a child must not report its signals here
    request = StopRequest(arrivals=arrivals)
    for number in STOP_SIGNALS:
        signal.signal(number, request.record)
    is_worker = "TORCHELASTIC_RUN_ID" in os.environ
    signal.signal(signal.SIGHUP, request.record if is_worker else signal.SIG_IGN)
    request.launcher = _launcher() if is_worker else None
    return request


def _launcher() -> int:
    """Process id of this rank's launcher, the parent process; 0 if that has ended before this process could look.

    The kernel then gives the process to another parent, process 1 in most cases, which is the launcher itself in a
    container that runs nothing else. A launcher runs in Python.
    """
    parent = os.getppid()
    with suppress(OSError):
        if parent == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes():
            return 0
    return parent


def _name(signal_number: int | None) -> str:
    return "" if signal_number is None else signal.Signals(signal_number).name


def _at_terminal() -> bool:
    return os.isatty(0)  # sys.stdin may be closed or replaced


# --------------------------------------------------------------------------- status


def write_status(run_folder: Path, state: State, step: int, reason: str = "", **details: object) -> None:
    """Replace `status.json` of the run folder. Rank 0 calls it or, if that has died, another rank.

    Args:
        run_folder: must exist.
        state: running, done, preempted (saved after a signal) or failed.
        step: optimizer steps completed since the start of the run.
        reason: why it ended: a signal's name, or an error's message.
        details: further JSON values, such as the newest checkpoint.

    Raises:
        OSError: the file can't be written. On a full disk it still can, if it exists already.
    """
    with _writing_status:
        _replace_status(run_folder, {"state": state, "step": step, "reason": reason, **details})


def _replace_status(run_folder: Path, said: dict[str, Any]) -> None:
    host = socket.gethostname()
    pid = os.getpid()
    status = said | {"time": time.time(), "host": host, "pid": pid}  # seconds since the epoch, as in metrics.jsonl
    # A launch that was halted and has lost the run to another one may continue in the middle of this.
    write_even_if_full(run_folder / "status.json", json.dumps(status, indent=2) + "\n", writer=f"{host}-{pid}")


def read_status(run_folder: Path) -> dict[str, Any]:
    """Read status.json; empty if there is none, or if it is not in the form of `write_status`."""
    try:
        return status_there(run_folder)
    except OSError:
        return {}


def status_there(run_folder: Path) -> dict[str, Any]:
    """The same, but raises OSError if there is none, or the disk refuses."""
    return status_in(read_file(run_folder / "status.json", MAX_JSON_BYTES))


def status_in(content: bytes) -> dict[str, Any]:
    """The status in the content of a status.json; empty if it is not in the form of `write_status`."""
    try:
        status = parse_json(content)
    except ValueError:
        return {}
    kinds = {"state": str, "step": int, "reason": str, "time": float}
    is_whole = isinstance(status, dict) and all(type(status.get(key)) is kind for key, kind in kinds.items())
    return status if is_whole else {}


def is_alive(status: dict[str, Any]) -> bool:
    """Whether a status is that of a launch that is running."""
    return status.get("state") == "running" and time.time() - status["time"] < SILENT_SECONDS


def is_own(status: dict[str, Any]) -> bool:
    """Whether this process has written the status."""
    return (status.get("pid"), status.get("host")) == (os.getpid(), socket.gethostname())


def refresh_status(run_folder: Path, step: int, reason: str | None = None) -> None:
    """Record that this process still runs, with the current time and step, unless the status says that it has ended.

    Args:
        run_folder, step: as for `write_status`.
        reason: what to show besides; None: what is shown already.
    """
    with _writing_status:
        status = read_status(run_folder)  # empty if someone removed it
        if not status or (status["state"] == "running" and is_own(status)):
            said = status.get("reason", "") if reason is None else reason
            _replace_status(run_folder, status | {"state": "running", "step": step, "reason": said})


_writing_status = threading.Lock()

# --------------------------------------------------------------------------- torchrun


def tell_torchrun(reason: str, is_consequence: bool = False) -> None:
    """Write the reason to torchrun's error file, so that torchrun's report, the last thing a person sees, shows it.

    The file has the form of torch.distributed.elastic.multiprocessing.errors.ErrorHandler, but without a call stack,
    so that torchrun shows the message instead. Does nothing without torchrun.

    Args:
        reason: What torchrun shows.
        is_consequence: Whether another rank's end is why this rank ends. torchrun reports the failure with the earliest
            time, in whole seconds, and the lowest rank of those in the same second; a consequence is dated a second
            later, so that its cause is reported.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        timestamp = int(time.time()) + is_consequence
        message = {"message": reason, "extraInfo": {"timestamp": str(timestamp)}}
        with suppress(OSError):  # the reason is on the console, too
            Path(file).write_text(json.dumps({"message": message}))
