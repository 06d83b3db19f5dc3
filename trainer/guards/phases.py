"""Where each rank's time goes, and which rank keeps the others waiting.

All ranks take equally long for a step, since the fast wait for the slow in collectives. What tells them apart is the
time that a rank does *not* spend in collectives. Waiting for data, the update and the host's work between steps are
timed on every step. Forward and backward require listening to their collectives, so they are timed only on every n-th
step, with n large enough that it costs less than 0.2% of the time. After a window of such samples the ranks exchange
what they measured.
"""

import math
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from parallelisms.guards.collective_waits import CollectiveWaits
from parallelisms.ranks import gather
from trainer.guards.verdict import name_ranks
from trainer.stopwatch import Stopwatch

LAG_RATIO = 0.2
"""Fraction of a step; a rank that lags behind by more is named."""
_SAMPLES = 6  # per window
_WINDOWS = 3  # consecutive windows with the same slow rank before it is reported: a busy machine has bad moments
_REPEAT_WINDOWS = 30
_COST = 1.5e-3  # largest fraction of a step spent listening
_FIRST_STRIDE = 5
_LAST_STRIDE = 100
_SHORT_STEP_SECONDS = 0.05  # a delay in a shorter step is the machine's scheduling


class Phase(IntEnum):
    """A kind of work that a rank spends the training loop's time on."""

    DATA = 0
    COMPUTE = 1
    UPDATE = 2
    HOST = 3
    CHECKPOINT = 4
    OTHER = 5

    @property
    def words(self) -> str:
        """The name shown to people."""
        return _WORDS[self]


_WORDS = {
    Phase.DATA: "waiting for data",
    Phase.COMPUTE: "forward and backward",
    Phase.UPDATE: "the update",
    Phase.HOST: "work between steps",
    Phase.CHECKPOINT: "checkpoints",
    Phase.OTHER: "waiting for the other ranks",
}
_COMPARED = (Phase.DATA, Phase.COMPUTE, Phase.UPDATE, Phase.HOST)


@dataclass(frozen=True)
class Lag:
    """How far the slowest rank lagged behind in a window."""

    rank: int
    phase: Phase
    """The phase that contributed most."""
    seconds: float
    """How much longer per step the slowest rank took than the others, outside of collectives."""
    step_seconds: float
    phase_seconds: dict[str, float]
    """Time per step outside of collectives, by phase, on the rank that spent the most."""


class PhaseClock(Stopwatch[Phase]):
    """Accounts for this rank's time in the training loop; all ranks have one, and make the same calls."""

    def __init__(self, waits: CollectiveWaits, has_pipeline: bool, warm_up_steps: int) -> None:
        """
        Args:
            has_pipeline: whether there is a pipeline. Its stages differ in their work and wait for each other's
                messages, so forward and backward are not compared.
            warm_up_steps: steps that are not counted.
        """
        self._waits = waits
        self._is_on = dist.get_world_size() > 1
        self._is_sampled = False
        if self._is_on:
            waits.prepare()
        self._compared = [phase for phase in _COMPARED if not (has_pipeline and phase is Phase.COMPUTE)]
        self._stride = _FIRST_STRIDE
        self._steps = -warm_up_steps
        super().__init__(Phase.HOST)
        self._update_began = self._last
        self._clear()
        self._slow: list[int] = []
        """The slow rank of each of the last consecutive windows; -1: none."""
        self._quiet = 0
        """Windows during which no further report is made."""

    def _clear(self) -> None:
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._sampled = 0.0
        self._samples = 0
        self._in_window = 0
        self._calls = self._waits.calls
        self._waits.take()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure forward, backward and update, which run inside this context."""
        self._is_sampled = self._is_on and self._in_window % self._stride == 0
        before = self._seconds[Phase.COMPUTE]
        with self.measure(Phase.COMPUTE), self._waits.measuring() if self._is_sampled else nullcontext():
            yield
        update = self._last - self._update_began
        self._seconds[Phase.UPDATE] += update
        self._seconds[Phase.COMPUTE] -= update
        if self._is_sampled:
            self._samples += 1
            self._sampled += self._seconds[Phase.COMPUTE] - before

    def updating(self) -> None:
        """Note, inside `step`, that its update begins."""
        self._update_began = time.perf_counter()

    def finish_step(self) -> Lag | None:
        """Count a step; at the end of a window all ranks compare, and get the same result."""
        if not self._is_on:
            return None
        self._book()
        self._steps += 1
        if self._steps <= 0:
            self._clear()
            return None
        self._in_window += 1
        if self._in_window < self._stride * _SAMPLES:
            return None
        lag = self._compare(self._exchange())
        self._clear()
        return lag

    def _exchange(self) -> Tensor:
        """Seconds per step of each rank: (ranks, phases + 2), the last two columns being the step's total and calls."""
        seconds = [total / self._in_window for total in self._seconds.values()]
        step_seconds = sum(seconds)
        calls = (self._waits.calls - self._calls) / self._samples
        # The collectives of a step are waited for in forward and backward.
        seconds[Phase.COMPUTE] = (self._sampled - self._waits.take()) / self._samples
        own = torch.tensor([*seconds, step_seconds, calls], dtype=torch.float64)
        everyone = own.new_empty(dist.get_world_size(), len(own))
        dist.all_gather(list(everyone.unbind()), own)
        return everyone

    def _compare(self, ranks: Tensor) -> Lag:
        step_seconds = ranks[:, -2].max().item()
        calls = ranks[:, -1].max().item()
        self._stride = stride(calls * self._waits.call_seconds, step_seconds)
        behind = ranks[:, self._compared] - _of_others(ranks[:, self._compared])
        slowest = int(behind.sum(1).argmax())
        lag = Lag(
            rank=slowest,
            phase=self._compared[int(behind[slowest].argmax())],
            seconds=max(0.0, behind[slowest].sum().item()),
            step_seconds=step_seconds,
            phase_seconds={phase.name.lower(): ranks[:, phase].max().item() for phase in Phase if phase != Phase.OTHER},
        )
        is_slow = lag.seconds > LAG_RATIO * max(step_seconds, _SHORT_STEP_SECONDS)
        self._slow = [*self._slow[1 - _WINDOWS :], slowest if is_slow else -1]
        self._quiet -= self._quiet > 0
        return lag

    def complaint(self, lag: Lag) -> str | None:
        """The warning after a window; None if there is nothing to report. All ranks must call it, and get the same."""
        if self._slow != [lag.rank] * _WINDOWS or self._quiet:
            return None
        self._quiet = _REPEAT_WINDOWS
        hosts = gather(socket.gethostname())
        return (
            f"{name_ranks([lag.rank], hosts)} keeps the others waiting: {lag.seconds:.3g} s of a step's "
            f"{lag.step_seconds:.3g} s, most of it in {lag.phase.words}"
        )


def stride(listening_seconds: float, step_seconds: float) -> int:
    """Steps between samples, given what listening costs in a sampled step and how long a step takes."""
    return min(max(1, math.ceil(listening_seconds / (_COST * step_seconds))), _LAST_STRIDE)


def _of_others(ranks: Tensor) -> Tensor:
    """The median over the other ranks, for each rank; input and output (ranks, phases)."""
    n = len(ranks)
    ordered = ranks.sort(0).values
    place = ranks.argsort(0).argsort(0)  # position of each rank in that order
    middle = (n - 2) // 2  # of the n - 1 others; the lower one if their number is even
    # `ordered` includes the rank itself, which shifts the others by one if it comes before the middle.
    return ordered.gather(0, middle + (place <= middle).long())
