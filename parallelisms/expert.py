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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Shard

from configs.plan import plan_of
from parallelisms.ranks import local_part

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
        experts.local = local_part
        experts.forward = partial(_on_their_ranks, experts.forward, mesh.get_group("ep").group_name)


def _own_experts(parameter: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's share of a parameter (experts, ...), which tensor parallelism may have cut within the experts."""
    within = parameter.placements if isinstance(parameter, DTensor) else ()
    own = local_part(parameter).detach().chunk(mesh.size(0))[mesh.get_local_rank("ep")]
    return DTensor.from_local(
        own, mesh, [Shard(0), *within], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _on_their_ranks(forward: Callable[[Tensor, Tensor], Tensor], group: str, rows: Tensor, counts: Tensor) -> Tensor:
    """`forward`, the experts' own, where the experts are.

    Args:
        forward: of this rank's experts.
        group: name of the process group whose ranks share the experts out, in the order of the experts.
        rows: (n, dim), sorted by expert.
        counts: (n_experts,) int64, rows of each expert.
    """
    own_counts, *route = _route(counts, rows.shape[0], group)
    results = forward(_send(rows, *route, group), own_counts)
    return _return(results, *route, rows.shape[0], group)


# --------------------------------------------------------------------------- ops: compilers take them as they are


@torch.library.custom_op("keel::route_to_experts", mutates_args=())
def _route(counts: Tensor, n: int, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tell every rank how many rows it will get for each of its experts.

    Args:
        counts: (n_experts,) int64, rows that leave this rank for each expert.
        n: their sum.
        group: as for `_on_their_ranks`.

    Returns:
        counts: (own experts,) int64, rows that arrive for each expert of this rank.
        sizes: (2, ranks) int64, in CPU memory: rows that leave for each rank, and that arrive from it.
        by_expert: (rows that arrive,) int64: the order of arrival -> by expert.
        as_arrived: the inverse.
    """
    n_ranks = _group(group).size()
    leaving = counts.unflatten(0, (n_ranks, -1))  # (ranks, experts of each)
    arriving = _all_to_all(counts, [leaving.shape[1]] * n_ranks, [leaving.shape[1]] * n_ranks, group).view_as(leaving)
    # The CPU waits for the device here: a collective's sizes must be known to it.
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
    n_ranks = _group(group).size()
    n_arriving: int | torch.SymInt
    try:
        n_arriving = torch.library.get_ctx().new_dynamic_size()
    except DynamicOutputShapeException:  # where sizes must be numbers, without values: as many as with an even load
        n_arriving = n
    by_expert = counts.new_empty(n_arriving)
    sizes = counts.new_empty(2, n_ranks, device="cpu")
    return counts.new_empty(len(counts) // n_ranks), sizes, by_expert, torch.empty_like(by_expert)


@torch.library.custom_op("keel::send_to_experts", mutates_args=())
def _send(rows: Tensor, sizes: Tensor, by_expert: Tensor, as_arrived: Tensor, group: str) -> Tensor:
    """Rows by expert here, (n, dim) -> rows by expert where their experts are, (rows that arrive, dim)."""
    leaving, arriving = sizes.tolist()
    return _all_to_all(rows, arriving, leaving, group)[by_expert]


@_send.register_fake
def _(rows: Tensor, sizes: Tensor, by_expert: Tensor, as_arrived: Tensor, group: str) -> Tensor:
    return rows.new_empty(by_expert.shape[0], rows.shape[1])


@torch.library.custom_op("keel::return_from_experts", mutates_args=())
def _return(rows: Tensor, sizes: Tensor, by_expert: Tensor, as_arrived: Tensor, n: int, group: str) -> Tensor:
    """The way back of `_send`; n: how many rows had left this rank."""
    leaving, arriving = sizes.tolist()
    return _all_to_all(rows[as_arrived], leaving, arriving, group)


@_return.register_fake
def _(rows: Tensor, sizes: Tensor, by_expert: Tensor, as_arrived: Tensor, n: int, group: str) -> Tensor:
    return rows.new_empty(n, rows.shape[1])


def _keep_route(ctx: Any, inputs: tuple, output: Tensor) -> None:
    rows, *route = inputs[:4]
    ctx.save_for_backward(*route)
    ctx.n, ctx.group = rows.shape[0], inputs[-1]


def _return_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _return(grad, *ctx.saved_tensors, ctx.n, ctx.group), None, None, None, None


def _send_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _send(grad, *ctx.saved_tensors, ctx.group), None, None, None, None, None


_send.register_autograd(_return_gradients, setup_context=_keep_route)
_return.register_autograd(_send_gradients, setup_context=_keep_route)


def _all_to_all(x: Tensor, arriving: list[int], leaving: list[int], group: str) -> Tensor:
    """Send each rank its rows of x; what the ranks send, in their order."""
    return _c10d.wait_tensor(_c10d.all_to_all_single(x.contiguous(), arriving, leaving, group))


def _group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]  # a type of its own since torch 2.13, str before
