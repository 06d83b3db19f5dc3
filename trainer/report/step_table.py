"""The table of the logged steps, with the time left."""

import time
from collections import deque

from trainer.report.metrics import StepMetrics
from trainer.report.units import INDENT, duration

_ROWS_PER_HEADER = 20  # so that a header stays in view on a terminal of usual height
STEP_WIDTH = 9
"""Characters of the first column."""
_RECENT_SECONDS = 1800.0
"""The time left goes by the speed of at most this long."""


class StepTable:
    """Formats the logged steps in columns, and estimates the time left.

    The estimate goes by the clock over the later half of this launch's steps, or the last half hour of it, so that it
    includes validations and saves, and does not jump after each of them.
    """

    def __init__(self, last_step: int, show_mfu: bool, show_memory: bool) -> None:
        self.last_step = last_step
        self._show_mfu = show_mfu
        self._show_memory = show_memory
        self._rows = 0
        self._seconds_per_step = 0.0
        self._first_row = 0
        self._recent: deque[tuple[int, float]] = deque()
        """Steps, and when they were logged."""

    def header_if_due(self) -> str:
        """The header, before the first row and again after every _ROWS_PER_HEADER rows, otherwise ""."""
        self._rows += 1
        if self._rows % _ROWS_PER_HEADER != 1:
            return ""
        cells = self._cells("loss", "grad norm", "lr", "tokens/s", "mfu", "memory", "time left")
        return ("\n" if self._rows == 1 else "") + f"{INDENT}{'step':>{STEP_WIDTH}}{cells}"

    def row(self, metrics: StepMetrics) -> str:
        self._measure(metrics)
        speed = metrics.tokens_per_second
        mfu = metrics.mfu
        memory = metrics.memory_percent
        cells = self._cells(
            f"{metrics.loss:.4f}",
            f"{metrics.grad_norm:.4f}" if metrics.grad_norm < 1e5 else f"{metrics.grad_norm:.3e}",
            f"{metrics.lr:.2e}",
            "-" if speed is None else f"{speed:,.0f}",
            "-" if mfu is None else f"{mfu:.1%}",
            "-" if memory is None else f"{memory:.1f}%",
            self.time_left(metrics.step) or "-",
        )
        return f"{INDENT}{metrics.step:>{STEP_WIDTH},}{cells}"

    def time_left(self, step: int) -> str:
        """The time left; "" before a speed is known, and at the end."""
        seconds = (self.last_step - step) * self._seconds_per_step
        return duration(seconds) if seconds > 0 else ""

    def _measure(self, metrics: StepMetrics) -> None:
        now = time.monotonic()
        recent = self._recent
        if recent and metrics.step <= recent[-1][0]:  # the run has gone back
            recent.clear()
            self._first_row = 0
        self._first_row = self._first_row or metrics.step
        recent.append((metrics.step, now))
        middle = (self._first_row + metrics.step) / 2
        while len(recent) > 2 and (recent[1][0] <= middle or recent[1][1] < now - _RECENT_SECONDS):
            recent.popleft()
        step, then = recent[0]
        if step < metrics.step:
            self._seconds_per_step = (now - then) / (metrics.step - step)
        else:  # the first row
            self._seconds_per_step = metrics.step_seconds or 0.0

    def _cells(self, loss: str, norm: str, lr: str, speed: str, mfu: str, memory: str, left: str) -> str:
        of_device = (f"{mfu:>7}" if self._show_mfu else "") + (f"{memory:>8}" if self._show_memory else "")
        return f"{loss:>9}{norm:>11}{lr:>10}{speed:>11}{of_device}{left:>13}"
