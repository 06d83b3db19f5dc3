"""Expert parallelism (Lepikhin et al. 2020, GShard): each rank holds some of the experts, and rows travel to them.

The ranks of `ep` have different tokens, like all ranks that FSDP shards over. Each rank sends the rows that its router
assigned to an expert to the rank that holds the expert, in one all-to-all, multiplies the rows it receives, and sends
the results back in another. The routing decides how many rows go where: splits are uneven, and an expert or a whole
rank may receive none. Every rank still takes part in every exchange, so all ranks issue them in the same order, also
where activation checkpointing repeats the forward pass.

A rank's experts are whole; FSDP shards them over the remaining ranks of `dp_shard` x `cp` (`fsdp.py`). A parameter is
a DTensor over both axes, so initialization, clipping and checkpoints need no special case for experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from configs.plan import plan_of
from parallelisms.ranks import local_part
from parallelisms.torch_internals import group_named

_c10d = torch.ops._c10d_functional


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's share of the plan's experts, and send rows to the ranks that hold their experts.

    Args:
        model: on the meta device; tensor parallelism may already have sharded it.
        mesh: (ep,), or with tensor parallelism (ep, tp). The size of `ep` divides the number of experts.
    """
    for name in plan_of(model).experts:
        experts: Any = model.get_submodule(name)
        for parameter_name, parameter in experts.named_parameters(recurse=False):
            setattr(experts, parameter_name, nn.Parameter(_own_experts(parameter, mesh)))
        experts.local = local_part
        computation = "compute" if hasattr(experts, "compute") else "forward"
        on_their_ranks = partial(_on_their_ranks, getattr(experts, computation), mesh.get_group("ep").group_name)
        setattr(experts, computation, on_their_ranks)


def _own_experts(parameter: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's share of a parameter (experts, ...), which tensor parallelism may have sharded within each expert."""
    within = parameter.placements if isinstance(parameter, DTensor) else [Replicate()] * (mesh.ndim - 1)
    own = local_part(parameter).detach().chunk(mesh.size(0))[mesh.get_local_rank("ep")]
    return DTensor.from_local(
        own, mesh, [Shard(0), *within], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _on_their_ranks(forward: Callable[[Tensor, Tensor], Tensor], group: str, rows: Tensor, counts: Tensor) -> Tensor:
    """Run `forward` on the ranks that hold each row's expert.

    Args:
        forward: the forward pass of this rank's experts.
        group: name of the process group over which the experts are distributed, in order.
        rows: (n, dim), sorted by expert.
        counts: (n_experts,) int64, rows of each expert.
    """
    own_counts, *route = _route(counts, rows.shape[0], group)
    results = forward(_send(rows, *route, group), own_counts)
    return _return(results, *route, rows.shape[0], group)


# --------------------------------------------------------------------------- custom ops, opaque to torch.compile


@torch.library.custom_op("keel::route_to_experts", mutates_args=())
def _route(counts: Tensor, n: int, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Exchange how many rows each rank will receive for each of its experts.

    Args:
        counts: (n_experts,) int64, rows that leave this rank for each expert.
        n: their sum.
        group: as for `_on_their_ranks`.

    Returns:
        counts: (own experts,) int64, rows that arrive for each expert of this rank.
        sizes: (2, ranks) int64, in CPU memory: rows sent to each rank, and received from it.
        by_expert: (rows that arrive,) int64, the permutation from order of arrival to order by expert.
        as_arrived: the inverse permutation.
    """
    n_ranks = group_named(group).size()
    leaving = counts.unflatten(0, (n_ranks, -1))  # (ranks, experts of each)
    arriving = _all_to_all(counts, [leaving.shape[1]] * n_ranks, [leaving.shape[1]] * n_ranks, group).view_as(leaving)
    # The CPU waits for the device here, because it must know a collective's sizes.
    sizes = torch.stack((leaving.sum(1), arriving.sum(1))).cpu()
    # Rows arrive by rank, and from each rank by expert.
    experts = torch.arange(arriving.shape[1], device=counts.device).repeat(n_ranks)
    n_arriving = int(sizes[1].sum())
    by_expert = experts.repeat_interleave(arriving.flatten(), output_size=n_arriving).argsort(stable=True)
    as_arrived = torch.empty_like(by_expert)
    as_arrived[by_expert] = torch.arange(n_arriving, device=counts.device)
    return arriving.sum(0), sizes, by_expert, as_arrived


@_route.register_fake
def _(counts: Tensor, n: int, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n_ranks = group_named(group).size()
    n_arriving: int | torch.SymInt
    try:
        n_arriving = torch.library.get_ctx().new_dynamic_size()
    except DynamicOutputShapeException:  # tracing with concrete sizes but no values: assume an even load
        n_arriving = n
    by_expert = counts.new_empty(n_arriving)
    sizes = counts.new_empty(2, n_ranks, device="cpu")
    return counts.new_empty(len(counts) // n_ranks), sizes, by_expert, torch.empty_like(by_expert)


@torch.library.custom_op("keel::send_to_experts", mutates_args=())
def _send(rows: Tensor, sizes: Tensor, by_expert: Tensor, as_arrived: Tensor, group: str) -> Tensor:
    """Send rows (n, dim), sorted by expert, to their experts' ranks: (rows that arrive, dim), sorted by expert."""
    leaving, arriving = sizes.tolist()
    return _all_to_all(rows, arriving, leaving, group)[by_expert]


@_send.register_fake
def _(rows: Tensor, sizes: Tensor, by_expert: Tensor, as_arrived: Tensor, group: str) -> Tensor:
    return rows.new_empty(by_expert.shape[0], rows.shape[1])


@torch.library.custom_op("keel::return_from_experts", mutates_args=())
def _return(rows: Tensor, sizes: Tensor, by_expert: Tensor, as_arrived: Tensor, n: int, group: str) -> Tensor:
    """Undo `_send`; n is the number of rows that had left this rank."""
    leaving, arriving = sizes.tolist()
    return _all_to_all(rows[as_arrived], leaving, arriving, group)


@_return.register_fake
def _(rows: Tensor, sizes: Tensor, by_expert: Tensor, as_arrived: Tensor, n: int, group: str) -> Tensor:
    return rows.new_empty(n, rows.shape[1])


def _keep_route(ctx: Any, inputs: tuple, output: Tensor) -> None:
    rows, *route = inputs[:4]
    ctx.save_for_backward(*route)
    ctx.n = rows.shape[0]
    ctx.group = inputs[-1]


def _return_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _return(grad, *ctx.saved_tensors, ctx.n, ctx.group), None, None, None, None


def _send_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _send(grad, *ctx.saved_tensors, ctx.group), None, None, None, None, None


_send.register_autograd(_return_gradients, setup_context=_keep_route)
_return.register_autograd(_send_gradients, setup_context=_keep_route)


def _all_to_all(x: Tensor, arriving: list[int], leaving: list[int], group: str) -> Tensor:
    """Send each rank its rows of x; returns the rows received, in rank order."""
    return _c10d.wait_tensor(_c10d.all_to_all_single(x.contiguous(), arriving, leaving, group))
