"""Evaluations during training: lm-eval's tasks on checkpoints, one at a time, in a process alongside the run.

No rank waits for it, but at the end of the run. If it fails, training continues; one that a stop interrupts is made by
the next launch.
"""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from checkpoint.folder import set_aside
from checkpoint.manifest import step_folder
from checkpoint.pin import Pin
from configs.schema import Config
from parallelisms.ranks import on_rank_zero
from trainer.evaluation.results import FOLDER, described, is_evaluated, recorded, unrecorded
from trainer.report.metrics import EvaluationMetrics

_OF_THE_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class _Due:
    step: int
    pin: Pin
    """Keeps the checkpoint, however long it has to wait for earlier ones."""


class Evaluations:
    """The evaluations of one run. Created on all ranks; the first rank does the work."""

    def __init__(
        self,
        config: Config,
        resumed_from: int | None,
        record: Callable[[EvaluationMetrics], None],
        log: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            resumed_from: results of later steps belong to an abandoned line and are set aside.
            record: called on the first rank with each new result.
            log, warn: called there with one line for people.

        Raises:
            UserError: the folder can't be written. All ranks raise it.
        """
        self._every = config.evaluation.interval
        self._folder = config.job.folder
        self._record = record
        self._log = log
        self._warn = warn
        self._seen: int | None = None
        self._due: deque[_Due] = deque()
        self._running: tuple[_Due, subprocess.Popen[bytes]] | None = None
        self._recorded: set[tuple[int, float]] | None = None
        world = dist.group.WORLD
        assert world is not None
        on_rank_zero(world, lambda: self._prepare(resumed_from))

    def _prepare(self, resumed_from: int | None) -> None:
        aside = set_aside(self._folder / FOLDER, resumed_from)
        if aside:
            self._log(f"evaluations of steps that this run does not resume from were moved to {aside}")

    @property
    def _output(self) -> Path:
        return self._folder / FOLDER / "log.txt"

    def poll(self, committed: int | None) -> None:
        """Record new results, and begin what is due. Called on the first rank, once per step; never waits.

        Args:
            committed: the step of the newest checkpoint.
        """
        is_new = committed is not None and committed != self._seen
        if is_new and committed is not None:
            self._seen = committed
            if self._every and committed % self._every == 0 and not is_evaluated(self._folder, committed):
                # Pin before the next save: it removes old checkpoints, and must find the pin.
                self._due.append(_Due(committed, Pin(step_folder(self._folder / "checkpoints", committed))))
        ended = self._running and self._running[1].poll() is not None
        try:
            if ended:
                self._end()
            if self._due and not self._running:
                self._start(self._due.popleft())
            if is_new or ended:
                self._collect()
        except OSError as error:
            self._warn(f"{self._output.parent} can't be used ({error}); an evaluation is missing, training continues")

    def finish(self, stop: Callable[[], bool]) -> None:
        """Wait until all due evaluations are made, or until `stop()` is true; then the rest is left."""
        while self._running or self._due:
            if stop():
                self._abandon()
            self.poll(None)
            time.sleep(0.05)

    def _abandon(self) -> None:
        while self._due:
            self._due.popleft().pin.release()
        if self._running:
            self._running[1].kill()
            self._running[1].wait()

    def _start(self, due: _Due) -> None:
        try:
            self._running = due, self._process(due.step)
        except OSError:
            due.pin.release()
            raise

    def _process(self, step: int) -> "subprocess.Popen[bytes]":
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        kept = {key: value for key, value in os.environ.items() if key not in _OF_THE_LAUNCH}
        self._output.parent.mkdir(exist_ok=True)
        with self._output.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "trainer.evaluation.program", str(self._folder), str(step)],
                env={key: value for key, value in kept.items() if not key.startswith("TORCHELASTIC")}
                | {"PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C of the terminal is for the run
            )

    def _end(self) -> None:
        assert self._running is not None
        (due, process) = self._running
        self._running = None
        due.pin.release()
        assert process.stdin is not None
        process.stdin.close()
        name = f"evaluation of step {due.step}"
        if process.returncode < 0:
            self._log(f"{name}: ended by signal {-process.returncode}; keel evaluate makes it, or the next launch")
        elif process.returncode:
            last = (self._output.read_text(errors="replace").strip().splitlines() or ["no message"])[-1]
            self._warn(f"{name} failed, training continues: {last} (see {self._output})")

    def _collect(self) -> None:
        """Record the results that metrics.jsonl lacks, also `keel evaluate`'s."""
        if self._recorded is None:
            self._recorded = recorded(self._folder)
        for result in unrecorded(self._folder, self._recorded):
            self._record(result)
            self._log(described(result))
