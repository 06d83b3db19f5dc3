"""QK-clip keeps attention logits below a limit by scaling the weights of queries and keys (Kimi K2, 2025, arXiv
2507.20534, section 2.1).

After a step's update, the weights of each head whose largest logit of the step was above the limit are scaled so that
the same queries and keys would give a logit of the limit. Other heads, and weights that heads share, stay as they are.
Muon's updates have full rank, and let logits grow more than AdamW's do; the clip works with any optimizer.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from configs.plan import plan_of
from parallelisms.attention.logits import NotedLogits
from parallelisms.init import local_indices
from parallelisms.mesh import Mesh
from parallelisms.ranks import local_part
from trainer.optimizers.training import TrainingOptimizer


class QkClip:
    """The clip of all attention modules on this rank, over all of its pipeline stages."""

    def __init__(self, limit: float, stages: Mapping[int, nn.Module], n_heads: int, mesh: Mesh) -> None:
        """
        Args:
            limit: the largest logit that is left as it is.
            stages: after `note_logits`, with their parameters in memory.
            n_heads: of a layer of the whole model.
            mesh: the run's.
        """
        self._limit = limit
        self._mesh = mesh
        self._attention: dict[str, Any] = {}
        self._own_rows: dict[str, Tensor] = {}
        """Which rows of each matrix this rank holds, by the parameter's name."""
        self._factors: dict[str, Tensor] = {}
        """What all rows of the matrix are multiplied by, by the parameter's name."""
        for stage in stages.values():
            self._attention |= {name: stage.get_submodule(name) for name in plan_of(stage).attention}
            for name, parameter in stage.named_parameters():
                if name.rpartition(".")[0].rpartition(".")[0] in self._attention:
                    self._own_rows[name] = local_indices(parameter)[0].to(mesh.device)
        self._largest = torch.full((len(self._attention), n_heads), -torch.inf, dtype=torch.float64)
        """The last step's largest logits, by module and head."""

    @property
    def _noted(self) -> list[NotedLogits]:
        return [module.attend for module in self._attention.values()]

    @torch.no_grad()
    def begin_update(self, skip: Tensor) -> None:
        """Find the factors of a step that changes nothing if `skip`, a scalar, is 1.; all ranks must call it."""
        largest = self._largest.new_full(self._largest.shape, -torch.inf, device=self._mesh.device)
        tp = self._mesh.sizes.tp
        own_heads = largest.unflatten(1, (tp, -1))[:, self._mesh.tp.get_local_rank()]
        for row, noted in zip(own_heads, self._noted, strict=True):
            row.copy_(noted.largest)
        # The maximum over the tokens of the global batch, and all heads from the ranks that have them.
        self._largest = self._mesh.max_over_stage(largest)
        is_above = (self._largest > self._limit) & (skip == 0)
        factors = torch.where(is_above, self._limit / self._largest, 1.0)
        for (name, module), of_heads in zip(self._attention.items(), factors, strict=True):
            self._factors |= {f"{name}.{own}": rows for own, rows in module.row_factors(of_heads).items()}

    @torch.no_grad()
    def scale(self, optimizer: TorchOptimizer, *_: Any) -> None:
        """Scale what an optimizer has updated; a hook after its step."""
        # Copies that modules compute with, which the step itself may have written before the clip.
        kept = optimizer.copies.kept if isinstance(optimizer, TrainingOptimizer) and optimizer.copies else {}
        for group in optimizer.param_groups:
            for name, parameter in zip(group.get("param_names", ()), group["params"], strict=True):
                if name in self._factors and parameter.grad is not None:
                    weight = local_part(parameter.detach())
                    factors = self._factors[name].to(weight.dtype)
                    if len(weight) < len(factors):  # an optimizer that needs whole matrices may have gathered them
                        factors = factors[self._own_rows[name]]
                    weight.mul_(factors.view(-1, *[1] * (weight.ndim - 1)).to(weight.device))
                    if parameter in kept:
                        kept[parameter].copy_(weight)

    def forget(self) -> None:
        """Forget what was noted."""
        for noted in self._noted:
            noted.init_buffers()

    def measure(self) -> float | None:
        """The last step's largest logit, equal on all ranks, which must all call it; None if it is not finite."""
        found = self._largest.max() if len(self._largest) else self._largest.new_tensor(-torch.inf)
        largest = float(self._mesh.max_over_all(found.to(self._mesh.device)))
        return largest if abs(largest) < torch.inf else None
