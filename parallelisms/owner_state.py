"""Converts the state of an optimizer partitioned by owner to and from the form of a plain torch optimizer.

Keel's checkpoints gather nothing (`OwnerPartition.owned`). This is for using the partition as a library: it gathers the
dictionary that `torch.optim.Optimizer.state_dict` returns, one tensor at a time. Tensors are sent from the parameters'
device, which the process group supports: NCCL cannot send host memory, where AdamW may count its steps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallelisms.ranks import Json, gather

_NOT_SETTINGS = ("params", "param_names")

OwnState = Mapping[int, Mapping[str, Any]]
"""A rank's part of the state, by parameter number: tensors (DTensors where they are split) and other values."""


@torch.no_grad()
def gather_state(
    mine: OwnState, ranks: dist.ProcessGroup, device: torch.device, rank: int | None
) -> dict[int, dict[str, Any]]:
    """Gather the state of all ranks in CPU memory; all ranks must call it.

    Args:
        mine: this rank's part of the state.
        ranks: the group of ranks that hold the other parts.
        device: the device on which tensors are sent.
        rank: the only rank of the group to receive the state (others return {}); None: all ranks.
    """
    described: Json = [[i, [[key, *_described(value)] for key, value in state.items()]] for i, state in mine.items()]
    tables = [dict(table) for table in gather(described, ranks)]
    owners = {i: owner for owner, table in enumerate(tables) for i in table}
    state: dict[int, dict[str, Any]] = {}
    for i in sorted(owners):  # the same order on all ranks, which send and receive one after the other
        own = mine.get(i, {})
        state[i] = {
            key: _delivered(own.get(key), description, ranks, device, owners[i], rank)
            for key, *description in tables[owners[i]][i]
        }
    return state if rank in (None, dist.get_rank(ranks)) else {}


def _described(value: Any) -> list[Any]:
    """Shape and type of a tensor, or another value itself."""
    return [list(value.shape), str(value.dtype).removeprefix("torch.")] if isinstance(value, Tensor) else [value]


def _delivered(
    value: Any, description: list[Any], ranks: dist.ProcessGroup, device: torch.device, owner: int, rank: int | None
) -> Any:
    """Send a value from its owner to `rank`, or to all ranks; returns None elsewhere."""
    if len(description) == 1:
        return description[0]
    if value is None:
        shape, dtype = description
        value = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    value = (value.full_tensor() if isinstance(value, DTensor) else value).detach().to(device).contiguous()
    here = dist.get_rank(ranks)
    if rank is None:
        dist.broadcast(value, group=ranks, group_src=owner)
    elif rank != owner and here == owner:
        dist.send(value, group=ranks, group_dst=rank)
    elif rank != owner and here == rank:
        dist.recv(value, group=ranks, group_src=owner)
    return value.to("cpu", copy=True) if rank in (None, here) else None


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group."""
    return {key: value for key, value in group.items() if key not in _NOT_SETTINGS}


def numbered(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups as in a state dict, with numbers in place of parameters."""
    numbered_groups = []
    first = 0
    for group in groups:
        last = first + len(group["params"])
        numbered_groups.append({**settings_of(group), "params": list(range(first, last))})
        first = last
    return numbered_groups
