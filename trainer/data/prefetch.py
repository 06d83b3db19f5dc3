"""One background thread that keeps a few items ready, so that the training loop never waits for the disk."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_END = object()
_JOIN_SECONDS = 5.0


class Prefetcher(Generic[T]):
    """Iterates over `make_items()`, which a thread runs up to `depth` items ahead.

    An exception in the thread is raised here, in place of the item.
    """

    def __init__(self, make_items: Callable[[], Iterator[T]], depth: int) -> None:
        """Start the thread; the iterator is created and advanced only in it."""
        self._queue: queue.Queue = queue.Queue(maxsize=depth)
        self._closing = threading.Event()
        # A daemon thread, because an abandoned loader must not keep the process alive.
        self._thread = threading.Thread(target=self._run, args=(make_items,), name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next item; raises StopIteration after the last or after `close`, or else the thread's exception."""
        if self._closing.is_set():
            raise StopIteration
        item, error = self._queue.get()
        if error is not None:
            self._closing.set()
            raise error
        if item is _END:
            self._closing.set()
            raise StopIteration
        return item

    def close(self) -> None:
        """End the thread. If it is stuck in a read for some seconds, it is left to die with the process."""
        self._closing.set()
        while True:  # make room for the one item that the thread may be waiting to put
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        self._thread.join(_JOIN_SECONDS)

    def _run(self, make_items: Callable[[], Iterator[T]]) -> None:
        try:
            for item in make_items():
                self._queue.put((item, None))
                if self._closing.is_set():
                    return
            self._queue.put((_END, None))
        except BaseException as error:  # of any kind: the consumer raises it
            self._queue.put((None, error))
