"""A world of ranks of which one exists: each of the others is taken to do, and to hold, what this one does.

A collective returns at once, with this rank's tensor in the place of every other's; a message that arrives is zeros. So
Keel's own code runs to its end on any rank of any world, in one process, and what it issues can be noted. A sum is this
rank's term, not n of it: who issues what must not depend on that, and is noted wrong if it does.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint import plan
from checkpoint.index import Directory
from checkpoint.shards import Shard
from parallelisms import ranks
from parallelisms.mesh import end_process_group
from parallelisms.ranks import gather
from parallelisms.torch_internals import listening, tensors_of

Note = Callable[[str, dist.ProcessGroup, tuple[Any, ...], int | None], None]
"""Called with an operator's name, its group and arguments, and the number of its batch of messages, if any."""


class Echo:
    """The answers of the ranks that do not exist."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._thread = threading.main_thread()
        self._is_acting_as_first = False
        self._batch: int | None = None
        self._batches = 0

    def before(self, operator: str, group: dist.ProcessGroup, arguments: tuple[Any, ...]) -> None:
        """Note what the main thread issues; threads that save when a signal asks for it have groups of their own."""
        if threading.current_thread() is self._thread and not self._is_acting_as_first:
            self._note(operator, group, arguments, self._batch)

    def answer(self, operator: str, group: dist.ProcessGroup, arguments: tuple[Any, ...], _work: dist.Work) -> None:
        """Put this rank's tensors where those of the others would arrive."""
        with torch.no_grad():
            _answer(operator.strip("_"), group, arguments)

    def batched(self, issue: Callable[..., list[dist.Work]]) -> Callable[..., list[dist.Work]]:
        """Wrap torch's `batch_isend_irecv`, whose messages wait for each other's ends together."""

        def wrapped(operations: list[dist.P2POp]) -> list[dist.Work]:
            self._batch = self._batches
            self._batches += 1
            try:
                return issue(operations)
            finally:
                self._batch = None

        return wrapped

    def act_as_first(self, group: dist.ProcessGroup | None) -> bool:
        """Take the first rank's place in `on_rank_zero`, whose result this one needs; what it issues is not noted."""
        self._is_acting_as_first = dist.get_rank(group) > 0
        return True

    def as_first(self, work: Callable[[], Any]) -> None:
        """Do what only the first rank does while the others wait; what it issues is not noted elsewhere."""
        self._is_acting_as_first = dist.get_rank() > 0
        try:
            work()
        finally:
            self._is_acting_as_first = False

    def told_by_first(self, broadcast: Callable[..., bytes]) -> Callable[..., bytes]:
        """Wrap the broadcast of that result, which is noted again."""

        def wrapped(content: bytes, group: dist.ProcessGroup | None) -> bytes:
            self._is_acting_as_first = False
            return broadcast(content, group)

        return wrapped


def _planned(shards: Mapping[str, Shard], group: dist.ProcessGroup) -> plan.Plan:
    """Plan to write all that this rank holds, with the exchanges of `checkpoint.plan.planned`."""
    for _ in ("places", "lists", "boxes"):
        gather([], group)
    items = [item for name, shard in shards.items() for item in shard.__create_write_items__(name, None)]
    return plan.Plan(items, Directory([], [plan.file_of(rank) for rank in range(dist.get_world_size(group))]))


@contextmanager
def echoing_ranks(world_size: int, rank: int, note: Note) -> Iterator[Echo]:
    """Act as one rank of a world; `note` gets all that its main thread issues."""
    echo = Echo(note)
    new_group = dist.new_group

    def of_no_backend(*arguments: Any, backend: Any = None, **keywords: Any) -> Any:
        return new_group(*arguments, **keywords)

    with ExitStack() as stack:
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
        stack.callback(end_process_group)
        stack.enter_context(patch.object(dist, "new_group", of_no_backend))
        stack.enter_context(patch.object(dist, "batch_isend_irecv", echo.batched(dist.batch_isend_irecv)))
        stack.enter_context(patch.object(ranks, "is_first", echo.act_as_first))
        stack.enter_context(patch.object(ranks, "broadcast", echo.told_by_first(ranks.broadcast)))
        stack.enter_context(patch.object(plan, "planned", _planned))
        stack.enter_context(listening(echo.before, echo.answer))
        yield echo


def _answer(operator: str, group: dist.ProcessGroup, arguments: tuple[Any, ...]) -> None:
    here = group.rank()
    match operator:
        case "allgather" | "allgather_coalesced":
            for outputs, own in zip(arguments[0], arguments[1], strict=True):
                for output in outputs:
                    output.copy_(own)
        case "_allgather_base":
            _fill(arguments[0], arguments[1])
        case "allgather_into_tensor_coalesced":
            for output, own in zip(arguments[0], arguments[1], strict=True):
                _fill(output, own)
        case "_reduce_scatter_base":
            _part(arguments[0], arguments[1], here)
        case "reduce_scatter_tensor_coalesced":
            for output, whole in zip(arguments[0], arguments[1], strict=True):
                _part(output, whole, here)
        case "reduce_scatter":
            for output, parts in zip(arguments[0], arguments[1], strict=True):
                output.copy_(parts[here])
        case "alltoall_base":
            _exchange(arguments[0], arguments[1])
        case "alltoall":
            for output in arguments[0]:
                output.copy_(arguments[1][here])
        case "recv":
            for tensor in tensors_of(arguments[:1]):
                tensor.fill_(0 if tensor.is_floating_point() else 1)  # a vote of torch's pipelining, for yes
        case "broadcast":
            if arguments[2] != here:  # memory that nobody has written may hold anything
                for tensor in tensors_of(arguments[:1]):
                    if tensor.is_floating_point():
                        tensor.zero_()


def _fill(output: Tensor, own: Tensor) -> None:
    """Repeat this rank's part until the whole is full."""
    if own.numel():
        output.view(-1, own.numel()).copy_(own.reshape(1, -1).expand(output.numel() // own.numel(), -1))


def _part(output: Tensor, whole: Tensor, here: int) -> None:
    output.view(-1).copy_(whole.reshape(-1, output.numel())[here] if output.numel() else output.view(-1))


def _exchange(output: Tensor, sent: Tensor) -> None:
    """Every other rank sends what this one sends to it: counts of rows, and then the rows, fit each other."""
    n = min(output.numel(), sent.numel())
    output.zero_()
    output.view(-1)[:n].copy_(sent.reshape(-1)[:n])
