"""Runs each sink in a thread of its own, so that none can end or slow a run.

A record waits in a queue for its sink. Before a save, training waits until the queues are empty, so that a sink misses
no step that a resume will not repeat; but at most `PATIENCE_SECONDS`, and not again for a sink that was slow until it
has caught up. The first fault of a sink is said at once, their number at the end.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from trainer.report.sinks.sink import Record, Sink, SinkRun

PATIENCE_SECONDS = 5.0
"""The longest wait for all sinks together, before a save."""
CLOSING_SECONDS = 10.0
"""The longest wait for all sinks together, at the end: a third of job.grace_seconds' default."""
MAX_WAITING = 10_000
"""Records that may wait for a sink; further ones are lost to it."""

MakeSink = Callable[[SinkRun], Sink]


class Worker:
    """A sink in its thread."""

    def __init__(self, name: str, make: MakeSink, run: SinkRun, warn: Callable[[str], None]) -> None:
        """Open the sink in a new thread; `name` is for people, and `warn` is called with one line for them."""
        self.name, self._make, self._run, self._warn = name, make, run, warn
        self._records: deque[Record] = deque()
        self._changed = threading.Condition()
        self._is_busy, self._is_closing = True, False
        self._is_late = False
        """Whether training has waited for it in vain since it last had nothing to do."""
        self._lost = 0
        self._faults = 0
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Queue a record; never waits."""
        with self._changed:
            if not self._thread.is_alive():
                return
            if len(self._records) < MAX_WAITING:
                self._records.append(record)
                self._changed.notify_all()
                return
            self._lost += 1
        if self._lost == 1:
            self._warn(f"{self.name} is too slow: {MAX_WAITING:,} records wait for it; further ones are lost to it")

    def wait(self, deadline: float) -> None:
        """Wait until all records are written, until `deadline` (of time.monotonic) at most; not for a late sink."""
        with self._changed:
            while (self._is_busy or self._records) and not self._is_late:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
                self._is_late = (self._is_busy or bool(self._records)) and time.monotonic() >= deadline
                if self._is_late:
                    self._warn(f"{self.name} is slow: {len(self._records)} records wait for it; TRAINING GOES ON")

    def close(self, deadline: float) -> None:
        """Close the sink once it has all records, or leave it at the deadline."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(
                f"{self.name} did not end in time: {len(self._records)} records wait for it; metrics.jsonl has all"
            )

    def _work(self) -> None:
        try:
            sink = self._make(self._run)
        except BaseException as error:  # some packages raise SystemExit
            self._warn(f"{self.name} can't be opened: {_reason(error)}; TRAINING GOES ON without it")
            sink = None
        while sink and (record := self._next()) is not None:
            self._attempt(partial(sink.write, record))
        with self._changed:
            self._is_busy = False
            self._records.clear()
            self._changed.notify_all()
        if sink:
            self._attempt(sink.close)
        if self._faults > 1 or self._lost:
            self._warn(f"{self.name} failed {self._faults} times; {self._lost} records were lost to it")

    def _next(self) -> Record | None:
        """The next record; None at the end."""
        with self._changed:
            while not self._records:
                self._is_busy = self._is_late = False
                self._changed.notify_all()
                if self._is_closing:
                    return None
                self._changed.wait()
            self._is_busy = True
            return self._records.popleft()

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            self._faults += 1
            if self._faults == 1:
                self._warn(f"{self.name} failed: {_reason(error)}; TRAINING GOES ON, and tries it again")


class Sinks:
    """All sinks of a run."""

    def __init__(self, makers: dict[str, MakeSink], warn: Callable[[str], None]) -> None:
        """`makers`: by a name for people, what opens the sink."""
        self._makers, self._warn = makers, warn
        self._workers: Sequence[Worker] = ()

    def open(self, run: SinkRun) -> None:
        """Open all of them."""
        self._workers = [Worker(name, make, run, self._warn) for name, make in self._makers.items()]

    def put(self, record: Record) -> None:
        """Hand a record to all of them."""
        for worker in self._workers:
            worker.put(record)

    def flush(self) -> None:
        """Wait, within limits, until all records are written."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        for worker in self._workers:
            worker.wait(deadline)

    def close(self) -> None:
        """Close all of them."""
        deadline = time.monotonic() + CLOSING_SECONDS
        for worker in self._workers:
            worker.close(deadline)


def _reason(error: BaseException) -> str:
    first, *_ = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {first}"
