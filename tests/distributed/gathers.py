"""FSDP all-gathers on a CPU that take longer, as on a slow network, and are counted.

There FSDP waits for each all-gather. Here they return at once instead, with a handle on which the computation waits
when it needs the parameters. The handles form queues like a GPU's streams, so that overlap, and the cost of one queue
or of one per process group, can be measured with gloo. Values stay the same: only waiting differs, never what is
gathered or the order of issue.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from parallelisms.torch_internals import (
    DefaultAllGather,
    fsdp_modules,
    gathered_over,
)

Seconds = Callable[[str], float]
"""Extra seconds of an all-gather, by the dimension of the mesh over which its group is sharded."""


@dataclass
class GatherCounts:
    """Statistics of a model's all-gathers on a CPU."""

    gathers: int = 0
    waits: int = 0
    """All-gathers that the computation had to wait for."""
    waits_behind_others: int = 0
    """Waits for an all-gather that was queued behind another process group's."""


def at_once(_dimension: str) -> float:
    """No delay."""
    return 0.0


def count_gathers(
    stages: Iterable[nn.Module], streams: Literal["shared", "per_group"], seconds: Seconds = at_once
) -> GatherCounts:
    """Queue, delay and count the all-gathers on a CPU of models whose parameters are in memory.

    Args:
        stages: the models; each has queues of its own.
        streams: like `comm.streams`.
        seconds: the delays.

    Returns:
        The counts, which are updated as the models compute.
    """
    counts = GatherCounts()
    for stage in stages:
        if isinstance(stage, FSDPModule):
            _queue_on_cpu(stage, streams, seconds, counts)
    return counts


class _Queue:
    """The all-gathers issued into one queue; only the last one has to be known."""

    def __init__(self, counts: GatherCounts) -> None:
        self.counts = counts
        self.last: _Gather | None = None


class _Gather(dist.Work):
    """An all-gather in a queue. A subclass of `dist.Work`, since FSDP waits for nothing else."""

    def __init__(self, work: dist.Work, over: dist.ProcessGroup, queue: _Queue, seconds: float) -> None:
        """Enqueue an all-gather that was just issued over a process group and takes `seconds` longer than `work`."""
        super().__init__()
        self._work: dist.Work | None = work  # dropped on completion, since it holds the gathered buffer
        self._over = over
        self._counts = queue.counts
        self._before = queue.last if queue.last and not queue.last.is_over() else None
        self._was_behind_others = self._before is not None and self._before._over is not over
        start = time.monotonic()
        self._ready_at: float = max(start, self._before._ready_at if self._before else start) + seconds
        self._counts.gathers += 1
        queue.last = self

    def is_over(self) -> bool:
        """Whether its data and the data of all those before it in the queue have arrived."""
        if self._before is not None and self._before.is_over():
            self._before = None
        is_here = self._work is None or self._work.is_completed()
        return self._before is None and is_here and time.monotonic() >= self._ready_at

    def wait(self, *_: Any) -> bool:
        """Wait for this all-gather, and so for all before it; called by the computation that needs it."""
        if not self.is_over():
            self._counts.waits += 1
            self._counts.waits_behind_others += self._was_behind_others
        self._finish()
        return True

    def _finish(self) -> None:
        if self._before is not None:
            self._before._finish()
            self._before = None
        if self._work is not None:
            self._work.wait()
            self._work = None
        time.sleep(max(0.0, self._ready_at - time.monotonic()))


class _QueuedAllGather(DefaultAllGather):
    """FSDP's all-gather, issued into a queue."""

    def __init__(self, queue: _Queue, seconds: float) -> None:
        self._queue = queue
        self._seconds = seconds

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work = super().__call__(output_tensor, input_tensor, group, async_op=True)
        assert work is not None
        gather = _Gather(work, group, self._queue, self._seconds)
        if async_op:
            return gather
        gather.wait()
        return None


def _queue_on_cpu(root: FSDPModule, streams: str, seconds: Seconds, counts: GatherCounts) -> None:
    root._set_unshard_async_op(True)  # so that gathers return handles
    shared = _Queue(counts)
    queues: dict[dist.ProcessGroup, _Queue] = {}
    for module in fsdp_modules(cast(nn.Module, root)):
        over = gathered_over(module)
        if over is None:
            continue
        queue = shared if streams == "shared" else queues.setdefault(over.group, _Queue(counts))
        module.set_custom_all_gather(_QueuedAllGather(queue, seconds(over.dimension)))
