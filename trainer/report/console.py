"""What a person sees while Keel works: plain lines anywhere, color and a live bar on a terminal, all of it in run.log.

Rank 0 prints everything; other ranks print only warnings and errors, prefixed with their rank. Every line is created as
plain text and only colored on its way to a terminal, so that a log file, a pipe and a screen show the same words.
Warnings from Python, torch and other libraries take the same way inside a `with console:` block. This file does not
import torch, and imports `rich` only on a terminal, because preparing data and reporting a config error must be quick.
"""

import argparse
import logging
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from configs.files import AppendedFile
from configs.untrusted import printable
from trainer.guards.outages import Outages
from trainer.report.metrics import StepMetrics

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress

Row = tuple[str, str]
"""A label and its text, which may have several lines."""

ReportProgress = Callable[..., None]
"""report(done, total=None, message=""): how far a piece of work is; total is None if unknown."""

_PLAIN_PROGRESS_SECONDS = 10.0  # between two lines about the same piece of work if there is no live bar
_PACE_SECONDS = 1.0  # before a speed is worth showing
_ROWS_PER_HEADER = 20  # so that a header stays in view on a terminal of usual height
_INDENT = "  "


# --------------------------------------------------------------------------- numbers for people


def duration(seconds: float) -> str:
    """Format seconds in the two units that matter: "4.1 s", "2 min 31 s", "5 h 04 min", "3 d 02 h"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def count(number: float) -> str:
    """Format a number to three digits with the field's suffix: 950, "3.34 M", "1.24 B", "15.6 T"."""
    for factor, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e4, " K")):
        if number >= factor:
            return _three_digits(number / (1e3 if suffix == " K" else factor)) + suffix
    return f"{number:,.0f}"


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size(n_bytes: float) -> str:
    """Format bytes to three digits: "512 MiB", "25.6 GiB"."""
    for factor, suffix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if n_bytes >= factor:
            return f"{_three_digits(n_bytes / factor)} {suffix}"
    return f"{_three_digits(n_bytes / 2**10)} KiB"


def parse_size(text: str) -> int:
    """Parse "500MB", "1.5 GiB" or "123" into bytes.

    Raises:
        argparse.ArgumentTypeError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.upper())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 500MB or 5GB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _three_digits(number: float) -> str:
    return f"{number:.{max(0, 2 - int(math.log10(max(number, 1))))}f}"


# --------------------------------------------------------------------------- the console


class _Stream:
    """A standard stream that may be closed while training goes on: a terminal, or a pipe whose reader has ended.

    What is then written to it is dropped, since run.log has it, too.
    """

    def __init__(self, current: Callable[[], TextIO], warn: Callable[[str], None]) -> None:
        """
        Args:
            current: returns the stream at the time of writing.
            warn: called once if the stream can't be written.
        """
        self._current, self._warn = current, warn
        self._is_lost = False

    def write(self, text: str) -> int:
        """Write, if the stream is open."""
        self._attempt(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, if the stream is open."""
        self._attempt(lambda stream: stream.flush())

    def __getattr__(self, name: str) -> Any:
        """For rich: `isatty`, `encoding` and the like."""
        return getattr(self._current(), name)

    def _attempt(self, action: Callable[[TextIO], object]) -> None:
        try:
            action(self._current())
        except (OSError, ValueError) as error:  # ValueError: it was closed by this process
            if not self._is_lost:
                self._is_lost = True  # before warning: the warning may go to this very stream
                self._warn(getattr(error, "strerror", None) or str(error))


class Console:
    """The only way to the screen and to run.log; every rank has one."""

    def __init__(self, rank: int = 0, out: TextIO | None = None, err: TextIO | None = None) -> None:
        """
        Args:
            rank: 0 prints everything, the others only warnings and errors.
            out, err: default: standard output and error at the time of writing.
        """
        self.rank = rank
        self._out = _Stream(lambda: out or sys.stdout, lambda reason: self._say_lost("output", reason))
        self._err = _Stream(lambda: err or sys.stderr, lambda reason: self._say_lost("error", reason))
        self._log: AppendedFile | None = None
        self.outages = Outages(self.warning, self.line)
        """The files of the run that currently can't be written."""
        self._rich: RichConsole | None = _rich_console(self._out) if rank == 0 else None
        self._live: Progress | None = None
        self._steps: _StepTable | None = None
        self._steps_bar: _Bar | None = None
        self._handler = _LoggingHandler(self)
        self._showwarning = warnings.showwarning

    def __enter__(self) -> Self:
        """Redirect the warnings of Python and of libraries to the console."""
        logging.getLogger().addHandler(self._handler)
        self._showwarning, warnings.showwarning = warnings.showwarning, self._show_python_warning
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Restore the warnings, end the live bar and close run.log."""
        logging.getLogger().removeHandler(self._handler)
        warnings.showwarning = self._showwarning
        if self._live:
            self._live.stop()
        if self._log:
            self.outages.give_up(self._log)
        self._live = self._log = None

    def log_to(self, path: Path) -> None:
        """From now on, append everything to run.log as well; only on rank 0."""
        if self.rank == 0:
            self._log = AppendedFile(path)

    def line(self, text: str = "", style: str = "") -> None:
        """Print one or more lines on rank 0. `style` is rich's ("bold", "dim"), and used only on a terminal."""
        if self.rank != 0:
            return
        text = printable(text)
        self._to_log(text)
        if self._rich:
            _print_styled(self._rich, text, style)
        else:
            self._print(text, self._out)

    def warning(self, text: str) -> None:
        """Report, on any rank, a problem that does not stop the work."""
        self._complain("warning", text, "yellow")

    def error(self, text: str) -> None:
        """Report, on any rank, why the work stops."""
        self._complain("error", text, "bold red")

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """Print a heading, and below it labels with their texts in two columns."""
        width = max((len(label) for label, _ in rows), default=0)
        self.line()
        self.line(title, "bold")
        self.line()
        for label, text in rows:
            first, *others = text.split("\n")
            self.line(f"{_INDENT}{label:<{width}}   {first}")
            for other in others:
                self.line(f"{_INDENT}{'':<{width}}   {other}")

    # ----------------------------------------------------------------------- progress

    @contextmanager
    def progress(self, title: str, in_bytes: bool = False) -> Iterator[ReportProgress]:
        """Show how far a piece of work is: a live bar on a terminal, otherwise an occasional line.

        Progress is counted in items, or in bytes with `in_bytes`:

            with console.progress("Encoding text") as report:
                for done, file in enumerate(files):
                    report(done, len(files), file.name)
        """
        started = time.monotonic()
        number = size if in_bytes else "{:,}".format
        pace = _Pace() if in_bytes else None
        bar = self._bar(title, number, pace) if self._rich else _PlainProgress(self.line, title, number, pace)
        try:
            yield bar.report
        finally:
            bar.close()
        self.line(f"{title}: done in {duration(time.monotonic() - started)}", "dim")

    def _bar(self, title: str, number: Callable[[int], str] = "{:,}".format, pace: "_Pace | None" = None) -> "_Bar":
        if self._live is None:
            assert self._rich is not None
            self._live = _live_display(self._rich)
            self._live.start()
        return _Bar(self._live, title, number, pace)

    # ----------------------------------------------------------------------- training

    @contextmanager
    def training(self, first_step: int, last_step: int, show_mfu: bool, show_memory: bool = False) -> Iterator[None]:
        """Surround the training loop: `step` prints a row of a table, `advance` moves the bar.

        Args:
            first_step: steps already completed when the loop begins.
            last_step: the step at which it ends.
            show_mfu: whether the device's peak is known.
            show_memory: whether its allocator tells how much it has reserved.
        """
        self._steps = _StepTable(last_step, show_mfu, show_memory)
        self._steps_bar = self._bar("Training") if self._rich else None
        self.advance(first_step)
        try:
            yield
        finally:
            if self._steps_bar:
                self._steps_bar.close()
            self._steps = self._steps_bar = None

    def advance(self, step: int) -> None:
        """Move the live bar to a step that is not logged; costs almost nothing, and nothing without a terminal."""
        if self._steps and self._steps_bar:
            left = self._steps.time_left(step)
            self._steps_bar.report(step, self._steps.last_step, left and f"{left} left")

    def step(self, metrics: StepMetrics) -> None:
        """Print a logged step: one row, and below it the validation loss if the step was validated."""
        assert self._steps is not None, "outside `with console.training(...)`"
        header = self._steps.header_if_due()
        if header:
            self.line(header, "dim")
        self.line(self._steps.row(metrics))
        if metrics.validation_loss is not None:
            whole = (metrics.validation_loss, metrics.validation_perplexity, metrics.validation_bits_per_byte)
            self.note(f"validation {_losses(*whole)}")
            by_source = metrics.validation_by_source or {}
            for name, own in by_source.items() if len(by_source) > 1 else ():
                self.note(f"  {name}: {_losses(own['loss'], own['perplexity'], own['bits_per_byte'])}")
            for number, sample in enumerate(metrics.samples or [], 1):
                label = f"sample {number}"
                for line in (sample["prompt"] + sample["text"]).split("\n"):
                    self.note(f"{label} | {line}")
                    label = " " * len(label)
        self.advance(metrics.step)

    def note(self, text: str) -> None:
        """Print a remark between the rows: a checkpoint saved, a validation."""
        self.line(f"{_INDENT}{'':>{_STEP_WIDTH}}   {text}", "dim")

    # ----------------------------------------------------------------------- inside

    def _to_log(self, text: str) -> None:
        if self._log:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            self._log.write("".join(f"{stamp}  {line}".rstrip() + "\n" for line in text.split("\n")).encode())
            self.outages.flush(self._log)

    def _complain(self, kind: str, text: str, style: str) -> None:
        text = printable(f"{kind}: {text}" if self.rank == 0 else f"[rank {self.rank}] {kind}: {text}")
        self._to_log(text)
        if self._rich and self._err.isatty():
            _print_styled(self._rich, text, style)  # through the live display, which would otherwise overwrite it
        else:
            self._print(text, self._err)

    def _print(self, text: str, stream: _Stream) -> None:
        stream.write(f"{text}\n")
        stream.flush()

    def _say_lost(self, which: str, reason: str) -> None:
        self._to_log(f"warning: standard {which} can't be written ({reason}); everything is in this file")

    def _show_python_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        self.warning(f"{message} ({category.__name__}, {filename}:{lineno})")


class _LoggingHandler(logging.Handler):
    """Passes warnings of Python's logging to the console."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        say = self._console.error if record.levelno >= logging.ERROR else self._console.warning
        say(self.format(record))


def _losses(loss: float | None, perplexity: float | None, bits_per_byte: float | None) -> str:
    bits = "" if bits_per_byte is None else f", {bits_per_byte:.4f} bits per byte"
    return f"loss {loss:.4f}{bits}" + ("" if perplexity is None else f", perplexity {perplexity:,.2f}")


# --------------------------------------------------------------------------- rows of the training table

_STEP_WIDTH = 9


class _StepTable:
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
        return ("\n" if self._rows == 1 else "") + f"{_INDENT}{'step':>{_STEP_WIDTH}}{cells}"

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
        return f"{_INDENT}{metrics.step:>{_STEP_WIDTH},}{cells}"

    def time_left(self, step: int) -> str:
        """The time left for training alone; "" before a speed is known, and at the end."""
        seconds = (self.last_step - step) * (self._step_seconds or 0)
        return duration(seconds) if seconds > 0 else ""

    def _cells(self, loss: str, norm: str, lr: str, speed: str, mfu: str, memory: str, left: str) -> str:
        of_device = (f"{mfu:>8}" if self._show_mfu else "") + (f"{memory:>9}" if self._show_memory else "")
        return f"{loss:>10}{norm:>12}{lr:>11}{speed:>13}{of_device}{left:>14}"


# --------------------------------------------------------------------------- progress without a terminal


class _Pace:
    """The speed of work that is measured in bytes, and the time left."""

    def __init__(self) -> None:
        self._total: int | None = None
        self._begun, self._done_before = time.monotonic(), 0

    def start(self, done: int, total: int | None) -> None:
        """Begin at the first report of some work; what was done before does not count for the speed."""
        if total != self._total:
            self._total, self._begun, self._done_before = total, time.monotonic(), done

    def at(self, done: int, total: int, separator: str) -> str:
        """Speed and time left, each after the separator; "" in the first second."""
        seconds = time.monotonic() - self._begun
        speed = (done - self._done_before) / max(seconds, 1e-9)
        if seconds < _PACE_SECONDS or speed <= 0:
            return ""
        return f"{separator}{size(speed)}/s{separator}{duration((total - done) / speed)} left"


class _PlainProgress:
    """Prints a line at the start, and further lines only if the work takes long."""

    def __init__(
        self, say: Callable[[str], None], title: str, number: Callable[[int], str], pace: _Pace | None
    ) -> None:
        self._say, self._title, self._number, self._pace = say, title, number, pace
        self._said_at = time.monotonic()
        say(f"{title} ...")

    def report(self, done: int, total: int | None = None, message: str = "") -> None:
        now = time.monotonic()
        if self._pace:
            self._pace.start(done, total)
        if now - self._said_at < _PLAIN_PROGRESS_SECONDS:
            return
        self._said_at = now
        share = self._number(done)
        if total:
            share = f"{done / total:.0%}, {share} of {self._number(total)}"
            share += self._pace.at(done, total, ", ") if self._pace else ""
        self._say(f"{self._title}: {share}" + (f", {message}" if message else ""))

    def close(self) -> None:
        """Do nothing."""


# --------------------------------------------------------------------------- rich, on a terminal only


def _rich_console(out: _Stream) -> "RichConsole | None":
    """Rich's console if `out` is a terminal that can move its cursor, otherwise None."""
    if not out.isatty():
        return None
    from rich.console import Console as RichConsole

    rich = RichConsole(file=cast(TextIO, out), highlight=False, markup=False, emoji=False)
    return None if rich.is_dumb_terminal else rich


def _print_styled(rich: "RichConsole", text: str, style: str) -> None:
    from rich.text import Text

    rich.print(Text(text, style=style), soft_wrap=True)  # long paths stay in one piece, so they can be copied


def _live_display(rich: "RichConsole") -> "Progress":
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn(_INDENT + "{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[numbers]}"),
        TextColumn("{task.fields[message]}", style="dim", markup=False),
        console=rich,
        transient=True,
    )


class _Bar:
    """One bar of the live display."""

    def __init__(self, live: "Progress", title: str, number: Callable[[int], str], pace: _Pace | None) -> None:
        self._live, self._number, self._pace = live, number, pace
        self._task: Any = live.add_task(printable(title), total=None, numbers="", message="")

    def report(self, done: int, total: int | None = None, message: str = "") -> None:
        numbers = f"{self._number(done)} / {self._number(total)}" if total else self._number(done)
        if self._pace and total:
            self._pace.start(done, total)
            numbers += self._pace.at(done, total, "  ")
        self._live.update(self._task, completed=done, total=total or None, numbers=numbers, message=printable(message))

    def close(self) -> None:
        self._live.remove_task(self._task)
        self._live.refresh()  # otherwise the next printed line would show the bar once more
