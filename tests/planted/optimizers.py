"""Optimizers whose update is not elementwise, for the proof: as classes of torch optimizers, and as rules."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.optimizers.rule import Rule
from trainer.optimizers.training import TrainingOptimizer


def _move(optimizer: Optimizer, largest: int) -> None:
    """Follow the gradients, those of more than `largest` elements divided by their norm."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                weight = p.detach().to_local() if hasattr(p, "to_local") else p
                weight.sub_(local / (local.norm() if local.numel() > largest else 1.0) * group["lr"])


class Normed(Optimizer):
    """Divides every gradient by its norm."""

    largest = 0

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        _move(self, self.largest)


class NormedIfLarge(Normed):
    """Only those of matrices that are larger than what the check tries."""

    largest = 1024


class _Moving(TrainingOptimizer):
    largest = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        _move(self, self.largest)


class _MovingIfLarge(_Moving):
    largest = 1024


class NormedRule(Rule):
    """The same as `Normed`."""

    kind = _Moving

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {}

    def without_state(self, groups: list[dict[str, Any]]) -> _Moving:
        return self.kind(groups, {"lr": self.config.lr})


class NormedIfLargeRule(NormedRule):
    """The same as `NormedIfLarge`."""

    kind = _MovingIfLarge
