"""What ranks tell each other beside tensors, and a rank's own part of a tensor; the checkpoint's floor uses it, too."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Value = TypeVar("Value")


def gather(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """The value of each rank of `group` (None: of all), by rank; all of them must call it, and values be picklable."""
    by_rank: list[Value | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, value, group=group)
    return cast(list[Value], by_rank)


def on_rank_zero(group: dist.ProcessGroup | None, action: Callable[[], Value]) -> Value:
    """Run `action` on the first rank of `group` only (None: of all); all return what it returns or raise its error."""
    result_and_error: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            result_and_error[0] = action()
        except Exception as error:
            result_and_error[1] = error
    dist.broadcast_object_list(result_and_error, group_src=0, group=group)
    result, failure = result_and_error
    if failure is not None:
        raise failure
    return result


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard of a DTensor, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
