"""Compares a parallel model with the same model in one process: loss, norm, and each parameter's gradient, by name.

    from keel import prove

    report = prove(reference, parallel, batch, loss=loss, step=step)
    print(report)

Every rank calls `prove` with the whole reference, and compares what it holds itself; the report has the largest
difference of all ranks. This file imports nothing of Keel's, since it also runs inside of other trainers.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

GRADIENT_FLOOR = 1e-5
"""Share of the model's largest gradient that a parameter's gradients are compared with if their own largest is smaller:
some are zero but for round-off, such as those of a bias of keys."""
WEIGHT_FLOOR = 1e-2
"""The same for weights, into which Adam divides the round-off of such gradients."""
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")
"""Parts of names that torch's wrappers of modules add."""

Step = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Report:
    """How far a parallel model is from its reference: relative differences, by name in the order of the reference."""

    bound: float
    """Largest difference that counts as equal."""
    weights: dict[str, float]
    """Initial weights and buffers."""
    loss: float
    norm: float
    gradients: dict[str, float]
    """infinite: only one of both models has a gradient."""

    @property
    def wrong(self) -> list[str]:
        """Names of the parameters whose gradients differ, in the order in which the backward pass reaches them."""
        return above(self.gradients, self.bound)[::-1]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs by more than the bound; a NaN does."""
        scalars = {"loss": self.loss, "norm": self.norm}
        return not (above(self.weights, self.bound) or above(scalars, self.bound) or self.wrong)

    def __str__(self) -> str:
        """One line for each thing that differs; one for everything if nothing does."""
        lines = [f"initial weight {name}: {self.weights[name]:.1e}" for name in above(self.weights, self.bound)[:1]]
        scalars = {"loss": self.loss, "gradient norm": self.norm}
        lines += [f"{name}: {scalars[name]:.1e}" for name in above(scalars, self.bound)]
        if self.wrong:
            first = self.wrong[0]
            count = f"{len(self.wrong)} of {len(self.gradients)} gradients, the first that backward reaches"
            lines.append(f"{count}: {first}: {self.gradients[first]:.1e}")
        if lines:
            return "WRONG\n" + "\n".join(f"  {line}" for line in lines)
        return f"equal: loss, norm and {len(self.gradients)} gradients, to {worst(self.gradients.values()):.1e}"


def prove(
    reference: nn.Module,
    parallel: nn.Module,
    batch: Any,
    *,
    loss: Callable[[nn.Module, Any], Tensor],
    step: Step | None = None,
    whole: Callable[[str, Tensor], Tensor] | None = None,
    bound: float = 1e-10,
) -> Report:
    """Compare one forward and backward pass of a parallel model with one process; all ranks must call it.

    Use float64 for both models: in float32 the bound must be about 1e-4, which hides small faults.

    Args:
        reference: the whole, plain model, with the same weights on every rank.
        parallel: the same model as the trainer parallelizes it, or this rank's pipeline stages, with the same names and
            initial weights. Gradients are DTensors, or plain tensors that this rank holds whole.
        batch: the global batch, the same on every rank.
        loss: the reference's loss of a batch, a scalar.
        step: the trainer's forward and backward pass of the global batch on this rank, up to where the gradients are
            final: returns the global batch's loss, or the loss and the gradient norm, as the trainer reports them.
            Default: `loss` of the whole batch, backward, and the norm of the whole gradients.
        whole: (name, gradient or weight) -> the whole tensor, for a trainer that shards plain tensors.
        bound: largest relative difference that counts as equal.

    Returns:
        The report, the same on all ranks.

    Raises:
        ValueError: a parameter of `parallel` is not in `reference`, or no rank has one of the reference's.
    """
    gather = whole or (lambda _, tensor: whole_tensor(tensor))
    reference.zero_grad()
    expected_loss = loss(reference, batch)
    expected_loss.backward()
    named = {_plain(name): parameter for name, parameter in parallel.named_parameters()}
    expected = dict(reference.named_parameters())
    _check_names(named.keys(), expected.keys())
    buffers = {_plain(name): buffer for name, buffer in parallel.named_buffers()}
    there = dict(reference.named_buffers())
    found = {
        name: gather(name, tensor.detach()) for name, tensor in (named | buffers).items() if name in expected | there
    }
    weights = differences(found, {name: (expected | there)[name].detach() for name in found}, WEIGHT_FLOOR)
    parallel.zero_grad()
    result = (step or _whole_batch(loss))(parallel, batch)
    found_loss, found_norm = result if isinstance(result, tuple) else (result, None)
    grads = {name: gather(name, p.grad) for name, p in named.items() if p.grad is not None}
    expected_grads = {name: p.grad for name, p in expected.items() if p.grad is not None}
    own = differences(grads, expected_grads, GRADIENT_FLOOR, names=named)
    norm = _norm(expected_grads.values())
    squares = merged_over_ranks({name: _norm([grad]) ** 2 for name, grad in grads.items()})
    norm_found = math.sqrt(sum(squares.values())) if found_norm is None else found_norm.item()
    scalars = {"loss": ratio(found_loss.item(), expected_loss.item()), "norm": ratio(norm_found, norm)}
    merged = merged_over_ranks(own)
    return Report(
        bound=bound,
        weights=merged_over_ranks(weights),
        **merged_over_ranks(scalars),
        gradients={name: merged[name] for name in expected if name in merged},
    )


def differences(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float, names: Iterable[str] | None = None
) -> dict[str, float]:
    """Largest difference of each tensor, relative to the largest expected value of the tensor.

    A tensor of a smaller type than float64 may be off by the round-off of a few of its own sums.

    Args:
        found, expected: the tensors, by name.
        floor: share of the largest value of all expected tensors, below which that share replaces a tensor's own.
        names: those to compare; default: all that either has. One that only `expected` or only `found` has is
            infinitely far, as is one of another shape.
    """
    least = floor * max((_largest(tensor) for tensor in expected.values()), default=0.0)
    result = {}
    for name in {**expected, **found} if names is None else names:
        if name in expected and name in found and expected[name].shape == found[name].shape:
            apart = _apart(found[name].to(expected[name]), expected[name])
            size = max(_largest(expected[name]), least)
            beyond = apart - _round_off(expected[name]) * size
            if beyond <= 0:
                result[name] = 0.0
            else:  # also a NaN
                result[name] = beyond / size if size else math.inf
        elif name in expected or name in found:
            result[name] = math.inf
    return result


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor, which all ranks of its mesh must do; another tensor is whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def above(values: Mapping[str, float], bound: float) -> list[str]:
    """Names of the values that are not at most `bound`, in order; a NaN is not."""
    return [name for name, value in values.items() if not value <= bound]


def worst(values: Iterable[float]) -> float:
    """The largest value, 0 if there is none; a NaN is larger than any."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)


def ratio(found: float, expected: float) -> float:
    """Relative difference of two numbers."""
    return abs(found - expected) / abs(expected) if expected else abs(found)


def _apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors; 1 if two of booleans differ."""
    return _largest(found ^ expected if expected.dtype == torch.bool else found - expected)


def _round_off(tensor: Tensor) -> float:
    """Relative round-off of a few sums in a tensor's type; 0 in float64, for which the bounds are made."""
    is_small = tensor.is_floating_point() and tensor.dtype != torch.float64
    return 4 * torch.finfo(tensor.dtype).eps if is_small else 0.0


def _largest(tensor: Tensor) -> float:
    values = tensor.detach().abs() if tensor.is_complex() else tensor.detach().double().abs()
    return values.max().item() if tensor.numel() else 0.0


def _norm(tensors: Iterable[Tensor | None]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors if tensor is not None))


def _plain(name: str) -> str:
    """A parameter's name without what wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _whole_batch(loss: Callable[[nn.Module, Any], Tensor]) -> Step:
    def step(model: nn.Module, batch: Any) -> Tensor:
        value = loss(model, batch)
        value.backward()
        return value.detach()

    return step


def _check_names(own: Iterable[str], expected: Iterable[str]) -> None:
    """Raise ValueError, on all ranks, unless the ranks together have the parameters of the reference."""
    held: set[str] = set().union(*_gathered(list(own)))
    unknown = sorted(held - set(expected))
    missing = sorted(set(expected) - held)
    if unknown:
        raise ValueError(f"the reference has no parameter {unknown[0]} ({len(unknown)} such); both need the same names")
    if missing:
        raise ValueError(f"no rank of the parallel model has the parameter {missing[0]} ({len(missing)} such)")


def _gathered(value: Any) -> list[Any]:
    """The value of each rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    # Names and numbers of every rank.
    dist.all_gather_object(values, value)
    return values


def merged_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """The largest value of each name that any rank has; all ranks must call it."""
    merged: dict[str, float] = {}
    for part in _gathered(values):
        for name, value in part.items():
            merged[name] = worst((merged.get(name, 0.0), value))
    return merged
