"""Queues of FSDP all-gathers: one per model, or one per process group.

On a GPU a queue is a CUDA stream, in which gathers run one after another. FSDP uses one stream for all its groups. If
groups gather over different process groups, such as experts on a separate mesh, a computation then waits for a gather
that itself waited behind others, over links that were free (the subject of pytorch/pytorch#116611). With
`comm.streams = "per_group"`, gathers queue only behind gathers of the same process group.

A CPU has no streams: FSDP's own gathers are complete when they return, and a job on a CPU normally runs that way. With
`comm.streams = "per_group"`, with `[comm.simulate]`, or to count gathers, they return at once instead, with a handle on
which the computation waits when it needs the parameters. The handles form the queues, so that overlap, and the cost of
either kind of queue, can be measured with gloo. Values are the same in every mode: only waiting differs, never what is
gathered or the order of issue.

`[comm.simulate]` delays every gather in its queue, as a slower network would, and every reduction likewise.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from configs.schema import Comm, Simulate
from parallelisms.torch_internals import (
    DefaultAllGather,
    DefaultReduceScatter,
    ReduceScatter,
    fsdp_modules,
    gather_asynchronously,
    gathered_over,
    occupy_stream,
    reduction_of,
    separate_streams,
)


@dataclass
class GatherCounts:
    """Statistics of a model's gathers on a CPU."""

    gathers: int = 0
    waits: int = 0
    """Gathers for which the computation had to wait."""
    waits_behind_others: int = 0
    """Waits for a gather that was queued behind another process group's gather."""


def queue_gathers(stages: Iterable[nn.Module], comm: Comm, device: torch.device) -> None:
    """Set up queues and delays for models whose parameters are in memory; each pipeline stage has its own queues."""
    if device.type == "cpu":
        if comm.streams == "per_group" or comm.simulate != Simulate():
            count_gathers(stages, comm)
        return
    if comm.streams == "per_group":
        # Kernels of two communicators run concurrently. With this set, NCCL starts them in one order on all ranks;
        # otherwise they could deadlock. NCCL reads it with the first communicator, at the first collective on a GPU.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    for root in _roots(stages):
        if comm.streams == "per_group":
            separate_streams(root)
        _delay_in_streams(root, comm.simulate)


def count_gathers(stages: Iterable[nn.Module], comm: Comm) -> GatherCounts:
    """On a CPU, queue the gathers of models whose parameters are in memory, and count them.

    Returns:
        The counts, which are updated as the models compute.
    """
    counts = GatherCounts()
    for root in _roots(stages):
        _queue_on_cpu(root, comm, counts)
    return counts


def _roots(stages: Iterable[nn.Module]) -> Iterator[FSDPModule]:
    return (stage for stage in stages if isinstance(stage, FSDPModule))


@dataclass(frozen=True)
class _Delays:
    """Extra seconds that the collectives of one process group take."""

    all_gather: float
    reduce_scatter: float


def _delays(simulate: Simulate, dimension: str) -> _Delays:
    """The delays of the groups that are sharded over `dimension` of the mesh."""
    of_group = next((group for group in simulate.groups if group.shards_over == dimension), simulate)
    return _Delays(of_group.all_gather_milliseconds / 1000, of_group.reduce_scatter_milliseconds / 1000)


# --------------------------------------------------------------------------- on a CPU


class _Queue:
    """The gathers issued into one queue; only the last one has to be known."""

    def __init__(self, counts: GatherCounts) -> None:
        self.counts = counts
        self.last: _Gather | None = None


class _Gather(dist.Work):
    """A gather in a queue. A subclass of `dist.Work`, since FSDP waits for nothing else."""

    def __init__(self, work: dist.Work, over: dist.ProcessGroup, queue: _Queue, seconds: float) -> None:
        """Enqueue a gather that was just issued over a process group, and that takes `seconds` longer than `work`."""
        super().__init__()
        self._work: dist.Work | None = work  # dropped on completion, since it holds the gathered buffer
        self._over, self._counts = over, queue.counts
        self._before = queue.last if queue.last and not queue.last.is_over() else None
        self._was_behind_others = self._before is not None and self._before._over is not over
        start = time.monotonic()
        self._ready_at: float = max(start, self._before._ready_at if self._before else start) + seconds
        self._counts.gathers += 1
        queue.last = self

    def is_over(self) -> bool:
        """Whether its data, and that of all gathers before it in the queue, has arrived."""
        if self._before is not None and self._before.is_over():
            self._before = None
        is_here = self._work is None or self._work.is_completed()
        return self._before is None and is_here and time.monotonic() >= self._ready_at

    def wait(self, *_: Any) -> bool:
        """Wait for this gather, and so for all before it; called by the computation that needs it."""
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
        self._queue, self._seconds = queue, seconds

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


class _LateReduceScatter(DefaultReduceScatter):
    """A group's reduce-scatter after a delay: of this thread on a CPU, where it is complete on return; on a GPU, of the
    stream that it is issued in."""

    reduction: ReduceScatter

    def __init__(self, reduction: ReduceScatter, delay: Callable[[], None]) -> None:
        self.reduction = reduction.reduction if isinstance(reduction, _LateReduceScatter) else reduction
        self._delay = delay

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._delay()
        return self.reduction(*arguments, **options)


def _queue_on_cpu(root: FSDPModule, comm: Comm, counts: GatherCounts) -> None:
    gather_asynchronously(root)
    shared, queues = _Queue(counts), dict[dist.ProcessGroup, _Queue]()
    for module in fsdp_modules(cast(nn.Module, root)):
        over = gathered_over(module)
        if over is None:
            continue
        queue = shared if comm.streams == "shared" else queues.setdefault(over.group, _Queue(counts))
        delays = _delays(comm.simulate, over.dimension)
        module.set_custom_all_gather(_QueuedAllGather(queue, delays.all_gather))
        if delays.reduce_scatter:
            delay = partial(time.sleep, delays.reduce_scatter)
            module.set_custom_reduce_scatter(_LateReduceScatter(reduction_of(module), delay))


# --------------------------------------------------------------------------- on a GPU


class _DelayedAllGather(DefaultAllGather):
    """FSDP's all-gather after a delay of the stream that it is issued in."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, *arguments: Any, **options: Any) -> dist.Work | None:
        occupy_stream(self._seconds)
        return super().__call__(*arguments, **options)


def _delay_in_streams(root: FSDPModule, simulate: Simulate) -> None:
    for module in fsdp_modules(cast(nn.Module, root)):
        over = gathered_over(module)
        delays = _delays(simulate, over.dimension if over else "")
        if delays.all_gather:
            module.set_custom_all_gather(_DelayedAllGather(delays.all_gather))
        if delays.reduce_scatter:
            delay = partial(occupy_stream, delays.reduce_scatter)
            module.set_custom_reduce_scatter(_LateReduceScatter(reduction_of(module), delay))
