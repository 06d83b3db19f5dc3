"""Host time of a training step alone, beside a save and beside an export: python -m tests.null_gpu.beside_a_save

    [--config llama_1b.toml] [--saves 3] [--folder FOLDER] [--table.key VALUE ...]

A device that computes nothing leaves the host's part of a step: the time in which it is queued. On a machine with few
cores, a step's threads also wait for a core that the save, the disk's own threads or other programs have. A training
host has cores for them, so the time in the queues of the cores is shown apart (Linux counts it for each thread), and
the ratio is of the rest: computing, and waiting for the interpreter's lock.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.null_gpu.device import Unavailable, environment
from tests.null_gpu.step import ROOT, WARM_UP_STEPS, build, join, load_job

STEPS = 10
"""Steps alone, before each save."""
# Tensors as many and about as large as those of a rank of an 8B model on 64 ranks.
SMALL = "--training.global_batch_size 2 --training.micro_batch_size 1 --training.seq_len 512 --model.n_layers 32 "
SMALL += "--model.dim 512 --model.ffn_dim 2048 --model.n_heads 8 --model.n_kv_heads 8 --model.vocab_size 8192"


@dataclass(frozen=True)
class Times:
    """Of a step."""

    wall: float
    queued: float
    """Seconds in which threads of the step were ready to run, but had no core."""


class Steps:
    """Steps of a job, one after the other, as the trainer's."""

    def __init__(self, job: Any) -> None:
        self.learner, self._loader = build(job)
        self._last: Any = None

    def __call__(self) -> Times:
        micro_batches = next(self._loader)
        began = time.perf_counter()
        queued = _queued_seconds()
        gradients = self.learner.gradients(micro_batches)
        if self._last is not None:
            self._last.read()
        self._last = self.learner.judge(micro_batches, gradients)
        self.learner.update(self._last, 1e-4)
        return Times(time.perf_counter() - began, _queued_seconds() - queued)


def _queued_seconds() -> float:
    """Seconds that the main thread and autograd's have waited for a core so far; they run in turn."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        if task.name == str(os.getpid()) or (task / "comm").read_text().startswith("pt_autograd"):
            total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9


def measure(config: str, overrides: list[str], saves: int, folder: Path) -> dict[str, list[Times]]:
    """Times of steps: "alone", "beside a save", "beside an export"."""
    from checkpoint.manager import CheckpointManager
    from checkpoint.reader import Description, Log

    job = load_job(config, overrides, 1)
    step = Steps(job)
    for _ in range(WARM_UP_STEPS):
        step()
    description = Description(job.model_dump(mode="json"), {}, None, {}, False)
    settings = job.checkpoint.model_copy(update={"keep_last": 1, "mode": "async"})
    manager = CheckpointManager(folder / "checkpoints", settings, description, Log(print, print))
    manager.begin_lineage()
    times: dict[str, list[Times]] = {"alone": [], "beside a save": [], "beside an export": []}

    def save(number: int) -> Callable[[], bool]:
        manager.save(number, step.learner.state(), {"tokens": 0})
        under_way = manager.under_way
        assert under_way is not None
        return under_way.done

    # The first save makes the plan and touches the memory, once in a run.
    save(1)
    manager.wait()
    for number in range(2, saves + 2):
        times["alone"] += [step() for _ in range(STEPS)]
        is_done = save(number)
        while not is_done():
            times["beside a save"].append(step())
        manager.wait()
    assert manager.newest is not None
    export = _export(manager.newest, folder / "exported")
    while export.poll() is None:
        times["beside an export"].append(step())
    if export.returncode:
        raise RuntimeError(f"the export ended with {export.returncode}")
    return times


def _export(checkpoint: Path, output: Path) -> "subprocess.Popen[bytes]":
    """Start an export as a command after a save is started: beside this process, with low priority."""
    program = [
        sys.executable,
        str(ROOT / "scripts" / "export_hf.py"),
        str(checkpoint),
        str(output),
        "--tokenizer",
        "none",
    ]
    settings = {name: value for name, value in os.environ.items() if name not in environment()}
    command = [sys.executable, str(ROOT / "trainer" / "beside.py"), *program]
    return subprocess.Popen(command, env=settings, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)


def table(times: dict[str, list[Times]]) -> str:
    """The result for people."""
    lines = ["                  steps   ms of a step   waiting for a core   without that: ms   ratio"]
    alone = statistics.median(each.wall - each.queued for each in times["alone"])
    for what, of_steps in times.items():
        wall = statistics.median(each.wall for each in of_steps)
        queued = statistics.median(each.queued for each in of_steps)
        rest = statistics.median(each.wall - each.queued for each in of_steps)
        figures = f"{len(of_steps):>5}{1e3 * wall:>15.0f}{1e3 * queued:>21.0f}{1e3 * rest:>19.0f}{rest / alone:>8.2f}"
        lines.append(f"{what:<18}{figures}")
    return "\n".join(lines)


def main() -> int:
    """The command line; starts itself once more, on the device."""
    parser = argparse.ArgumentParser(description="Host time of a step alone, beside a save and beside an export.")
    parser.add_argument("--config", default="llama_1b.toml", help="job file (default: %(default)s, made small)")
    parser.add_argument("--saves", type=int, default=3, help="saves after the first (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are put (default: the system's own)")
    options, overrides = parser.parse_known_args()
    if "KEEL_NULL_GPUS" not in os.environ:
        try:
            settings = environment()
        except Unavailable as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        command = [sys.executable, "-m", "tests.null_gpu.beside_a_save", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"OMP_NUM_THREADS": "1"} | settings)
    join(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print(table(measure(options.config, [*SMALL.split(), *overrides], options.saves, folder)))
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # NCCL's threads wait for a device that never answers
