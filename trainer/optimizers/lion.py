"""Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2): the sign of a momentum; half of AdamW's state.

Every element moves by the learning rate in each step, so `optimizer.lr` is 3 to 10 times smaller than AdamW's, and
`weight_decay` as many times larger; the paper's betas are 0.9 and 0.99.
"""

from typing import Any

import torch
from torch import Tensor

from parallelisms.ranks import local_part
from trainer.optimizers import rule
from trainer.optimizers.training import TrainingOptimizer, decay


class Lion(TrainingOptimizer):
    """Lion over this rank's part of every parameter.

    Shards change no bit, since products and sums are separate operations, which round all elements in the same way.
    (CPUs fuse `add(alpha=...)` for whole vectors of elements, but not for the remainder.)
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient; `closure` is not supported."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not trained:
                continue
            weights = [local_part(parameter.detach()) for parameter in trained]
            gradients = [local_part(parameter.grad) for parameter in trained]
            momenta = [local_part(self.state[parameter]["exp_avg"]) for parameter in trained]
            of_update, of_momentum = group["betas"]
            update = _interpolated(momenta, gradients, of_update)
            torch._foreach_sign_(update)
            decay(weights, update, group["lr"] * group["weight_decay"], group["cautious"])
            torch._foreach_mul_(update, group["lr"])
            torch._foreach_sub_(weights, update)
            torch._foreach_copy_(momenta, _interpolated(momenta, gradients, of_momentum))


def _interpolated(momenta: list[Tensor], gradients: list[Tensor], beta: float) -> list[Tensor]:
    """beta * momentum + (1 - beta) * gradient, in new memory."""
    interpolated = torch._foreach_mul(momenta, beta)
    torch._foreach_add_(interpolated, torch._foreach_mul(gradients, 1 - beta))
    return list(interpolated)


class Rule(rule.Rule):
    """One momentum of each parameter."""

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    def without_state(self, groups: list[dict[str, Any]]) -> Lion:
        betas = self.config.betas[0], self.config.betas[1]
        return Lion(groups, {"lr": self.config.lr, "betas": betas, "cautious": self.config.cautious_weight_decay})
