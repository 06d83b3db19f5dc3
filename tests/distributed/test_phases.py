"""The rank that keeps the others waiting is named, with its host and phase, once it has done so for a while."""

import io
import os
import socket
import statistics
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from configs.load import load
from parallelisms.guards.collective_waits import CollectiveWaits
from tests.end_to_end.launch import records
from tests.torture.resume import JOB
from trainer.guards import phases
from trainer.guards.phases import Phase, PhaseClock, _of_others
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.opening import Runtime
from trainer.report.console import Console
from trainer.report.metrics import TimeLedger
from trainer.trainer import Trainer

SECONDS = 0.5
"""What is planted: much, for these tests run on machines with other work to do."""
SLOW = 1


def delayed(function):
    def slow(*arguments):
        time.sleep(SECONDS)
        return function(*arguments)

    return slow


class SlowLoader:
    """A loader that has nothing ready."""

    def __init__(self, loader) -> None:
        self._loader = loader

    def __next__(self):
        return delayed(next)(self._loader)

    def __getattr__(self, name: str):
        return getattr(self._loader, name)


def plant(trainer: Trainer, where: str) -> subprocess.Popen | None:
    """Make this rank slow; returns the process that does it, if it is one."""
    if where == "stop":  # four fifths of the time
        stop = f"sleep 0.2; kill -STOP {os.getpid()}; sleep 0.8; kill -CONT {os.getpid()}"
        return subprocess.Popen(["bash", "-c", f"while kill -0 {os.getpid()}; do {stop}; done"])
    if where == "data":
        trainer.loader = SlowLoader(trainer.loader)
        return None
    stage = next(iter(trainer.learner.stages.values()))
    owner, name = {
        "compute": (stage.get_submodule("layers.1.mlp"), "forward"),
        "update": (trainer.learner.optimizer, "step"),
        "host": (trainer.watch.profiler, "before_step"),
    }[where]
    setattr(owner, name, delayed(getattr(owner, name)))
    return None


def watched(folder: str, words: tuple[str, ...], where: str, windows: int) -> str:
    """What is said of a run in which a rank is slow; windows are of three steps."""
    before = phases._SAMPLES, phases._FIRST_STRIDE, phases._LAST_STRIDE
    phases._SAMPLES, phases._FIRST_STRIDE, phases._LAST_STRIDE = 3, 1, 1
    steps = str(2 + 3 * windows)
    quiet = ("--metrics.tensorboard", "false", "--checkpoint.interval", "0", "--training.steps", steps)
    job = load(str(JOB), ("--job.output_dir", folder, *quiet, *words), dist.get_world_size())
    Path(folder).mkdir(exist_ok=True)
    said, process = io.StringIO(), None
    try:
        with (
            Console(dist.get_rank(), out=io.StringIO(), err=said) as console,
            closing(Watchdog(Path(folder), 600, print)) as watchdog,
        ):
            trainer = Trainer(Runtime(job, torch.device("cpu"), console, StopRequest(), TimeLedger(), watchdog))
            if dist.get_rank() == SLOW:
                process = plant(trainer, where)
            trainer.train()
    finally:
        phases._SAMPLES, phases._FIRST_STRIDE, phases._LAST_STRIDE = before
        if process:
            process.kill()
            subprocess.run(["kill", "-CONT", str(os.getpid())], check=True)
    return said.getvalue()


WORDS = {phase.name.lower(): phase.words for phase in Phase} | {"stop": ""}


@pytest.mark.parametrize(
    ("where", "mesh"),
    [
        pytest.param("compute", "--mesh.dp_shard 2", marks=pytest.mark.slow),
        pytest.param("data", "--mesh.pp 2", marks=pytest.mark.slow),
        pytest.param("compute", "--mesh.tp 2", marks=pytest.mark.long),
        pytest.param("compute", "--mesh.dp_replicate 2 --comm.order_guard_interval 1", marks=pytest.mark.long),
        pytest.param("update", "--mesh.dp_shard 2", marks=pytest.mark.long),
        pytest.param("host", "--mesh.dp_shard 2", marks=pytest.mark.long),
        pytest.param("stop", "--mesh.dp_shard 2", marks=pytest.mark.long),
    ],
)
def test_the_slow_rank_is_named(ranks, tmp_path, where, mesh):
    windows = 3 if where != "stop" else 30
    said, nothing = ranks(2, watched, str(tmp_path / "run"), tuple(mesh.split()), where, windows)
    assert nothing == ""
    assert f"rank {SLOW} ({socket.gethostname()}) keeps the others waiting: " in said
    assert f", most of it in {WORDS[where]}" in said
    if where == "stop":
        return
    assert said.startswith("warning: step 11: ")
    assert said.count("keeps the others waiting") == 1
    logged = [record for record in records(tmp_path / "run") if "slowest_rank" in record]
    assert [record["step"] for record in logged] == [5, 8, 11]
    for record in logged:
        assert record["slowest_rank"] == SLOW
        assert record["lag_seconds"] > 0.6 * SECONDS
        assert record["phase_seconds"][where] > 0.6 * SECONDS


class _Clock(PhaseClock):
    """One that is told what the ranks measured."""

    def __init__(self) -> None:
        super().__init__(CollectiveWaits([], torch.device("cpu")), has_pipeline=False, warm_up_steps=0)

    def window(self, *compute: float) -> str | None:
        rows = [[0.0, seconds, 0.0, 0.0, 0.0, 0.0, 1.0, 10.0] for seconds in compute]
        return self.complaint(self._compare(torch.tensor(rows, dtype=torch.float64)))


def moments() -> list[bool]:
    """Of windows in a row: whether something was said."""
    clock = _Clock()
    healthy, slow, other = (0.5, 0.6, 0.55), (0.5, 0.9, 0.5), (0.9, 0.5, 0.5)
    turns = [slow, slow, healthy, slow, other, slow, other, slow, slow, slow, slow, slow]
    return [clock.window(*seconds) is not None for seconds in turns]


def test_only_what_lasts_is_said_and_once(ranks):
    assert set(map(tuple, ranks(3, moments))) == {tuple(turn == 9 for turn in range(12))}


@pytest.mark.parametrize("n", range(2, 8))
def test_each_rank_is_compared_with_the_median_of_the_others(n):
    values = torch.randint(0, 5, (n, 3), generator=torch.Generator().manual_seed(n)).double()
    for rank in range(n):
        for phase in range(3):
            others = [values[other, phase].item() for other in range(n) if other != rank]
            assert _of_others(values)[rank, phase] == statistics.median_low(others)
