"""How far a piece of work is: a live bar on a terminal, otherwise an occasional line."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from configs.untrusted import printable
from trainer.report.units import INDENT, duration, size

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress

_PLAIN_PROGRESS_SECONDS = 10.0  # between two lines about the same piece of work if there is no live bar
_PACE_SECONDS = 1.0  # before a speed is worth showing


class Pace:
    """The speed of work that is measured in bytes, and the time left."""

    def __init__(self) -> None:
        self._total: int | None = None
        self._begun = time.monotonic()
        self._done_before = 0

    def start(self, done: int, total: int | None) -> None:
        """Begin at the first report of some work; what was done before does not count for the speed."""
        if total != self._total:
            self._total = total
            self._begun = time.monotonic()
            self._done_before = done

    def at(self, done: int, total: int, separator: str) -> str:
        """Speed and time left, each after the separator; "" in the first second."""
        seconds = time.monotonic() - self._begun
        speed = (done - self._done_before) / max(seconds, 1e-9)
        if seconds < _PACE_SECONDS or speed <= 0:
            return ""
        return f"{separator}{size(speed)}/s{separator}{duration((total - done) / speed)} left"


class PlainProgress:
    """Prints a line at the start, and further lines only if the work takes long."""

    def __init__(self, say: Callable[[str], None], title: str, number: Callable[[int], str], pace: Pace | None) -> None:
        self._say = say
        self._title = title
        self._number = number
        self._pace = pace
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


def live_display(rich: "RichConsole") -> "Progress":
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn(INDENT + "{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[numbers]}"),
        TextColumn("{task.fields[message]}", style="dim", markup=False),
        console=rich,
        transient=True,
    )


class Bar:
    """One bar of the live display."""

    def __init__(self, live: "Progress", title: str, number: Callable[[int], str], pace: Pace | None) -> None:
        self._live = live
        self._number = number
        self._pace = pace
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
