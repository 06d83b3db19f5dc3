"""The experts of a model of `transformers`, computed as Keel's own are: rows sorted by expert, and grouped products.

In transformers' mixtures the matrices of a layer's experts are stacked, in modules of the decorator
`use_experts_implementation`. It declares what the parameters are (a gate beside the up projection, biases, transposed
matrices), and its functions compute all families' experts by that declaration. So does this file, for the same formula.

A declaration that a family's own loop does not keep would train another model. So each module is tried when it is
built: a small copy of it computes a few tokens in float64, by the family's own loop and by the grouped products. Where
they differ the family's own computation stays, and expert parallelism is refused.

How many tokens each expert has got is counted in the backward pass (`models/load.py`).

Tensor parallelism splits each expert by its inner features. Families store gate and up one after the other, feature by
feature in turns, transposed or not. The trial finds which it is: the copy is cut in two, and the sum of both halves
must be the whole. Where no cut is right, each rank computes all of the experts.
"""

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.plan import TENSOR_PARALLEL_DIM, TensorRole
from models.grouped_mm import grouped_mm
from models.load import counted
from models.moe import count, through_experts, unchanged

_LARGEST_DIFFERENCE = 1e-5
"""Relative to a token's largest output in the trial: some families compute a part in float32, whatever the type."""


class FoundExperts(NamedTuple):
    """What was found in a family."""

    names: tuple[str, ...]
    """Modules that now compute by grouped products."""
    why_not: str
    """Why expert parallelism can't distribute the experts, as the rest of a sentence that begins with the family's
    name; empty if it can."""


def compute_experts_in_groups(family: nn.Module, blocks: tuple[str, ...]) -> FoundExperts:
    """Let a family's stacked experts compute by grouped products.

    Args:
        family: of `transformers`, on the meta device. The forward pass of its experts is replaced.
        blocks: names of its layers.
    """
    names: list[str] = []
    reasons: list[str] = []
    for name, module in family.named_modules():
        if not _is_declared(module):
            continue
        if why_not := _why_not_in_groups(module):
            reasons.append(f"{why_not}, in {name}")
            continue
        _replace_forward(module)
        module.tensor_parallel, module.packed = _how_to_split(module)
        names.append(name)
        if not name.startswith(tuple(f"{block}." for block in blocks)):
            reasons.append(f"has experts outside of its layers, in {name}")
    if not names and not reasons:
        reasons.append("has no stacked experts (modules of use_experts_implementation)")
    return FoundExperts(tuple(names), next(iter(reasons), ""))


def give_all_a_gradient(family: nn.Module, blocks: tuple[str, ...], grouped: tuple[str, ...]) -> None:
    """Let experts that a family computes by a loop of its own have a gradient, zero, where no token has chosen them.

    Such a loop leaves out experts without tokens. A rank without their gradients would reduce fewer than the others
    (FSDP passes over None): LongCat-Flash, whose tokens may all choose experts that compute nothing, ended in a
    collective of unequal sizes.

    Args:
        family: of `transformers`.
        blocks: names of its layers.
        grouped: modules whose experts are computed by grouped products, which all have gradients.
    """
    for block in blocks:
        layer = family.get_submodule(block)
        left_out = tuple(name.removeprefix(f"{block}.") for name in grouped if name.startswith(f"{block}."))
        names = [
            name
            for name, _ in layer.named_parameters()
            if "expert" in name and "shared" not in name and not name.startswith(left_out)
        ]
        if names:
            layer.register_forward_hook(partial(_use_all, names))


def _use_all(names: list[str], layer: nn.Module, _inputs: Any, output: Any) -> Any:
    if next(layer.parameters(), None) is None:  # in the place of another pipeline stage's layer
        return output
    parameters = [layer.get_parameter(name) for name in names]
    if isinstance(output, tuple):
        return (_Used.apply(output[0], *parameters), *output[1:])
    return _Used.apply(output, *parameters)


class _Used(torch.autograd.Function):
    """Passes hidden states on; the gradients of all parameters are zeros."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return hidden.clone()  # FSDP warns of views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[0], *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def _is_declared(module: Any) -> bool:
    """Whether a module is of the decorator, which keeps the family's own loop beside its choice of a function."""
    return hasattr(module, "is_transposed") and hasattr(type(module).forward, "__wrapped__")


def _replace_forward(experts: Any) -> None:
    experts.tokens_per_expert = torch.zeros(experts.num_experts, dtype=torch.int64)
    experts.local = unchanged
    experts.of_rank = _as_stored
    experts.compute = partial(_in_groups, experts)
    experts.forward = partial(_weighted_sum, experts)


def _as_stored(name: str, parameter: Tensor) -> Tensor:
    """Return the parameter: the place of what tensor parallelism makes of a rank's part."""
    return parameter


def _weighted_sum(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The forward pass, as transformers' functions have it.

    Args:
        experts: the module.
        hidden: (tokens, dim).
        chosen: (tokens, k) int64, the experts of each token.
        weights: (tokens, k).

    Returns:
        (tokens, dim), summed in the type of the weights and in that of `hidden`.
    """
    assert chosen.shape == weights.shape, (chosen.shape, weights.shape)
    counts = count(chosen[None], experts.num_experts)[0]
    weights = counted(weights, experts.tokens_per_expert, counts)
    outputs = through_experts(experts.compute, hidden, chosen, counts)
    return (outputs * weights[..., None]).sum(1).to(hidden.dtype)


def _in_groups(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """Apply to each row its expert, as `models.moe.Experts` does."""
    up = _projected(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, counts)
    inner = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)
    return _projected(experts, "down_proj", inner, counts)


def _projected(experts: Any, name: str, rows: Tensor, counts: Tensor) -> Tensor:
    weights = experts.of_rank(name, experts.local(getattr(experts, name)))
    rows = rows.to(weights.dtype)
    out = grouped_mm(rows, weights.transpose(1, 2) if experts.is_transposed else weights, counts)
    if not experts.has_bias:
        return out
    # A product with ones adds a bias to its rows, and its gradients are added up in one order. Torch's kernel takes
    # rows of 16 bytes, so there are eight features, of which one is the bias.
    bias = experts.of_rank(f"{name}_bias", experts.local(getattr(experts, f"{name}_bias")))
    return out + grouped_mm(rows.new_ones(rows.shape[0], 8), F.pad(bias[..., None], (0, 7)), counts)


# --------------------------------------------------------------------------- the trial


def _shapes(experts: Any, n: int, dim: int, inner: int) -> dict[str, tuple[int, ...]]:
    """The parameters that a module declares, and their shapes."""
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    sizes = {up: (inner * (1 + experts.has_gate), dim), "down_proj": (dim, inner)}
    shapes = {name: (n, *(reversed(size) if experts.is_transposed else size)) for name, size in sizes.items()}
    return shapes | ({f"{name}_bias": (n, size[0]) for name, size in sizes.items()} if experts.has_bias else {})


def _why_not_in_groups(experts: Any) -> str:
    """Why a module can't be computed by grouped products; "" if it can."""
    own: dict[str, tuple[int, ...]] = {name: tuple(parameter.shape) for name, parameter in experts.named_parameters()}
    n, *sizes = own.get("down_proj", (0, 0, 0))
    dim, inner = reversed(sizes) if experts.is_transposed else sizes
    if own != _shapes(experts, n, dim, inner) or n != experts.num_experts:
        return f"has experts with parameters of its own ({', '.join(own)})"
    try:
        difference = _tried(experts)
    except Exception as error:  # whatever the family's code makes of small sizes
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"has experts whose small copy fails ({reason})"
    is_equal = difference <= _LARGEST_DIFFERENCE
    return "" if is_equal else f"computes its experts otherwise than it declares ({difference:.0e} off)"


@torch.no_grad()
def _tried(experts: Any) -> float:
    """The largest difference between a module's own loop and the grouped products, of a small copy and few tokens."""
    tried, given = _small_copy(experts)
    own: Callable = type(experts).forward.__wrapped__
    return _difference(_weighted_sum(tried, *given), own(tried, *given))


@torch.no_grad()
def _how_to_split(experts: Any) -> tuple[dict[str, TensorRole], dict[str, int]]:
    """How tensor parallelism may split a module by inner features.

    Returns:
        The role of each parameter that it splits, and how many matrices lie one after the other along the dimension of
        the split, where there are several. Both are empty if the module can't be split.
    """
    by_rows: TensorRole = "part_row" if experts.is_transposed else "part_column"
    by_columns: TensorRole = "part_column" if experts.is_transposed else "part_row"
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    roles: dict[str, TensorRole] = {up: by_rows, "down_proj": by_columns}
    if experts.has_bias:
        roles[f"{up}_bias"] = "part_row"  # of its only dimension besides the experts
    tried, given = _small_copy(experts)
    whole = _weighted_sum(tried, *given)
    for n_packed in (2, 1) if experts.has_gate else (1,):
        packed = {name: n_packed for name in roles if name.startswith(up) and n_packed > 1}
        halves = [_weighted_sum(_half(tried, half, roles, packed), *given) for half in range(2)]
        if _difference(halves[0] + halves[1], whole) <= _LARGEST_DIFFERENCE:
            return roles, packed
    return {}, {}


def _small_copy(experts: Any) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    """A small copy of a module on the CPU in float64, and what its forward pass is given."""
    with torch.device("cpu"):
        tried = copy(experts)
        tried.num_experts = 3
        shapes = _shapes(experts, 3, dim=6, inner=4)
        parameters = {name: nn.Parameter(_waves(*shape)) for name, shape in shapes.items()}
        _compute_with(tried, parameters)
        scales = torch.tensor([0.1, 1.0, 10.0, 100.0])[:, None]  # a gate may clamp what is large
        hidden = _waves(4, 6) * scales
        chosen = torch.tensor([[0, 2], [2, 0], [2, 0], [0, 2]])  # one expert has no token
        weights = _waves(4, 2).abs()
    return tried, (hidden, chosen, weights)


def _half(experts: Any, half: int, roles: Mapping[str, TensorRole], packed: Mapping[str, int]) -> Any:
    """The module with one half of the inner features; a bias that is not split is added by the first half."""
    parameters = {}
    for name, parameter in experts.named_parameters():
        if name in roles:
            dim = TENSOR_PARALLEL_DIM[roles[name]]
            parts = parameter.chunk(packed.get(name, 1), dim)
            parameters[name] = nn.Parameter(torch.cat([part.chunk(2, dim)[half] for part in parts], dim))
        else:
            parameters[name] = nn.Parameter(parameter * (half == 0))
    found = copy(experts)
    _compute_with(found, parameters)
    return found


def _compute_with(experts: Any, parameters: dict[str, nn.Parameter]) -> None:
    experts.__dict__["_parameters"] = parameters
    _replace_forward(experts)


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a token's features, relative to the largest of them."""
    return float(((found - expected).abs().amax(1) / expected.abs().amax(1)).max())


def _waves(*shape: int) -> Tensor:
    """Values between -1 and 1, of which no two are alike, and which no random stream is asked for."""
    n = torch.Size(shape).numel()
    return (torch.arange(1, n + 1, dtype=torch.float64) ** 1.5).sin().view(shape)
