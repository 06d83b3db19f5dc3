"""The global gradient norm, and clipping by it, over any mixture of meshes and placements.

`torch.nn.utils.clip_grad_norm_` refuses gradients on different meshes, and plain tensors mixed with DTensors. Here each
rank takes the norm of its local shards, grouping gradients that are sharded over the same process groups, and sums p-th
powers over just those groups. Each element therefore counts once, however many ranks hold a copy of it.

`exact_grad_norm` computes the same with bits that FSDP's sharding does not change. Within a row, which FSDP never
splits, it adds in a fixed binary tree. The sums of the rows it adds as integers, which is exact in any order.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

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
    parameters, unit = list(parameters), None
    if 2 < norm_type < math.inf:  # powers of small values would underflow, and those of large ones overflow
        largest = grad_norm(parameters, math.inf, pipeline)
        unit = torch.where(largest > 0, largest, torch.ones_like(largest))
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for gradient in _gradients(parameters):
        by_groups[_sharding_groups(gradient)].append(local_part(gradient))
        device = _exchanged_on(gradient)
    totals = [_total_over(groups, local, norm_type, device, unit) for groups, local in by_groups.items()]
    if not totals:  # all of this rank's parameters are frozen, but another stage's may not be
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        totals = [torch.zeros((), dtype=dtype, device=_exchanged_on(parameters[0]))]
    is_max = math.isinf(norm_type)
    total = torch.stack(totals).max() if is_max else torch.stack(totals).sum()
    if pipeline is not None and pipeline.size() > 1:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=pipeline)
    norm = total if is_max else total ** (1.0 / norm_type)
    return norm if unit is None else norm * unit


_LIMB = 2.0**30
"""The integers to which sums of rows are rounded: up to 2^32 rows fit into 64 bits, in each of two parts."""
_ROWS_AT_ONCE = 1 << 24
"""Elements whose powers are in memory at once."""


@torch.no_grad()
def exact_grad_norm(
    parameters: Iterable[Tensor], norm_type: float = 2.0, pipeline: dist.ProcessGroup | None = None
) -> Tensor:
    """Like `grad_norm`, with the same bits however FSDP shards the gradients, and over any number of pipeline stages.

    Args:
        parameters, pipeline: as there.
        norm_type: a whole number or inf.

    Returns:
        A scalar, float64; NaN or inf if any gradient is.
    """
    parameters = list(parameters)
    if math.isinf(norm_type):  # a maximum has no order
        return grad_norm(parameters, norm_type, pipeline).double()
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    device = _exchanged_on(parameters[0])
    for gradient in _gradients(parameters):
        by_groups[_sharding_groups(gradient)].append(_row_sums(local_part(gradient), int(norm_type)).to(device))
    rows = {groups: torch.cat(sums) for groups, sums in by_groups.items()}

    def over_all_ranks(measure: Callable[[Tensor], Tensor], empty: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        results = [empty]
        for groups, sums in rows.items():
            result = measure(sums)
            for group in groups:
                dist.all_reduce(result, op=op, group=group)
            results.append(result)
        stacked = torch.stack(results)
        total = stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0)
        if pipeline is not None and pipeline.size() > 1:
            dist.all_reduce(total, op=op, group=pipeline)
        return total

    extremes = torch.zeros(2, dtype=torch.float64, device=device)
    largest, kind = over_all_ranks(_extremes, extremes, dist.ReduceOp.MAX)
    unit = largest.clamp(min=torch.finfo(torch.float64).tiny) / _LIMB
    total = over_all_ranks(lambda sums: _in_integers(sums, unit), extremes.long(), dist.ReduceOp.SUM).double()
    norm = ((total[0] + total[1] / _LIMB) * unit) ** (1.0 / norm_type)
    return torch.where(kind == 0, norm, torch.where(kind == 1, math.inf, math.nan))


def _row_sums(gradient: Tensor, power: int) -> Tensor:
    """The sum of the powers of the absolute values along the last dimension, (rows,) float64; of a vector, no sum.

    Only element-wise operations, whose results do not depend on the place of an element in a tensor.
    """
    gradient = gradient.reshape(-1, gradient.shape[-1]) if gradient.ndim > 1 else gradient.reshape(-1, 1)
    if gradient.dtype in (torch.bfloat16, torch.float16):
        gradient = gradient.float()
    sums = [gradient.new_zeros(1, dtype=torch.float64)]  # a shard may be empty
    for rows in gradient.split(max(1, _ROWS_AT_ONCE // gradient.shape[1])):
        values = magnitudes = rows.abs()
        for _ in range(power - 1):
            values = values * magnitudes
        while values.shape[1] > 1:
            n_pairs, half = values.shape[1] // 2, (values.shape[1] + 1) // 2
            values[:, :n_pairs].add_(values[:, half:])
            values = values[:, :half]
        sums.append(values[:, 0].double())
    return torch.cat(sums)


def _extremes(sums: Tensor) -> Tensor:
    """The largest finite value, and 2 if any is NaN, else 1 if any is inf, else 0; (2,)."""
    kinds = sums.isnan() * 2.0 + sums.isinf()
    return torch.stack((sums.nan_to_num(0.0, 0.0, 0.0).max(), kinds.max()))


def _in_integers(sums: Tensor, unit: Tensor) -> Tensor:
    """The sum of values, each in integers: how many units, and how many 2^-30 of a unit in the rest; (2,) int64."""
    units = sums.nan_to_num(0.0, 0.0, 0.0) / unit
    whole = units.floor()
    return torch.stack((whole.long().sum(), ((units - whole) * _LIMB).long().sum()))


@torch.no_grad()
def clip_grads_with_norm(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients in place so that their global norm, given as `norm`, is at most `max_norm` (inf: no scaling).

    Computes what `torch.nn.utils.clip_grads_with_norm_` does. If the norm is not finite, the scaled gradients are
    unusable, but such a step is skipped anyway.
    """
    local = [local_part(gradient) for gradient in _gradients(parameters)]
    if local and math.isfinite(max_norm):
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(local, scale.to(local[0].device))


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _exchanged_on(tensor: Tensor) -> torch.device | str:
    """The device on which ranks exchange a tensor's data, even if the tensor itself is kept in CPU memory."""
    return tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device


def _sharding_groups(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
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
        norms = torch.stack(torch._foreach_norm(filled, norm_type))
    else:  # one at a time, since each is copied
        norms = torch.stack([torch.linalg.vector_norm(t / unit.to(t.device, t.dtype), norm_type) for t in filled])
    if norms.dtype in (torch.bfloat16, torch.float16):
        norms = norms.float()
    is_max = math.isinf(norm_type)
    total = (norms.max() if is_max else (norms**norm_type).sum()).to(device)
    for group in groups:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    return total
