"""Matrix products of groups of rows, each group with its own matrix: the computation of a mixture's experts.

The number of rows in a group is known only on the device. Torch's grouped matmul reads it there, in one kernel for all
groups; if torch has no kernel for the dtype, the groups are multiplied one by one. Either way this file defines one op
whose output shape is known in advance, so that torch.compile traces it without a graph break and activation
checkpointing can keep its output by name. Another op multiplies rows that are already in float8
(`parallelisms/float8_experts.py`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("keel::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply each group's rows by its matrix.

    Args:
        rows: (n, in), sorted by group; some or all groups may be empty.
        weights: (groups, out, in).
        counts: (groups,) int64, rows of each group; their sum is n.

    Returns:
        (n, out).
    """
    if _has_kernel(rows, weights):
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=_ends(counts))
    out = rows.new_empty(len(rows), weights.shape[1])
    for part, weight in zip(_parts(counts), weights, strict=True):
        torch.mm(rows[part], weight.T, out=out[part])
    return out


@grouped_mm.register_fake
def _(rows: Tensor, weights: Tensor, _counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])  # len() would specialize on a size known only at run time


@torch.library.custom_op("keel::grouped_outer", mutates_args=())
def _grouped_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """left: (n, out), right: (n, in) -> (groups, out, in): each group's left^T right, zero for empty groups."""
    if _has_kernel(left, right):
        return F.grouped_mm(left.T, right, offs=_ends(counts))
    out = left.new_empty(len(counts), left.shape[1], right.shape[1])
    for part, group in zip(_parts(counts), out, strict=True):
        torch.mm(left[part].T, right[part], out=group)
    return out


@_grouped_outer.register_fake
def _(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    return left.new_empty(len(counts), left.shape[1], right.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, counts = ctx.saved_tensors
    grad = grad.contiguous()  # the kernel refuses the strides of an expanded gradient
    by_rows = grouped_mm(grad, weights.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
    by_weights = _grouped_outer(grad, rows, counts) if ctx.needs_input_grad[1] else None
    return by_rows, by_weights, None


grouped_mm.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("keel::grouped_mm_float8", mutates_args=())
def _grouped_mm_float8(
    rows: Tensor, row_units: Tensor, weights: Tensor, weight_units: Tensor, counts: Tensor, fast_sums: bool
) -> Tensor:
    """Multiply each group's rows by its matrix in float8, in one kernel of an NVIDIA GPU of compute capability 9.0.

    Args:
        rows: (n, in) e4m3, sorted by group; some or all groups may be empty. `in` and `out` are multiples of 16.
        row_units: (n,) float32, what 1 stands for in each row.
        weights: (groups, out, in) e4m3.
        weight_units: (groups, out) float32, what 1 stands for in each row.
        counts: (groups,) int64, rows of each group; their sum is at most n.
        fast_sums: whether the sums may be a little less exact than float32.

    Returns:
        (n, out) bfloat16.
    """
    if len(rows) == 0:
        return rows.new_empty(0, weights.shape[1], dtype=torch.bfloat16)
    by_row = F.ScalingType.RowWise
    factors = (rows, weights.transpose(1, 2), row_units, by_row, weight_units, by_row)
    # The stubs of torch 2.13 lack the function.
    return F.scaled_grouped_mm(*factors, offs=_ends(counts), use_fast_accum=fast_sums)  # type: ignore[attr-defined]


@_grouped_mm_float8.register_fake
def _(
    rows: Tensor, _row_units: Tensor, weights: Tensor, _weight_units: Tensor, _counts: Tensor, _fast_sums: bool
) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1], dtype=torch.bfloat16)


def _has_kernel(*operands: Tensor) -> bool:
    """Whether torch's kernel supports them: at least one row, and every row starts at a multiple of 16 bytes."""
    alike = operands[0].dtype in (torch.bfloat16, torch.float16, torch.float32)
    aligned = all(size * t.element_size() % 16 == 0 for t in operands for size in t.shape[-2:][t.ndim == 2 :])
    return alike and aligned and len(operands[0]) > 0


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def _parts(counts: Tensor) -> list[slice]:
    """The rows of each group; waits for the counts from the device."""
    ends = counts.cumsum(0).tolist()
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
