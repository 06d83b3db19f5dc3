"""Signals at awkward moments: python -m tests.torture.signals [--ranks 2]

SIGTERM reaches one rank one second after the start, in a compilation, in a validation that would take minutes, and in
the middle of a save. Each time the run must end with exit code 75 (through torchrun 1) and status "preempted", within
one step or one batch of the validation and a save; and started again it must come to its end as if nothing had been.
"""

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.end_to_end.launch import TINY, finish, start
from tests.end_to_end.signals import ranks_of, wait_until
from tests.torture.kill import assert_equal

STEPS = 20
JOB = f"""
base = "{TINY}"

[[validation.sources]]
name = "held out"
kind = "synthetic"
"""
COMPILED = "--compile.enable true"
LONG_VALIDATION = "--validation.interval 5 --validation.sequences 100000"
OFTEN = "--checkpoint.interval 1 --checkpoint.mode sync"


def one_second(_: Path) -> Callable[[], bool]:
    """After the start."""
    begun = time.monotonic()
    return lambda: time.monotonic() - begun > 1


def in_the_first_step(run: Path) -> Callable[[], bool]:
    """Two seconds after the loop has begun, and before a step is done."""
    begun: list[float] = []

    def condition() -> bool:
        if not begun and "Keel trains" in _text(run / "run.log"):
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() - begun[0] > 2

    return condition


def in_validation(run: Path) -> Callable[[], bool]:
    """When steps have stopped coming."""
    return lambda: len(_text(run / "metrics.jsonl").splitlines()) == 4 and _age(run / "metrics.jsonl") > 1


def in_a_save(run: Path) -> Callable[[], bool]:
    """When the third save is on its way."""
    return lambda: (run / "checkpoints" / "step-00000003.tmp").exists()


MOMENTS: tuple[tuple[str, Callable[[Path], Callable[[], bool]], str], ...] = (
    ("1 s after the start", one_second, ""),
    ("in a compilation", in_the_first_step, COMPILED),
    ("in a validation", in_validation, LONG_VALIDATION),
    ("in a save", in_a_save, OFTEN),
)


def torture(folder: Path, name: str, moment: Callable[[Path], Callable[[], bool]], words: str, ranks: int) -> str:
    """Stop one run at one moment and go on; returns what there is to tell.

    Raises: AssertionError if anything is lost.
    """
    job, run = folder / "job.toml", folder / "run"
    job.write_text(JOB)
    process = start(folder, words, ranks, job)
    wait_until(process, lambda: _children(process.pid) >= ranks)
    wait_until(process, moment(run))
    os.kill(ranks_of(process)[-1] if ranks else process.pid, signal.SIGTERM)
    signalled = time.monotonic()
    outcome = finish(process)
    seconds = time.monotonic() - signalled
    status = json.loads((run / "status.json").read_text())
    assert outcome.code == (1 if ranks else 75), outcome.err
    assert status["state"] == "preempted", status
    stopped = [path.name for path in (run / "checkpoints").iterdir()]
    assert f"step-{status['step']:08d}" in stopped, stopped
    harmless = words if words == COMPILED else ""  # what is compiled adds up in another order
    _to_the_end(folder, harmless, ranks, job)
    _to_the_end(folder, f"{harmless} --job.output_dir undisturbed", ranks, job)
    assert_equal(run, folder / "undisturbed", STEPS)
    told = f"exit {outcome.code}, preempted at step {status['step']} by {status['reason']!r}"
    return f"{name:20} {told}, {seconds:.1f} s after the signal; resumed bit for bit"


def _to_the_end(folder: Path, words: str, ranks: int, job: Path) -> None:
    outcome = finish(start(folder, words, ranks, job))
    assert outcome.code == 0, outcome.err


def _children(pid: int) -> int:
    return len(_text(Path(f"/proc/{pid}/task/{pid}/children")).split())


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Signal a run at awkward moments.")
    parser.add_argument("--ranks", type=int, default=0, help="under torchrun, so many (default: plain python)")
    ranks = parser.parse_args().ranks
    for name, moment, words in MOMENTS:
        with tempfile.TemporaryDirectory() as folder:
            print(torture(Path(folder), name, moment, words, ranks), flush=True)


if __name__ == "__main__":
    main()
