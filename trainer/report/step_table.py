"""The table of the logged steps, with the time left."""

from trainer.report.metrics import StepMetrics
from trainer.report.units import INDENT, duration

_ROWS_PER_HEADER = 20  # so that a header stays in view on a terminal of usual height
STEP_WIDTH = 9
"""Characters of the first column."""


class StepTable:
    """Formats the logged steps in columns, and estimates the time left from the speed of the last one."""

    def __init__(self, last_step: int, show_mfu: bool, show_memory: bool) -> None:
        self.last_step, self._show_mfu, self._show_memory = last_step, show_mfu, show_memory
        self._rows = 0
        self._step_seconds: float | None = None

    def header_if_due(self) -> str:
        """The header, before the first row and again after every _ROWS_PER_HEADER rows, otherwise ""."""
        self._rows += 1
        if self._rows % _ROWS_PER_HEADER != 1:
            return ""
        cells = self._cells("loss", "grad norm", "lr", "tokens/s", "mfu", "memory", "time left")
        return ("\n" if self._rows == 1 else "") + f"{INDENT}{'step':>{STEP_WIDTH}}{cells}"

    def row(self, metrics: StepMetrics) -> str:
        self._step_seconds = metrics.step_seconds or self._step_seconds
        speed, mfu, memory = metrics.tokens_per_second, metrics.mfu, metrics.memory_percent
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
        """The time left for training alone; "" before a speed is known, and at the end."""
        seconds = (self.last_step - step) * (self._step_seconds or 0)
        return duration(seconds) if seconds > 0 else ""

    def _cells(self, loss: str, norm: str, lr: str, speed: str, mfu: str, memory: str, left: str) -> str:
        of_device = (f"{mfu:>8}" if self._show_mfu else "") + (f"{memory:>9}" if self._show_memory else "")
        return f"{loss:>10}{norm:>12}{lr:>11}{speed:>13}{of_device}{left:>14}"
