"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982).

It updates a matrix by the orthogonal matrix nearest to its momentum. This needs the whole matrix: where ranks hold
parts, they exchange them (`parallelisms/whole_matrices.py`), in bfloat16, in which a matrix is orthogonalized anyway.
The momentum is sharded like the parameter. An expert's matrices are matrices like others. AdamW updates the norms, and
also the embedding and the head, whose rows are looked up or compared one by one.

With the defaults it computes what `torch.optim.Muon` does, which continues its exported state.
"""

import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from parallelisms.ranks import local_part
from parallelisms.whole_matrices import WholeMatrices
from trainer.optimizers import rule
from trainer.optimizers.training import TrainingOptimizer

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5, the same in each iteration."""
STEPS = 5
"""Iterations that orthogonalize the momentum, as many as its author takes."""
_SMALLEST_NORM = 1e-7


class Muon(TrainingOptimizer):
    """Muon over this rank's part of every matrix, or stack of matrices.

    Shards change no bit: products and sums of elements are separate operations, which round all elements in the same
    way, and a matrix is orthogonalized whole, by one rank and apart from others.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        matrices: WholeMatrices,
        stacked: Mapping[str, int],
        settings: Mapping[str, Any],
    ) -> None:
        """Create the optimizer without its state.

        Args:
            groups: as for torch's, with names.
            matrices: computes with whole matrices.
            stacked: how many matrices a parameter has one below the other, by name; others are one.
            settings: those of `torch.optim.Muon`.
        """
        super().__init__(groups, dict(settings))
        self._matrices = matrices
        self._stacked = {
            parameter: stacked.get(name, 1)
            for group in self.param_groups
            for name, parameter in zip(group.get("param_names", ()), group["params"], strict=True)
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the matrices that have a gradient; all ranks of a pipeline stage must call it.

        Args:
            closure: not supported.
        """
        trained = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        # One after the other, here and below: all at once, the temporaries would take as much memory as the gradients.
        directions = [
            self._direction(parameter, group["momentum"])
            for group, members in zip(self.param_groups, trained, strict=True)
            for parameter in members
        ]
        if not directions:
            return
        stacked = {parameter: self._stacked[parameter] for members in trained for parameter in members}
        orthogonal = iter(self._matrices.map(_orthogonal, stacked, directions))
        for group, members in zip(self.param_groups, trained, strict=True):
            for parameter, update in zip(members, islice(orthogonal, len(members)), strict=True):
                self._move(parameter, update, group)

    def _direction(self, parameter: Tensor, momentum: float) -> Tensor:
        """Add the gradient to the momentum; returns what is orthogonalized, Nesterov's momentum, in bfloat16."""
        average = local_part(self.state[parameter]["momentum_buffer"])
        assert parameter.grad is not None
        gradient = local_part(parameter.grad) * (1 - momentum)
        average.mul_(momentum).add_(gradient)
        return gradient.add_(average * momentum).bfloat16()

    def _move(self, parameter: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
        weight = local_part(parameter.detach())
        rows, columns = parameter.shape[-2:]
        if parameter.ndim == 2:
            rows //= self._stacked[parameter]
        # Updates as large as AdamW's, so that one learning rate fits both (Liu et al., section 2.2).
        scale = 0.2 * math.sqrt(max(rows, columns)) * group["lr"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update.to(weight.device, weight.dtype).mul_(-scale))


def _orthogonal(matrix: Tensor) -> Tensor:
    """Nearly the nearest orthogonal matrix, whose singular values are about 1; (rows, columns), bfloat16."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    a, b, c = NEWTON_SCHULZ
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Rule(rule.Rule):
    """One momentum of each matrix."""

    hidden_matrices_only = True

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def without_state(self, groups: list[dict[str, Any]]) -> Muon:
        settings: dict[str, Any] = {
            "lr": self.config.lr,
            "momentum": self.config.momentum,
            "nesterov": True,
            "ns_steps": STEPS,
        }
        settings |= {"ns_coefficients": NEWTON_SCHULZ, "eps": _SMALLEST_NORM, "adjust_lr_fn": "match_rms_adamw"}
        return Muon(groups, WholeMatrices(self.mesh), self.stacked, settings)
