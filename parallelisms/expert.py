"""Expert parallelism (Lepikhin et al. 2020, GShard): each rank holds some of the experts, and rows travel to them.

The ranks of `ep` have different tokens, as all ranks that FSDP shards over. Each sends the rows that its router gave
to an expert to the rank that holds the expert, in one all-to-all, multiplies what it receives, and sends the results
back in another. How many rows go where is the routing's business: splits are uneven, an expert may get nothing, a rank
too. Every rank takes part in every exchange all the same, so their order is the same on all of them, also where
activation checkpointing repeats the forward pass.

A rank's experts are whole; the ranks that are left of `dp_shard` x `cp` shard them again by FSDP (`fsdp.py`). A
parameter is a DTensor over both axes, so that initial weights, clipping and checkpoints need to know nothing of
experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parallelisms.plan import plan_of

_c10d = torch.ops._c10d_functional


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave to each rank its share of the plan's experts, and send rows to where their experts are.

    Args:
        model: on the meta device; tensor parallelism may have cut it.
        mesh: (ep,), or with tensor parallelism (ep, tp). Its first size divides the number of experts.
    """
    for name in plan_of(model).experts:
        experts: Any = model.get_submodule(name)
        for parameter_name, parameter in experts.named_parameters(recurse=False):
            setattr(experts, parameter_name, nn.Parameter(_own_experts(parameter, mesh)))
        experts.local = _local
        experts.forward = partial(_on_their_ranks, experts.forward, mesh.get_group("ep"))


def _own_experts(parameter: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's share of a parameter (experts, ...), which tensor parallelism may have cut within the experts."""
    within = parameter.placements if isinstance(parameter, DTensor) else ()
    own = _local(parameter).detach().chunk(mesh.size(0))[mesh.get_local_rank("ep")]
    return DTensor.from_local(
        own, mesh, [Shard(0), *within], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _on_their_ranks(
    forward: Callable[[Tensor, Tensor], Tensor], group: dist.ProcessGroup, rows: Tensor, counts: Tensor
) -> Tensor:
    """`forward`, the experts' own, where the experts are.

    Args:
        forward: of this rank's experts.
        group: the ranks that share the experts out, in the order of the experts.
        rows: (n, dim), sorted by expert.
        counts: (n_experts,) int64, rows of each expert.
    """
    route = _route(counts, group)
    results = forward(cast(Tensor, _There.apply(rows, route)), route.counts)
    return cast(Tensor, _Back.apply(results, route))


class _Route(NamedTuple):
    """Where rows go."""

    group: dist.ProcessGroup
    sent: list[int]
    """Rows that go from here to each rank."""
    received: list[int]
    """Rows that come here from each rank."""
    counts: Tensor
    """(own experts,) int64: rows for each expert of this rank."""
    by_expert: Tensor
    """(rows received,) int64: where the rows, in order of their experts, are in the order in which they arrive."""
    as_arrived: Tensor
    """The inverse."""


def _route(counts: Tensor, group: dist.ProcessGroup) -> _Route:
    """Tell every rank how many rows it will get for each of its experts; counts: (n_experts,)."""
    leaving = counts.unflatten(0, (group.size(), -1))  # (ranks, own experts of each)
    arriving = _all_to_all(counts, None, None, group).view_as(leaving)
    # The CPU waits for the device here: a collective's sizes must be known to it.
    sent, received = torch.stack((leaving.sum(1), arriving.sum(1))).tolist()
    # Rows arrive by rank, and from each rank by expert.
    experts = torch.arange(arriving.shape[1], device=counts.device).repeat(group.size())
    by_expert = experts.repeat_interleave(arriving.flatten(), output_size=sum(received)).argsort(stable=True)
    as_arrived = torch.empty_like(by_expert)
    as_arrived[by_expert] = torch.arange(len(by_expert), device=counts.device)
    return _Route(group, sent, received, arriving.sum(0), by_expert, as_arrived)


def _send(rows: Tensor, route: _Route) -> Tensor:
    """Rows by expert here -> rows by expert at their experts' ranks."""
    return _all_to_all(rows, route.received, route.sent, route.group)[route.by_expert]


def _return(rows: Tensor, route: _Route) -> Tensor:
    """The way back."""
    return _all_to_all(rows[route.as_arrived], route.sent, route.received, route.group)


class _There(torch.autograd.Function):
    """Rows go to their experts; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        return _send(rows, route)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _return(grad, ctx.route), None


class _Back(torch.autograd.Function):
    """Results come back; their gradients go to the experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        return _return(rows, route)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _send(grad, ctx.route), None


def _all_to_all(x: Tensor, received: list[int] | None, sent: list[int] | None, group: dist.ProcessGroup) -> Tensor:
    """Send to each rank its rows of x, and return in the ranks' order what they send; None: as many to each."""
    if received is None or sent is None:
        received = sent = [len(x) // group.size()] * group.size()
    return _c10d.wait_tensor(_c10d.all_to_all_single(x.contiguous(), received, sent, group.group_name))
