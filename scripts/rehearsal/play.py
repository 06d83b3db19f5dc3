"""One process plays one rank of a run, from its start through two steps, a validation and a save to a stop."""

import io
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from configs.load import load
from parallelisms.guards.order_guard import Channel, issued, passes_on
from scripts.rehearsal.echo import echoing_ranks
from scripts.rehearsal.job import STOP_AFTER
from trainer.guards.verdict import QueuedStep, StepResult
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.opening import Runtime
from trainer.report.console import Console
from trainer.report.metrics import TimeLedger
from trainer.trainer import Trainer

_NOT_NAMED = ("<", str(Path(__file__).resolve().parent) + os.sep, str(Path(os.__file__).parent) + os.sep)
"""How files begin whose lines are not named: generated ones, the rehearsal's, Python's."""


@cache
def _is_skipped(file: str) -> bool:
    """Whether a line of a file is not what issues a collective; a user's own is. Nothing is compiled here."""
    return passes_on(file) or file.startswith(_NOT_NAMED)


class Event(NamedTuple):
    """What a rank issues and then waits for."""

    channel: Channel
    what: str
    where: str
    """What the rank is at: "training after step 1"."""
    sends: bool | None
    """Whether a message leaves here or arrives; None: a collective."""
    batch: int | None
    """Messages with the same number are issued together."""


class Notes:
    """What one rank has issued so far, and what it is at."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.doing = "start-up"
        self._channels: dict[str, Channel] = {}

    def note(
        self, operator: str, group: dist.ProcessGroup, arguments: tuple[Any, ...], batch: int | None = None
    ) -> None:
        """Note a collective or a message; those of one rank with itself are none."""
        if group.size() == 1:
            return
        name = str(group.group_name)
        if name not in self._channels:
            self._channels[name] = Channel(name, tuple(dist.get_process_group_ranks(group)))
        found = issued(operator, self._channels[name], arguments, _is_skipped)
        sends = operator == "send" if found.is_message else None
        self.events.append(Event(found.channel, found.what, self.doing, sends, batch))


class Unwatched(Watchdog):
    """Watches over nobody, since the other ranks do not exist, and tells the notes what this one is at."""

    def __init__(self, notes: Notes, act_as_first: Callable[[Callable[[], None]], None]) -> None:
        self.incarnation = None
        self.rank = dist.get_rank()
        self._notes = notes
        self._act_as_first = act_as_first

    def step(self, step: int, doing: str = "training", may_last: bool = False) -> None:
        """Note what begins."""
        self._notes.doing = doing if doing == "start-up" else f"{doing} after step {step}"

    def on_first_rank(self, doing: str, work: Callable[[], None], is_needed: bool = True) -> None:
        """Do the first rank's work here, too."""
        self._act_as_first(work)


class StoppingConsole(Console):
    """Prints nothing, and asks for a stop after `STOP_AFTER` steps."""

    def __init__(self, stop: StopRequest) -> None:
        super().__init__(rank=1, out=io.StringIO(), err=io.StringIO())
        self._stop = stop

    def advance(self, step: int) -> None:
        """Count a step."""
        if step == STOP_AFTER:
            self._stop.signal_number = signal.SIGTERM


def play(job_file: Path, ranks: int, rank: int) -> list[Event]:
    """Run a job as one of its ranks; returns what it issues, in order.

    Raises:
        KeelError: the job is at fault.
    """
    job = load(str(job_file), world_size=ranks)
    job.config.job.folder.mkdir(parents=True, exist_ok=True)
    notes = Notes()
    stop = StopRequest()
    with echoing_ranks(ranks, rank, notes.note) as echo, StoppingConsole(stop) as console:
        runtime = Runtime(job, torch.device("cpu"), console, stop, TimeLedger(), Unwatched(notes, echo.as_first))
        with patch.object(QueuedStep, "read", _finite(QueuedStep.read)):
            Trainer(runtime).train()
    return notes.events


def _finite(read: Callable[[QueuedStep], StepResult]) -> Callable[[QueuedStep], StepResult]:
    """Wrap `QueuedStep.read`: the other ranks' numbers are made up, and so is what becomes of the loss with them."""

    def wrapped(step: QueuedStep) -> StepResult:
        return replace(read(step), loss=1.0, grad_norm=1.0, skipped=False, is_spike=False, differs=False)

    return wrapped
