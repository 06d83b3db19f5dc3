"""How long this rank waits in collectives, which complete only when the last rank has entered.

A late rank keeps the others waiting and waits for none itself. So among ranks that do the same work, the one that
spends the least time in collectives is the slow one, whatever slows it down.
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
    """Measures the time in collectives over the steps that it is asked to measure.

    On a CPU, a collective is waited for where it is issued. On a GPU, events before and after it record how long it
    was on its stream. They are read once they have completed, so that the host does not wait. Collectives on a stream
    other than the issuing one, such as tensor parallelism's, are not seen. Point-to-point messages, such as those
    between pipeline stages, are left out: there, pairs of ranks wait for each other in varying order.
    """

    def __init__(self, groups: Collection[dist.ProcessGroup], device: torch.device) -> None:
        """
        Args:
            groups: the groups that steps compute with, besides the group of all ranks. Others, such as a checkpoint
                writer's, are not measured.
            device: the device on which the ranks compute.
        """
        self._watched = {str(group.group_name) for group in groups} | {world_name()}
        self._seconds = 0.0
        self._began = 0.0
        self._event: torch.cuda.Event | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.call_seconds = 2e-4 if device.type == "cpu" else 3e-5
        """Estimated cost of listening to one collective, in seconds; on a CPU measured, with both cores busy."""
        self.calls = 0
        """Collectives measured so far."""

    def prepare(self) -> None:
        """Install the listener; call it before other threads issue collectives."""
        prepare_listening()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the collectives issued inside this context."""
        with listening(self._before, self._after):
            yield

    def take(self) -> float:
        """Seconds in collectives measured since the last call; on a GPU, only those that have completed."""
        seconds = self._seconds
        self._seconds = 0.0
        events = self._events
        self._events = []
        for begin, end in events:
            if end.query():
                seconds += begin.elapsed_time(end) / 1000
            else:
                self._events.append((begin, end))
        return seconds

    def _counts(self, name: str, group: dist.ProcessGroup) -> bool:
        return name not in _MESSAGES and group.size() > 1 and str(group.group_name) in self._watched

    def _before(self, name: str, group: dist.ProcessGroup, arguments: tuple[Any, ...]) -> None:
        if not self._counts(name, group):  # for example another thread's
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
