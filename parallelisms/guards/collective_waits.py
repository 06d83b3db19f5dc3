"""How long this rank is in collectives: it enters one, and the last of the ranks to do so lets all go on.

A rank that is late keeps the others waiting and waits for nobody. So of ranks that do the same work, the one that is in
collectives for the shortest time is the slow one, whatever slows it.
"""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from parallelisms.torch_internals import listening, prepare_listening, tensors_of, world_name

_MESSAGES = ("send", "recv_")


class CollectiveWaits:
    """Of the steps that this rank is told to measure.

    On a CPU a collective is waited for where it is issued. On a GPU events before and after it tell how long it was on
    its stream, and are read when they are over, so that the host waits for nothing; those that run beside the stream
    that issues them, as tensor parallelism's do, are not seen. Messages, as between the stages of a pipeline, are left
    out: two ranks wait for each other's in an order of their own.
    """

    def __init__(self, groups: Collection[dist.ProcessGroup], device: torch.device) -> None:
        """
        Args:
            groups: those that steps compute with, beside the group of all ranks; a checkpoint's writer has its own.
            device: what the ranks compute on.
        """
        self._watched = {str(group.group_name) for group in groups} | {world_name()}
        self._seconds, self._began = 0.0, 0.0
        self._event: torch.cuda.Event | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.call_seconds = 2e-4 if device.type == "cpu" else 3e-5
        """What listening to a collective costs a rank; on a CPU measured, with both cores busy."""
        self.calls = 0
        """Collectives measured so far."""

    def prepare(self) -> None:
        """Make ready; to be called before other threads issue collectives."""
        prepare_listening()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around a step."""
        with listening(self._before, self._after):
            yield

    def take(self) -> float:
        """Seconds in collectives that were measured since the last call; on a GPU, of those that are over."""
        seconds, self._seconds = self._seconds, 0.0
        events, self._events = self._events, []
        for begin, end in events:
            if end.query():
                seconds += begin.elapsed_time(end) / 1000
            else:
                self._events.append((begin, end))
        return seconds

    def _counts(self, name: str, group: dist.ProcessGroup) -> bool:
        return name not in _MESSAGES and group.size() > 1 and str(group.group_name) in self._watched

    def _before(self, name: str, group: dist.ProcessGroup, arguments: tuple[Any, ...]) -> None:
        if not self._counts(name, group):  # another thread's, perhaps
            return
        tensors = tensors_of(arguments)
        self._event = None
        if tensors and tensors[0].is_cuda:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._began = time.perf_counter()

    def _after(self, name: str, group: dist.ProcessGroup, _arguments: tuple[Any, ...], work: dist.Work) -> None:
        if not self._counts(name, group):
            return
        self.calls += 1
        if self._event is None:
            work.wait()
            self._seconds += time.perf_counter() - self._began
        else:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._events.append((self._event, end))
