"""The last part of a step: gradients are clipped, and parameters updated, unless the verdict is to skip the step."""

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from configs.schema import Config
from parallelisms.compute_copies import ComputeCopies
from parallelisms.grad_norm import clip_grads_with_norm
from trainer.guards.verdict import Verdict
from trainer.optimizers.adamw import RowAdamW
from trainer.optimizers.build import TrainingOptimizer
from trainer.optimizers.rule import rule_of


@dataclass(frozen=True)
class Update:
    """Updates a model's parameters by an optimizer that has been built for them."""

    optimizer: TrainingOptimizer
    parameters: Collection[Parameter]
    max_norm: float
    """Largest norm of the gradients that is not clipped; inf: none is."""
    skips_on_device: bool
    """Whether the optimizer's kernel reads there whether to skip; if not, the host waits for the verdict."""
    clips_on_device: bool
    """Whether that kernel clips as well. (It divides by a float32 number, and so not where gradients are float64.)"""
    copies: ComputeCopies | None
    """The copies that modules compute with instead of the parameters; None if there are none."""

    def __call__(self, verdict: Verdict) -> None:
        """Clip and update, unless the verdict is to skip the step; all ranks must call it."""
        if not self.skips_on_device:
            if not verdict.result().skipped:
                self.clip(verdict.norm)
                self.optimizer.step()
                self.refresh_copies()
            return
        divisor = None
        if not self.clips_on_device:
            self.clip(verdict.norm)
        elif math.isfinite(self.max_norm):
            divisor = ((verdict.norm + 1e-6) / self.max_norm).clamp(min=1.0).float()
        if self.copies and isinstance(self.optimizer, RowAdamW):
            self.optimizer.step(skip=verdict.skip, divisor=divisor, compute_copies=self.copies.kept)
        else:
            self.optimizer.step(skip=verdict.skip, divisor=divisor)  # type: ignore[call-overload]  # see `RowOptimizer`
            self.refresh_copies()

    def refresh_copies(self) -> None:
        """Copy the parameters' present values to the copies, if there are any."""
        if self.copies:
            self.optimizer.wait()
            self.copies.refresh()

    def clip(self, norm: Tensor) -> None:
        """Clip the gradients, whose global norm is `norm`."""
        clip_grads_with_norm(self.parameters, self.max_norm, norm)


def build_update(
    config: Config,
    device: torch.device,
    optimizer: TrainingOptimizer,
    parameters: Collection[Parameter],
    copies: ComputeCopies | None,
) -> Update:
    """Decide once how the parameters are updated."""
    training = config.training
    dtype = getattr(torch, config.training.dtype)
    rule = rule_of(config.optimizer.name)(config.optimizer, exact=training.reduction == "exact")
    skips = rule.skips_on_device(device.type, dtype) and not config.fsdp.cpu_offload
    return Update(optimizer, parameters, training.max_norm, skips, dtype != torch.float64, copies)
