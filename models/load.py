"""Counting the load of experts in the backward pass.

That runs once, where recomputation repeats the forward pass, and not at all in validation.
"""

from typing import Any

import torch
from torch import Tensor


def counted(weights: Tensor, total: Tensor, amount: Tensor) -> Tensor:
    """Pass a tensor on; its backward pass adds `amount` to `total`, which autograd does not see change.

    Args:
        weights: of the chosen experts, or anything else that has a gradient.
        total: of the shape of `amount`, such as the tokens of each expert.
        amount: how much a micro-batch adds.
    """
    return _Counted.apply(weights, total, amount)


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, total: Tensor, amount: Tensor) -> Tensor:
        ctx.save_for_backward(total, amount)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _added(gradients[0], *ctx.saved_tensors), None, None


@torch.library.custom_op("keel::added_to_load", mutates_args=())
def _added(gradient: Tensor, total: Tensor, amount: Tensor) -> Tensor:
    """Add to the load, of which the computation knows nothing; returns the gradient."""
    total.data.add_(amount)  # autograd, which has saved the tensor, must not see it change
    return gradient.clone()


@_added.register_fake
def _(gradient: Tensor, _total: Tensor, _amount: Tensor) -> Tensor:
    return torch.empty_like(gradient)
