"""Time by kinds of work, of which one is done at a time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Generic, TypeVar

Work = TypeVar("Work", bound=Enum)


class Stopwatch(Generic[Work]):
    """Counts each second since its creation toward one kind of work."""

    def __init__(self, first: Work, clock: Callable[[], float] = time.perf_counter) -> None:
        """`first`: the kind of what is outside of all contexts."""
        self._clock = clock
        self._last = clock()
        self._open = [first]
        self._seconds = dict.fromkeys(type(first), 0.0)

    @contextmanager
    def measure(self, work: Work) -> Iterator[None]:
        """Count the time inside this context toward `work`; a nested context's time counts only toward its own."""
        self._book()
        self._open.append(work)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def _book(self) -> None:
        now = self._clock()
        self._seconds[self._open[-1]] += now - self._last
        self._last = now
