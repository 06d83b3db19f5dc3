"""Signals that reach a running job at a known point."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_SECONDS = 300


def signal_at_step(process: subprocess.Popen, run: Path, step: int, number: int, pid: int | None = None) -> None:
    """Send a signal (to the process itself unless `pid` says otherwise) once `step` steps are logged."""
    metrics = run / "metrics.jsonl"
    wait_until(process, lambda: metrics.exists() and metrics.read_text().count("\n") >= step)
    os.kill(pid or process.pid, number)


def signal_at_import(process: subprocess.Popen, number: int) -> None:
    """Send a signal while the process is importing torch."""
    maps = Path(f"/proc/{process.pid}/maps")
    wait_until(process, lambda: "libtorch" in maps.read_text())
    os.kill(process.pid, number)


@contextmanager
def taking_interrupts() -> Iterator[None]:
    """Let processes started in this context take SIGINT, which a session of tests in the background ignores."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def wait_until(process: subprocess.Popen, condition: Callable[[], bool]) -> None:
    """Wait, but not forever, and not for a process that has ended."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert process.poll() is None, f"ended first: {process.communicate()}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ranks_of(torchrun: subprocess.Popen) -> list[int]:
    """Process ids of torchrun's ranks, in their order."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    return sorted(map(int, children), key=lambda pid: int(_environment(pid)["RANK"]))


def _environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
