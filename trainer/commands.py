"""Commands that run beside the training after a save: `checkpoint.after_save`, such as an export or an evaluation.

They run one at a time, in order, on the first rank's host. No rank waits for one before the end of the run, and the
checkpoint is kept as long as one needs it. What a command writes to {output} appears as a whole, in
`after_save/NAME/step-00000100/`, when it has succeeded; that folder also records that it has. If a command fails,
training continues. What a stop interrupts, the next launch runs again.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch.distributed as dist

from checkpoint.folder import set_aside
from checkpoint.lock import ReadLock
from checkpoint.manifest import UNFINISHED, step_folder, steps_in
from checkpoint.storage import remove_unfinished
from configs.after_save import filled_in, search_path, words_of
from configs.errors import UserError
from configs.files import exists
from configs.schema import AfterSave, Config
from configs.secret import SECRET
from parallelisms.ranks import on_rank_zero
from trainer import beside
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.report import evaluations
from trainer.report.console import Console
from trainer.report.metrics import EvaluationMetrics

FOLDER = "after_save"
LOG = ".log"
"""Suffix of the files, beside the folders of the steps, with what the commands print."""
_OF_THE_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", SECRET)


@dataclass(frozen=True)
class _Due:
    """A command that is to run, or runs."""

    command: AfterSave
    step: int
    lock: ReadLock
    """Keeps the checkpoint, however long the command has to wait for others."""

    def __str__(self) -> str:
        return f"{self.command.name} after step {self.step}"


@dataclass
class Commands:
    """The commands of one run; every rank has them, and the first rank does the work."""

    config: Config
    console: Console
    stop: StopRequest
    watchdog: Watchdog
    committed: Callable[[], int | None]
    """Returns the step of the newest checkpoint."""
    record: Callable[[EvaluationMetrics], None]
    """Called on the first rank with each new result of `keel evaluate`, by whomever it was run."""
    are_left: bool = False
    """Whether something is left to the next launch, or to this one after it has gone back; the first rank knows."""
    _due: deque[_Due] = field(default_factory=deque)
    _running: "tuple[_Due, subprocess.Popen[bytes]] | None" = None
    _seen: int | None = None
    """The step of the newest checkpoint whose commands are queued."""
    _recorded: set[tuple[int, float]] | None = None
    """Step and time of the evaluations that metrics.jsonl has; None: not known yet."""

    @cached_property
    def _run(self) -> Path:
        """The run folder."""
        return self.config.job.folder.absolute()

    def open(self) -> None:
        """Begin after the newest checkpoint, or begin again after a rewind to it; all ranks call it.

        Raises:
            UserError: what belongs to later steps can't be set aside.
        """
        self._seen = None
        self._recorded = None
        self.are_left = False
        step = self.committed()
        on_rank_zero(None, lambda: self._prepare(step))

    def _prepare(self, step: int | None) -> None:
        log = self.console.line
        for folder in [self._run / evaluations.FOLDER, *sorted((self._run / FOLDER).glob("*/"))]:
            remove_unfinished(folder, log, self.console.warning)
            if aside := set_aside(folder, step):
                log(f"what belongs to steps that this run does not resume from was moved to {aside}")

    def poll(self, only_queues: bool = False) -> None:
        """Begin what is due and report what has ended; never waits. Call it before a save removes old checkpoints.

        Args:
            only_queues: queue what is due, which keeps its checkpoint, and nothing else.
        """
        if dist.get_rank() > 0:
            return
        committed = self.committed()
        is_new = committed is not None and committed != self._seen
        has_ended = self._running and self._running[1].poll() is not None
        try:
            if is_new and committed is not None:
                seen = self._seen
                self._seen = committed  # also if the disk refuses: the next launch then runs what is missing
                for command in self.config.checkpoint.after_save:
                    self._queue(command, seen, committed)
            if only_queues:
                return
            if has_ended:
                self._end()
            if self._due and not self._running and not (self.stop or self.are_left):
                self._start(self._due.popleft())
            if is_new or has_ended:
                self._collect()
        except OSError as error:
            where = error.filename or self._run / FOLDER
            self.console.warning(f"{where} can't be used ({error.strerror}); training continues without it")

    def finish(self, is_done: bool) -> None:
        """Run what is due, the last checkpoint's as well; after a signal, the next launch does. All ranks call it.

        Args:
            is_done: whether the run has come to its last step.
        """
        if is_done:
            self.poll()
        if self.config.checkpoint.after_save:
            self.watchdog.on_first_rank("commands after the save", lambda: self._finish(is_done), is_needed=False)

    def _finish(self, is_done: bool) -> None:
        while self._running or self._due:
            if not is_done or self.stop:
                self._abandon()
            self.poll()
            time.sleep(0.05)

    def _abandon(self) -> None:
        self.are_left = True
        while self._due:
            self._due.popleft().lock.release()
        if self._running:
            self._running[1].communicate()  # closes its standard input, which ends it

    def _queue(self, command: AfterSave, after: int | None, committed: int) -> None:
        """Queue a command for the newest checkpoint; first in a launch, also for those since its last success.

        One that never succeeded is queued for those since it was first queued, which its logs tell, or for its newest.
        This pins them at once, since the next save removes old checkpoints.

        Args:
            after: step of the last checkpoint whose commands are queued; None: first in a launch.
            committed: step of the newest checkpoint.
        """
        folder = self._run / FOLDER / command.name
        every = command.every
        steps = [step for step in steps_in(self._run / "checkpoints") if step <= committed and step % every == 0]
        logs = {step: step_folder(folder, step).with_suffix(LOG) for step in steps}
        if after is None:
            queued = [step for step, log in logs.items() if exists(log)]
            after = max(steps_in(folder), default=min(queued or steps[-1:], default=committed) - 1)
        for step in steps:
            if step > after:
                try:
                    self._due.append(_Due(command, step, ReadLock(step_folder(self._run / "checkpoints", step))))
                except UserError as error:
                    self.console.warning(f"{command.name} after step {step} does not run: {error}")
                with suppress(OSError):  # its start meets the same, and is reported
                    folder.mkdir(parents=True, exist_ok=True)
                    logs[step].touch()

    def _start(self, due: _Due) -> None:
        try:
            self._running = due, self._process(due)
        except OSError:
            due.lock.release()
            raise

    def _process(self, due: _Due) -> "subprocess.Popen[bytes]":
        output = self._output(due)
        output.mkdir(parents=True, exist_ok=True)
        checkpoint = step_folder(self._run / "checkpoints", due.step)
        values = {"checkpoint": str(checkpoint), "step": str(due.step), "run": str(self._run), "output": str(output)}
        words = filled_in(words_of(due.command.command), values)
        kept = {name: value for name, value in os.environ.items() if name not in _OF_THE_LAUNCH}
        with output.with_suffix(LOG).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-I", beside.__file__, str(checkpoint), *words],
                env={name: value for name, value in kept.items() if not name.startswith("TORCHELASTIC")}
                | {"PATH": search_path(), "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C of the terminal is for the run
            )

    def _output(self, due: _Due) -> Path:
        folder = step_folder(self._run / FOLDER / due.command.name, due.step)
        return folder.with_name(folder.name + UNFINISHED)

    def _end(self) -> None:
        assert self._running is not None
        (due, process) = self._running
        self._running = None
        code = process.returncode
        if code < 0:
            with suppress(OSError):  # it is gone; otherwise it would write on, and outlive the run
                os.killpg(process.pid, signal.SIGKILL)
        if code == 0 or not self.stop:  # otherwise the stop's save must leave the checkpoint to the next launch
            due.lock.release()
        output = self._output(due)
        if code == 0:
            output.rename(step_folder(output.parent, due.step))
            self.console.line(f"{due}: done")
            return
        shutil.rmtree(output, ignore_errors=True)
        if self.are_left or self.stop:
            self.are_left = True
            self.console.line(f"{due}: interrupted; it runs again when the run goes on")
            return
        log = output.with_suffix(LOG)
        reason = f"signal {-code} ended it"
        if code > 0:
            reason = (log.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"])[-1]
        self.console.warning(f"{due} failed, training continues: {reason} (see {log})")

    def _collect(self) -> None:
        """Record the results of `keel evaluate` that metrics.jsonl lacks."""
        if self._recorded is None:
            self._recorded = evaluations.recorded(self._run)
        for result in evaluations.unrecorded(self._run, self._recorded):
            self.record(result)
            self.console.line(evaluations.described(result))
