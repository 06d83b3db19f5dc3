"""What training asks of an optimizer: an update that the device decides on, and what of the model this rank owns."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer as TorchOptimizer

from parallelisms.compute_copies import ComputeCopies
from parallelisms.grad_norm import clip_grads_with_norm
from parallelisms.owner_partition import OwnerPartition
from trainer.guards.verdict import QueuedStep


class TrainingOptimizer(TorchOptimizer):
    """A torch optimizer, over this rank's part of every parameter, that owns a step's update."""

    max_norm = math.inf
    """Largest norm of the gradients that is not clipped; inf: none is."""
    skips_on_device = False
    """Whether `step` takes `skip`, a float32 scalar on the device (1.: change nothing), and `divisor`, by which it
    divides the gradients; if not, the host waits for the verdict."""
    copies: ComputeCopies | None = None
    """The copies that modules compute with instead of the parameters; None if there are none."""

    def update(self, step: QueuedStep, lr: float) -> None:
        """Clip the gradients and update the parameters, unless the step is skipped; all ranks must call it."""
        set_lr(self, lr)
        if not self.skips_on_device:
            if not step.result().skipped:  # waits for the device
                self.clip(step.norm)
                self._apply()
            return
        divisor = None
        # A kernel divides by a float32 number.
        is_float64 = any(parameter.dtype == torch.float64 for parameter in self._parameters())
        if is_float64:
            self.clip(step.norm)
        elif math.isfinite(self.max_norm):
            divisor = ((step.norm + 1e-6) / self.max_norm).clamp(min=1.0).float()
        self._apply(skip=step.skip, divisor=divisor)

    def clip(self, norm: Tensor) -> None:
        """Clip the gradients, whose global norm is `norm`."""
        clip_grads_with_norm(self._parameters(), self.max_norm, norm)

    def refresh_copies(self) -> None:
        """Copy the parameters' present values to the copies, if there are any."""
        if self.copies:
            self.wait()
            self.copies.refresh()

    def _apply(self, **arguments: Any) -> None:
        """Update parameters and copies; `arguments` are those of `step`."""
        self.step(**arguments)
        self.refresh_copies()

    def _parameters(self) -> list[Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def owned(self) -> dict[Parameter, Tensor]:
        """The weights that this rank saves, by parameter: its part of each."""
        return {parameter: parameter.detach() for parameter in self._parameters()}

    def owned_state(self, parameter: Parameter) -> dict[str, Any]:
        """The state that this rank keeps of a parameter."""
        return self.state.get(parameter, {})

    def owned_were_loaded(self) -> None:
        """Send what was loaded to the ranks that need it: to none, since each has loaded what it needs."""

    def wait(self) -> None:
        """Wait for updated parameters that are being sent: here, none is."""


class JoinedOptimizer(TrainingOptimizer):
    """Several optimizers, each over its own groups, as one."""

    def __init__(self, optimizers: Sequence[TrainingOptimizer]) -> None:
        """Show the groups and the state of `optimizers`, which have been built."""
        self._optimizers = optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups
        for optimizer in optimizers:
            self.state.update(optimizer.state)

    def step(self, closure: None = None, **arguments: Any) -> None:  # type: ignore[override]
        """Update all groups; `arguments` are those of each optimizer's `step`, `closure` is not supported."""
        for optimizer in self._optimizers:
            optimizer.step(**arguments)

    def owned(self) -> dict[Parameter, Tensor]:
        return {parameter: each for optimizer in self._optimizers for parameter, each in optimizer.owned().items()}

    def owned_state(self, parameter: Parameter) -> dict[str, Any]:
        return {key: each for optimizer in self._optimizers for key, each in optimizer.owned_state(parameter).items()}

    def owned_were_loaded(self) -> None:
        for optimizer in self._optimizers:
            optimizer.owned_were_loaded()

    def wait(self) -> None:
        for optimizer in self._optimizers:
            optimizer.wait()


def joined(optimizers: Sequence[TrainingOptimizer]) -> TrainingOptimizer:
    """The optimizers as one."""
    return optimizers[0] if len(optimizers) == 1 else JoinedOptimizer(optimizers)


class OwnerOptimizer(OwnerPartition, TrainingOptimizer):
    """The same over whole parameters, of which each rank owns some."""


def decay(weights: list[Tensor], updates: list[Tensor], rate: float, is_cautious: bool) -> None:
    """Move weights towards zero by a share `rate`; if cautious, only elements that will move there as well.

    Chen et al. 2025, arXiv 2510.12402, algorithm 1. `updates` are subtracted from the weights, to any scale.
    """
    if not is_cautious:
        torch._foreach_mul_(weights, 1 - rate)
        return
    for weight, update in zip(weights, updates, strict=True):
        weight.sub_(weight * (update * weight >= 0) * rate)


def set_lr(optimizer: TorchOptimizer, lr: float) -> None:
    """Set the learning rate of the next update; each group's `lr_scale` multiplies it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
