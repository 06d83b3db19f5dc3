"""Hugging Face folders written during training: `exports/step-00000100/`, next to the checkpoints they come from.

An export is made from a committed checkpoint, by a thread of the first rank, one tensor at a time: no rank waits for it
or for its disk, and it can't contain what was never saved. If it fails, training continues; an export that a stop
interrupts is made by the next launch.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from checkpoint.export.hf import export_hf
from checkpoint.folder import set_aside
from checkpoint.manifest import remove_unfinished, step_folder
from checkpoint.pin import Pin
from configs.errors import KeelError
from configs.schema import Config
from parallelisms.ranks import on_rank_zero
from trainer.data.hf_tokenizer import tokenizer_files


class _Stopped(KeelError):
    """The run ends before the export does."""


@dataclass(frozen=True)
class _Export:
    """An export that is due, or being made."""

    step: int
    pin: Pin
    """Pins the source checkpoint, however long this export has to wait for earlier ones."""
    result: "Future[None]" = field(default_factory=Future)


class Exports:
    """The exports of one run. Created on all ranks, so that all learn of a mistake; the first rank does the work."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        resumed_from: int | None,
        log: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            folder: the run folder.
            resumed_from: exports of later steps belong to an abandoned line and are set aside.
            log, warn: called on the first rank with one line for people.

        Raises:
            UserError: the tokenizer can't be exported, or the folder can't be written. All ranks raise it.
        """
        self._every = config.checkpoint.export_every
        self._tokenizer = tokenizer_files(config.tokenizer.path)
        self._checkpoints = folder / "checkpoints"
        self._exports = folder / "exports"
        self._log = log
        self._warn = warn
        self._seen: int | None = None
        self._due: deque[_Export] = deque()
        self._running: _Export | None = None
        self._stopping = threading.Event()
        world = dist.group.WORLD
        assert world is not None
        on_rank_zero(world, lambda: self._prepare(resumed_from))

    def _prepare(self, resumed_from: int | None) -> None:
        remove_unfinished(self._exports, self._log, self._warn)
        aside = set_aside(self._exports, resumed_from)
        if aside:
            self._log(f"exports of steps that this run does not resume from were moved to {aside}")

    def poll(self, committed: int | None) -> None:
        """Report finished exports, and begin those that are due. Called on the first rank, once per step; never waits.

        Args:
            committed: the step of the newest checkpoint.
        """
        if committed is not None and committed != self._seen:
            self._seen = committed
            if committed % self._every == 0 and not step_folder(self._exports, committed).exists():
                # Pin before the next save: it removes old checkpoints, and must find the pin.
                self._due.append(_Export(committed, Pin(step_folder(self._checkpoints, committed))))
        if self._running and self._running.result.done():
            self._report(self._running)
            self._running = None
        if self._due and not self._running:
            self._start(self._due.popleft())

    def finish(self, stop: Callable[[], bool]) -> None:
        """Wait until all due exports are made, or until `stop()` is true; then nothing unfinished is left behind."""
        while self._running or self._due:
            if stop():
                self._stopping.set()
                while self._due:
                    self._due.popleft().pin.release()
            self.poll(None)
            time.sleep(0.05)

    def _start(self, export: "_Export") -> None:
        self._running = export
        # A daemon thread: if training dies, the process must not wait for it.
        threading.Thread(target=self._make, args=(export,), name="export", daemon=True).start()

    def _make(self, export: "_Export") -> None:
        try:
            source = step_folder(self._checkpoints, export.step)
            output = step_folder(self._exports, export.step)
            # Checking sizes is enough: the content was hashed when it was written, moments ago.
            export_hf(source, output, self._tokenizer, verify="size", progress=lambda done, total: self._check())
            export.result.set_result(None)
        except BaseException as error:
            export.result.set_exception(error)
        finally:
            export.pin.release()

    def _check(self) -> None:
        if self._stopping.is_set():
            raise _Stopped("the run ends; its next launch makes it")

    def _report(self, export: "_Export") -> None:
        """Report the result; raises an error that is not a KeelError, since that is a bug in Keel."""
        name = step_folder(self._exports, export.step).name
        try:
            export.result.result()
            self._log(f"export {name}: written")
        except _Stopped as stopped:
            self._log(f"export {name}: {stopped}")
        except KeelError as error:
            self._warn(f"export {name} failed, training continues: {error}")
