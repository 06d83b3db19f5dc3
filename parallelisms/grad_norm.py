"""The global gradient norm, and clipping by it, over any mixture of meshes and placements.

`torch.nn.utils.clip_grad_norm_` refuses gradients on different meshes, and plain tensors mixed with DTensors. Here each
rank takes the norm of its local shards, grouping gradients that are sharded over the same process groups, and sums p-th
powers over just those groups. Each element therefore counts once, however many ranks hold a replica of it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallelisms.ranks import local_part


@torch.no_grad()
def grad_norm(
    parameters: Iterable[Tensor], norm_type: float = 2.0, pipeline: dist.ProcessGroup | None = None
) -> Tensor:
    """Global p-norm of the gradients; all ranks must call it.

    Args:
        parameters: those without a gradient are skipped.
        norm_type: p; inf for the largest absolute value.
        pipeline: the ranks that hold the other stages' parameters.

    Returns:
        A scalar, equal on all ranks up to rounding (groups may sum in different orders).
    """
    parameters = list(parameters)
    unit = None
    if 2 < norm_type < math.inf:  # powers of small values would underflow, and those of large ones overflow
        largest = grad_norm(parameters, math.inf, pipeline)
        unit = torch.where(largest > 0, largest, torch.ones_like(largest))
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients(parameters):
        by_groups[sharding_groups(gradient)].append(local_part(gradient))
        device = exchanged_on(gradient)
    totals = [_total_over(groups, local, norm_type, device, unit) for groups, local in by_groups.items()]
    if not totals:  # all of this rank's parameters are frozen, but another stage's may not be
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        totals = [torch.zeros((), dtype=dtype, device=exchanged_on(parameters[0]))]
    is_max = math.isinf(norm_type)
    total = torch.stack(totals).max() if is_max else torch.stack(totals).sum()
    if pipeline is not None and pipeline.size() > 1:
        # Over the ranks that hold the other stages.
        dist.all_reduce(total, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=pipeline)
    norm = total if is_max else total ** (1.0 / norm_type)
    return norm if unit is None else norm * unit


@torch.no_grad()
def clip_grads_with_norm(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients in place so that their global norm, given as `norm`, is at most `max_norm` (inf: no scaling).

    Computes what `torch.nn.utils.clip_grads_with_norm_` does. If the norm is not finite, the scaled gradients are
    unusable, but such a step is skipped anyway.
    """
    local = [local_part(gradient) for gradient in gradients(parameters)]
    if local and math.isfinite(max_norm):
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(local, scale.to(local[0].device))


def norms_of(tensors: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """The p-norm of each tensor, in at least float32, computed in float64 on a CPU.

    There torch adds up a tensor's elements in a few running sums, not in a tree: in float32, the norms of the debug
    job's head, whole and as two shards, were 7e-5 apart. In float64 they take a millisecond more per step.
    """
    dtype = torch.float64 if tensors[0].is_cpu else torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, norm_type, dtype=dtype))


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def exchanged_on(tensor: Tensor) -> torch.device | str:
    """The device on which ranks exchange a tensor's data, even if the tensor itself is kept in CPU memory."""
    return tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device


def sharding_groups(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which the gradient is sharded, and over which its norm must therefore be summed."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    assert not any(p.is_partial() for p in gradient.placements), "a gradient was not reduced"
    cut = [axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(axis) for axis in cut if mesh.size(axis) > 1)


def _total_over(
    groups: tuple[dist.ProcessGroup, ...],
    local: list[Tensor],
    norm_type: float,
    device: torch.device | str,
    unit: Tensor | None,
) -> Tensor:
    """Sum of p-th powers (p = inf: the largest absolute value) over the local shards and over the ranks of `groups`.

    The gradients are measured in `unit`, a scalar, if it is given. `device` is where `groups` exchange tensors, even if
    the gradients are kept in CPU memory.
    """
    # A rank whose shards are all empty contributes zero; it must still take part in the collectives below.
    filled = [t for t in local if t.numel()] or [local[0].new_zeros(1)]
    if unit is None:
        norms = norms_of(filled, norm_type)
    else:  # one at a time, since each is copied
        norms = torch.stack([torch.linalg.vector_norm(t / unit.to(t.device, t.dtype), norm_type) for t in filled])
    is_max = math.isinf(norm_type)
    total = norms.max() if is_max else (norms**norm_type).sum()
    total = total.to(device, torch.promote_types(local[0].dtype, torch.float32))
    # Over the ranks that hold the other shards of these gradients.
    for group in groups:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    return total
