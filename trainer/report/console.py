"""What a person sees while Keel works: plain lines anywhere, color and a live bar on a terminal, all of it in run.log.

Rank 0 prints everything; other ranks print only warnings and errors, prefixed with their rank. Every line is created as
plain text and only colored on its way to a terminal, so that a log file, a pipe and a screen show the same words.
Warnings from Python, torch and other libraries take the same way inside a `with console:` block. This file does not
import torch, and imports `rich` only on a terminal, because preparing data and reporting a config error must be quick.
"""

import logging
import re
import shlex
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from configs.files import AppendedFile
from configs.untrusted import printable
from trainer.guards.outages import Outages
from trainer.report.bars import Bar, Pace, PlainProgress, live_display
from trainer.report.metrics import StepMetrics, ValidationMetrics
from trainer.report.step_table import STEP_WIDTH, StepTable
from trainer.report.units import INDENT, WIDTH, duration, size

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress

Row = tuple[str, str]
"""A label and its text, which may have several lines."""

ReportProgress = Callable[..., None]
"""report(done, total=None, message=""): how far a piece of work is; total is None if unknown."""


class _Stream:
    """A standard stream that may be closed while training continues: a terminal, or a pipe whose reader has ended.

    What is then written to it is dropped, since run.log has it, too.
    """

    def __init__(self, current: Callable[[], TextIO], warn: Callable[[str], None]) -> None:
        """
        Args:
            current: returns the stream at the time of writing.
            warn: called once if the stream can't be written.
        """
        self._current = current
        self._warn = warn
        self.error: OSError | ValueError | None = None
        """The first of writing; None: all was written."""

    def write(self, text: str) -> int:
        """Write, if the stream is open."""
        self._attempt(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, if the stream is open."""
        self._attempt(lambda stream: stream.flush())

    def __getattr__(self, name: str) -> Any:
        """Return the stream's `isatty`, `encoding` and the like, for rich."""
        return getattr(self._current(), name)

    def _attempt(self, action: Callable[[TextIO], object]) -> None:
        try:
            action(self._current())
        except (OSError, ValueError) as error:  # ValueError: it was closed by this process
            if not self.error:
                self.error = error  # before warning: the warning may go to this very stream
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
        self._steps: StepTable | None = None
        self._steps_bar: Bar | None = None
        self._handler = _LoggingHandler(self)
        self._showwarning = warnings.showwarning

    def __enter__(self) -> Self:
        """Redirect the warnings of Python and of libraries to the console."""
        logging.getLogger().addHandler(self._handler)
        self._showwarning = warnings.showwarning
        warnings.showwarning = self._show_python_warning
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the warnings, end the live bar and close run.log."""
        logging.getLogger().removeHandler(self._handler)
        warnings.showwarning = self._showwarning
        if self._live:
            self._live.stop()
        if self._log:
            self.outages.give_up(self._log)
        self._live = self._log = None

    @property
    def output_error(self) -> OSError | ValueError | None:
        """Why a part of the standard output is lost; None: all of it was written."""
        return self._out.error

    def log_to(self, path: Path) -> None:
        """Append everything to run.log as well from now on; only on rank 0."""
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

    def warning_of_all(self, text: str) -> None:
        """Report once what all ranks have found alike."""
        if self.rank == 0:
            self.warning(text)

    def error(self, text: str) -> None:
        """Report, on any rank, why the work stops."""
        self._complain("error", text, "bold red")

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """Print a heading, and below it labels with their texts in two columns."""
        width = max((len(label) for label, _ in rows), default=0)
        self._title(title)
        for label, text in rows:
            beside = f"{INDENT}{label:<{width}}   "
            for line in text.split("\n"):
                for part in _wrapped(line, WIDTH - len(beside), between_parts=True):
                    self.line(beside + part)
                    beside = " " * len(beside)

    def commands(self, title: str, rows: Sequence[Row]) -> None:
        """Print a heading, and below it labels, each with a command line that can be pasted into a shell."""
        self._title(title)
        for label, command in rows:
            self.line(f"{INDENT}{label}")
            line = f"{INDENT} "
            for part in _flags_with_values(command):
                if len(f"{line} {part}") > WIDTH - len(" \\"):
                    self.line(f"{line} \\")
                    line = f"{2 * INDENT} "
                line += f" {part}"
            self.line(line)

    def _title(self, title: str) -> None:
        self.line()
        self.line(title, "bold")
        self.line()

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
        pace = Pace() if in_bytes else None
        bar = self._bar(title, number, pace) if self._rich else PlainProgress(self.line, title, number, pace)
        try:
            yield bar.report
        finally:
            bar.close()
        self.line(f"{title}: done in {duration(time.monotonic() - started)}", "dim")

    def _bar(self, title: str, number: Callable[[int], str] = "{:,}".format, pace: Pace | None = None) -> Bar:
        if self._live is None:
            assert self._rich is not None
            self._live = live_display(self._rich)
            self._live.start()
        return Bar(self._live, title, number, pace)

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
        self._steps = StepTable(last_step, show_mfu, show_memory)
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
        self.validation(metrics)
        self.advance(metrics.step)

    def validation(self, metrics: StepMetrics | ValidationMetrics) -> None:
        """Print the losses of a validation; nothing if there was none."""
        if metrics.validation_loss is None:
            return
        whole = (metrics.validation_loss, metrics.validation_perplexity, metrics.validation_bits_per_byte)
        self.note(f"validation {_losses(*whole)}")
        if metrics.validation_average_loss is not None:
            self.note(f"  average of the weights: loss {metrics.validation_average_loss:.4f}")
        by_source = metrics.validation_by_source or {}
        for name, own in by_source.items() if len(by_source) > 1 else ():
            self.note(f"  {name}: {_losses(own['loss'], own['perplexity'], own['bits_per_byte'])}")

    def note(self, text: str) -> None:
        """Print a remark between the rows: a checkpoint saved, a validation."""
        self.line(f"{INDENT}{'':>{STEP_WIDTH}}   {text}", "dim")

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
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
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


def _wrapped(line: str, width: int, between_parts: bool = False) -> list[str]:
    """A line as lines of at most `width` characters; long paths stay in one piece, so they can be copied.

    With `between_parts`, it is cut after commas and semicolons and before parentheses, so that "12.6 MiB" and "5 min
    20 s" stay together, unless a part is longer than a line.
    """
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    width = max(width, len(indent) + 20)  # a stranger's tensor may have a name longer than any line
    wrap = partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)
    if not between_parts:
        return wrap(line)
    tied = wrap(re.sub(r"(?<=[^,;]) (?=[^(])", "\xa0", line))
    return list(chain.from_iterable(_wrapped(each.replace("\xa0", " "), width) for each in tied))


def _flags_with_values(command: str) -> list[str]:
    """The words of a command line, quoted, each flag together with its value."""
    parts: list[str] = []
    for word in shlex.split(command):
        is_value = bool(parts) and parts[-1].startswith("--") and " " not in parts[-1] and not word.startswith("--")
        if is_value:
            parts[-1] += f" {shlex.quote(word)}"
        else:
            parts.append(shlex.quote(word))
    return parts


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

    width = max(WIDTH, rich.width)
    lines = [part for line in text.split("\n") for part in _wrapped(line, width)]
    rich.print(Text("\n".join(lines), style=style), soft_wrap=True)
