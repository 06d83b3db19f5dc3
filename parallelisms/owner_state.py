"""The state of an optimizer that is shared out by owner, in the form of a plain torch optimizer: out of it and in.

Keel's own checkpoints gather nothing (`OwnerPartition.owned`). This serves the partition as a library: it gathers the
dictionary that `torch.optim.Optimizer.state_dict` returns, a tensor at a time. Tensors travel on the device of the
parameters, since the group that exchanges these may know no other: a group of NCCL moves nothing that is in the host's
memory, where AdamW may count its steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallelisms.ranks import gather

_NOT_SETTINGS = ("params", "param_names")

OwnState = Mapping[int, Mapping[str, Any]]
"""What a rank has of the state: by the parameters' numbers, tensors (DTensors where they are cut) and other values."""


@dataclass(frozen=True)
class _Description:
    """A tensor that another rank has."""

    shape: torch.Size
    dtype: torch.dtype


@torch.no_grad()
def gather_state(
    mine: OwnState, ranks: dist.ProcessGroup, device: torch.device, rank: int | None
) -> dict[int, dict[str, Any]]:
    """The state of all ranks in CPU memory; all ranks must call it.

    Args:
        mine: what this rank has of it.
        ranks: the group whose ranks have the rest.
        device: where they exchange tensors.
        rank: of the group, the only one that is to have the result (the others return {}); None: all ranks.
    """
    described = {i: {key: _described(value) for key, value in state.items()} for i, state in mine.items()}
    tables = gather(described, ranks)
    owners = {i: owner for owner, table in enumerate(tables) for i in table}
    state = {
        i: {
            key: _delivered(mine.get(i, {}).get(key), description, ranks, device, owners[i], rank)
            for key, description in tables[owners[i]][i].items()
        }
        for i in sorted(owners)
    }
    return state if rank in (None, dist.get_rank(ranks)) else {}


def _described(value: Any) -> Any:
    return _Description(value.shape, value.dtype) if isinstance(value, Tensor) else value


def _delivered(
    value: Any, description: Any, ranks: dist.ProcessGroup, device: torch.device, owner: int, rank: int | None
) -> Any:
    """Bring a value from its owner to `rank`, or to all; None elsewhere."""
    if not isinstance(description, _Description):
        return description
    if value is None:
        value = torch.empty(description.shape, dtype=description.dtype, device=device)
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
    """A parameter group's settings."""
    return {key: value for key, value in group.items() if key not in _NOT_SETTINGS}


def numbered(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups as a state dict has them: numbers in the place of parameters."""
    numbered_groups, first = [], 0
    for group in groups:
        last = first + len(group["params"])
        numbered_groups.append({**settings_of(group), "params": list(range(first, last))})
        first = last
    return numbered_groups


def select_groups(state_dict: Mapping[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """The part of an optimizer's state dict that an optimizer over some of its groups loads, in their order.

    For groups of different optimizers: `select_groups(partition.state_dict(), muon_groups)` is one for
    `torch.optim.Muon`.
    """
    state: dict[int, Any] = {}
    groups, first = [], 0
    for number in chosen:
        group = state_dict["param_groups"][number]
        state |= {at: state_dict["state"].get(i, {}) for at, i in enumerate(group["params"], start=first)}
        groups.append({**group, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return {"state": {i: values for i, values in state.items() if values}, "param_groups": groups}
