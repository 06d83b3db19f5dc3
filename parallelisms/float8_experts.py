"""Float8 products of a mixture's experts: groups of rows, each with its own matrix, and a scale for each row.

The output is the product of rows (n, in) and weights (groups, out, in); the gradient of the rows is that of its rows
(n, out) and the weights. Both factors have a scale for each row along the dimension that is summed over: a power of
two, as in torchao's recipes with rows, which brings the largest absolute value near the largest of e4m3. The gradient
of the weights is computed in the type that they have. So every scale belongs to one token or to weights, and neither
the micro-batch nor other ranks' tokens change a value. Where tensor parallelism cuts the dimension that is summed over,
the largest value is taken over all parts.

Factors are rounded outside of the op that multiplies, so that the compiler joins the rounding with what computes them.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from configs.float8 import Choice
from configs.plan import TENSOR_PARALLEL_DIM, plan_of

_c10d = torch.ops._c10d_functional
_E4M3 = torch.float8_e4m3fn
_EXPONENT = -(1 << 23)
"""Masks the mantissa of a positive float32, which rounds it down to a power of two."""


def apply_to_experts(model: nn.Module, choice: Choice, emulate: bool, tp_group: str) -> None:
    """Let the chosen projections of a model's or stage's experts multiply in float8.

    Args:
        model: whole or a stage; tensor parallelism has not cut it yet.
        choice: of the whole model.
        emulate: multiply the rounded factors in float32 or wider, on any device.
        tp_group: name of the group that tensor parallelism will cut matrices over; "": none.
    """
    plan = plan_of(model)
    for name in plan.experts:
        experts: Any = model.get_submodule(name)
        for projection, _ in experts.named_parameters(recurse=False):
            whole_name = f"{name}.{projection}"
            if whole_name in choice.converted:
                dim = TENSOR_PARALLEL_DIM[plan.tensor_parallel[whole_name]]
                in_group, out_group = (tp_group if dim == cut else "" for cut in (-1, -2))
                experts.products[projection] = partial(
                    multiply, emulate=emulate, in_group=in_group, out_group=out_group
                )


def multiply(
    rows: Tensor, weights: Tensor, counts: Tensor, emulate: bool, in_group: str = "", out_group: str = ""
) -> Tensor:
    """Multiply each group's rows by its matrix.

    Args:
        rows: (n, in), sorted by group; some or all groups may be empty.
        weights: (groups, out, in).
        counts: (groups,) int64, rows of each group.
        emulate: as for `apply_to_experts`.
        in_group, out_group: name of the group of ranks that have the other parts of `in` or `out`; "": it is whole.

    Returns:
        (n, out), of the type of `rows`.
    """
    return _Product.apply(rows, weights, counts, emulate, in_group, out_group)


# Traced through by Dynamo (torch 2.11), the function would have zero gradients, without an error: what it returns comes
# straight from an op that has no gradient of its own. So Dynamo leaves it to AOTAutograd.
@torch.compiler.allow_in_graph
class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, counts: Tensor, emulate: bool, in_group: str, out_group: str
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, counts)
        ctx.emulate = emulate
        ctx.out_group = out_group
        return _product(rows, weights, counts, emulate, in_group, fast_sums=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, counts = ctx.saved_tensors
        grad = gradients[0].contiguous()
        by_rows = by_weights = None
        if ctx.needs_input_grad[0]:
            columns = weights.transpose(1, 2)
            by_rows = _product(grad, columns, counts, ctx.emulate, ctx.out_group, fast_sums=False)
        if ctx.needs_input_grad[1]:
            by_weights = torch.ops.keel.grouped_outer(grad, rows, counts)
        return by_rows, by_weights, None, None, None, None


def _product(rows: Tensor, weights: Tensor, counts: Tensor, emulate: bool, group: str, fast_sums: bool) -> Tensor:
    """Compute what `multiply` does; `group` has the other parts of the dimension that is summed over."""
    factors = []
    for factor in (rows, weights):
        largest = factor.abs().amax(-1)
        if group:
            largest = _c10d.wait_tensor(_c10d.all_reduce(largest, "max", group))
        factors.append(_rounded(factor, largest))
    (rows_in_8_bits, row_units), (weights_in_8_bits, weight_units) = factors
    if emulate:
        wide = torch.promote_types(rows.dtype, torch.float32)
        emulated = [values.to(wide) * units[..., None] for values, units in factors]
        return torch.ops.keel.grouped_mm(*emulated, counts).to(rows.dtype)
    out = torch.ops.keel.grouped_mm_float8(
        rows_in_8_bits, row_units, weights_in_8_bits, weight_units, counts, fast_sums
    )
    return out.to(rows.dtype)


def _rounded(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and round each row.

    Args:
        x: (..., columns).
        largest: (...), the largest absolute value of each row.

    Returns:
        e4m3 of the same shape, contiguous, and what 1 stands for in each row, (...) float32.
    """
    scale = (torch.finfo(_E4M3).max / largest.double().clamp(min=1e-12)).float()
    scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    return (x.float() * scale[..., None]).to(_E4M3).contiguous(), scale.reciprocal()
