"""Runs the sinks in one thread, so that none can end or slow a run: W&B waits for a server when it begins and ends.

Before a save, training waits until the sinks have every record, so that they miss no step that a resume will not
repeat; but at most `PATIENCE_SECONDS`, and not again until they have caught up. The first fault of each is reported.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from trainer.report.sinks.sink import Record, Sink, SinkRun

PATIENCE_SECONDS = 5.0
"""The longest wait before a save."""
CLOSING_SECONDS = 10.0
"""The longest wait at the end: a third of job.grace_seconds' default."""

MakeSink = Callable[[SinkRun], Sink]


class Sinks:
    """All sinks of a run."""

    def __init__(self, makers: dict[str, MakeSink], warn: Callable[[str], None]) -> None:
        """`makers`: by a name for people, what opens the sink; `warn` is called with one line for them."""
        self._makers = makers
        self._warn = warn
        self._names = ", ".join(makers)
        self._failed: set[str] = set()
        self._queue: SimpleQueue[Record | threading.Event | None] = SimpleQueue()
        """Records; an event to set when it is reached; None at the end."""
        self._reached = threading.Event()
        self._reached.set()
        self._is_closed = False

    def open(self, run: SinkRun) -> None:
        """Open all of them."""
        self._thread = threading.Thread(target=self._work, args=(run,), name="sinks", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Hand a record to all of them; never waits."""
        self._queue.put(record)

    def flush(self) -> None:
        """Wait, within limits, until all records are written; does nothing once they are closed."""
        is_late = not self._reached.is_set()
        if self._is_closed or is_late:
            return
        self._reached = threading.Event()
        self._queue.put(self._reached)
        if not self._reached.wait(PATIENCE_SECONDS):
            self._warn(f"{self._names}: a logger is slow, and records wait for it; training continues")

    def close(self) -> None:
        """Close all of them once they have all records, or leave them when it takes too long."""
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(CLOSING_SECONDS)
        if self._thread.is_alive():
            self._warn(f"{self._names}: a logger did not end in time; metrics.jsonl has all records")

    def _work(self, run: SinkRun) -> None:
        sinks: dict[str, Sink] = {}
        for name, make in self._makers.items():
            try:
                sinks[name] = make(run)
            except BaseException as error:  # some packages raise SystemExit
                self._warn(f"{name} can't be opened: {_reason(error)}; training continues without it")
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            for name, sink in sinks.items():
                self._attempt(name, sink.write, item)
        for name, sink in sinks.items():
            self._attempt(name, sink.close)

    def _attempt(self, name: str, action: Callable[..., None], *arguments: Record) -> None:
        try:
            action(*arguments)
        except BaseException as error:
            if name not in self._failed:
                self._failed.add(name)
                self._warn(f"{name} failed: {_reason(error)}; training continues and retries it")


def _reason(error: BaseException) -> str:
    first, *_ = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {first}"
