"""Exchange of objects between ranks, and a rank's local part of a tensor; `checkpoint/` uses it as well."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Value = TypeVar("Value")


def gather(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """The value of each rank of `group` (None: all ranks), in rank order; all must call it, with picklable values."""
    by_rank: list[Value | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, value, group=group)
    return cast(list[Value], by_rank)


def on_rank_zero(group: dist.ProcessGroup | None, action: Callable[[], Value]) -> Value:
    """Run `action` on the first rank of `group` only (None: of all); all ranks return its result or raise its error."""
    return on_rank(0, group, action)


def on_rank(rank: int, group: dist.ProcessGroup | None, action: Callable[[], Value]) -> Value:
    """Like `on_rank_zero`, with another rank of the group."""
    result_and_error: list[Any] = [None, None]
    if dist.get_rank(group) == rank:
        try:
            result_and_error[0] = action()
        except Exception as error:
            result_and_error[1] = error
    dist.broadcast_object_list(result_and_error, group_src=rank, group=group)
    result, failure = result_and_error
    if failure is not None:
        raise failure
    return result


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: its shard of a DTensor, otherwise the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
