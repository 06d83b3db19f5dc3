"""A second, plain implementation of float8 matmuls, for the reference of the parity table.

It rounds by arithmetic instead of torch's 8-bit types, and knows nothing of torchao.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from configs.schema import Float8
from models.feed_forward import activate
from models.moe import Experts, MixtureOfExperts


class Format(NamedTuple):
    """An 8-bit floating-point type (Micikevicius et al. 2022, table 1)."""

    mantissa: int
    """Bits of the mantissa."""
    lowest_exponent: int
    """Lowest exponent of normal numbers."""
    largest: float


E4M3 = Format(3, -6, 448.0)
E5M2 = Format(2, -14, 57344.0)


def to_format(x: Tensor, kind: Format) -> Tensor:
    """Round float32 values to the nearest that the type has, ties to even; values beyond its range to its largest."""
    x = x.clamp(-kind.largest, kind.largest)
    exponent = torch.frexp(x)[1] - 1  # |x| = m * 2 ** exponent with 1 <= m < 2
    step = torch.exp2((exponent.clamp(min=kind.lowest_exponent) - kind.mantissa).float())
    return torch.round(x / step) * step  # a division by a power of two is exact


def rounded(x: Tensor, kind: Format, dim: int | None) -> Tensor:
    """The values that a float8 matmul computes with instead of `x`, float32.

    Args:
        x: (rows, columns).
        kind: the type.
        dim: the dimension whose elements share a scale, a power of two; None: all elements share one scale.
    """
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (kind.largest / largest.double().clamp(min=1e-12)).float()
    if dim is not None:
        scale = torch.exp2(scale.log2().floor())
    return to_format(x.float() * scale, kind) / scale


class _Product(torch.autograd.Function):
    """y = x w^T and its gradients, each a float32 product of rounded factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.recipe = recipe
        dim = None if recipe == "tensorwise" else 1  # the scales of the dimension that is summed over
        return (rounded(x, E4M3, dim) @ rounded(w, E4M3, dim).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, w) = ctx.saved_tensors
        (grad,) = grads
        recipe = ctx.recipe
        if recipe == "tensorwise":
            g = rounded(grad, E5M2, None)
            return (g @ rounded(w, E4M3, None)).to(x.dtype), (g.t() @ rounded(x, E4M3, None)).to(w.dtype), None
        if recipe == "rowwise":
            grad_x = rounded(grad, E4M3, 1) @ rounded(w, E4M3, 0)
            return grad_x.to(x.dtype), (rounded(grad, E4M3, 0).t() @ rounded(x, E4M3, 0)).to(w.dtype), None
        scale = torch.exp2((E4M3.largest / w.abs().max().double()).float().log2().floor())
        w = to_format(w.float() * scale, E4M3) / scale
        return (rounded(grad, E4M3, 1) @ w).to(x.dtype), grad.t() @ x, None


class _ProductOfTokens(torch.autograd.Function):
    """y = x w^T with a scale for each token and each row or column of w; summed in the type of x, at least float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        wide = torch.promote_types(x.dtype, torch.float32)
        return (rounded(x, E4M3, 1).to(wide) @ rounded(w, E4M3, 1).to(wide).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x, w) = ctx.saved_tensors
        (grad,) = grads
        wide = torch.promote_types(x.dtype, torch.float32)
        return (rounded(grad, E4M3, 1).to(wide) @ rounded(w, E4M3, 0).to(wide)).to(x.dtype), grad.t() @ x


def in_8_bits(model: nn.Module, config: Float8) -> None:
    """Let the matrices of a model's layers multiply in float8, but for those that the config skips."""
    mixtures = {name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}
    for name, mixture in mixtures.items():
        if config.experts and name.startswith("layers."):
            mixture.experts.__dict__["forward"] = partial(
                _apply_experts, mixture.experts, f"{name}.experts", config.skip
            )
    for name, module in model.named_modules():
        is_skipped = any(fnmatchcase(name, pattern) for pattern in config.skip)
        is_of_mixture = any(name.startswith(f"{mixture}.") for mixture in mixtures)
        if isinstance(module, nn.Linear) and name.startswith("layers.") and not is_skipped and not is_of_mixture:
            module.__dict__["forward"] = partial(_multiply, module, config.recipe)


def _multiply(module: nn.Linear, recipe: str, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return _Product.apply(rows, module.weight, recipe).reshape(*x.shape[:-1], -1)


def _apply_experts(
    experts: Experts, name: str, skip: Sequence[str], rows: Tensor, counts: Tensor, **_: object
) -> Tensor:
    """Compute the module's forward pass, one expert after the other."""

    def project(projection: str, expert: int, x: Tensor) -> Tensor:
        weight = experts.get_parameter(projection)[expert]
        is_skipped = any(fnmatchcase(f"{name}.{projection}", pattern) for pattern in skip)
        return x @ weight.t() if is_skipped else _ProductOfTokens.apply(x, weight)

    outputs = []
    for expert, x in enumerate(rows.split(counts.tolist())):
        gate = None if experts.gate_proj is None else project("gate_proj", expert, x)
        hidden = activate(experts.activation, gate, project("up_proj", expert, x))
        outputs.append(project("down_proj", expert, hidden))
    return torch.cat(outputs)
