"""Trains a job with one framework, some steps at a time, as the process that wrote to its standard input asks.

    python tests/peers/serve.py litgpt '{"dim": 256, ...}'

It runs in the framework's own Python, where Keel need not be installed. `train` of the adapter (`NAME_adapter.py`)
calls back after each optimizer step. The answers are lines of JSON on standard output, which nothing else may use: one
when the first step is done, and one for each line with a number of steps, when these are done.
"""

import contextlib
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

Job = dict[str, Any]
Train = Callable[[Job, Callable[[], None]], None]
"""Trains without end, and calls its second argument after each optimizer step."""

LACKING = 3
"""Exit code: this Python lacks a package; standard error names it."""


class Finished(BaseException):
    """Ends a training loop of another framework; no framework catches a BaseException of this kind."""


class Server:
    """Lets the training loop run as many steps as it is asked for, and measures them."""

    def __init__(self, answers: TextIO, facts: dict[str, Any]) -> None:
        """
        Args:
            answers: where answers are written.
            facts: what the first answer says besides.
        """
        self._answers, self._facts = answers, facts
        self._left: int | None = None
        """Steps until the next answer; None before the first step."""
        self._asked = 0
        self._started = (0.0, 0.0)

    def after_step(self) -> None:
        """Count a step; if it was the last of a turn, answer, and wait for the next turn.

        Raises:
            Finished: no more turns are wanted.
        """
        if self._left is None:
            _synchronize()
            used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
            # of compilers, too
            self._answer(self._facts | {"cpu_seconds": sum(each.ru_utime + each.ru_stime for each in used)})
            _forget_peaks()
        else:
            self._left -= 1
            if self._left:
                return
            _synchronize()
            seconds, cpu_seconds = (now - then for now, then in zip(_clocks(), self._started, strict=True))
            turn = {"seconds": seconds / self._asked, "cpu_seconds": cpu_seconds / self._asked}
            self._answer(turn | _peaks())
        line = sys.stdin.readline()
        if not line.strip():
            raise Finished
        self._left = self._asked = int(line)
        self._started = _clocks()

    def _answer(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


def main() -> int:
    """Train with the adapter that the command line names, or without a job only import it; returns the exit code."""
    name, *rest = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a framework prints must not get between the answers
    try:
        import torch

        adapter = importlib.import_module(f"{name}_adapter")
    except ImportError as error:
        print(f"{sys.executable} lacks a package that is needed: {error}", file=sys.stderr)
        return LACKING
    if not rest:
        return 0
    facts = {"torch": torch.__version__, "version": adapter.version(), "device": _device(torch)}
    with contextlib.suppress(Finished):
        adapter.train(json.loads(rest[0]), Server(answers, facts).after_step)
    return 0


def _device(torch: Any) -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _synchronize() -> None:
    torch = sys.modules["torch"]
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _clocks() -> tuple[float, float]:
    """Seconds of the wall and of this process's CPU time, all threads."""
    return time.perf_counter(), time.process_time()


def _forget_peaks() -> None:
    """Let the peaks of memory begin here: what building and compiling took does not count."""
    torch = sys.modules["torch"]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):  # of Linux alone
        Path("/proc/self/clear_refs").write_text("5")


def _peaks() -> dict[str, int | None]:
    """Bytes at most, of steps alone: the process's resident set, and what torch's CUDA allocator gave out and held."""
    torch = sys.modules["torch"]
    is_cuda = torch.cuda.is_available()
    return {
        "resident_peak_bytes": _resident_peak(),
        "allocated_peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        "reserved_peak_bytes": torch.cuda.max_memory_reserved() if is_cuda else None,
    }


def _resident_peak() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a framework's threads and process groups do not hold up the end
