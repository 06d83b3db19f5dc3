"""The losses of the modules that predict further tokens, for the metrics; see models/multi_token.py."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from configs.architectures.llama_keys import n_further
from configs.schema import Config
from models.llama import Llama
from models.multi_token import MultiToken
from parallelisms.mesh import Mesh


class FurtherLosses:
    """The sums that the modules on this rank have recorded; a pipeline's last stage has the modules."""

    def __init__(self, stages: Iterable[nn.Module], config: Config, mesh: Mesh) -> None:
        self._mesh = mesh
        self._modules = [
            cast(MultiToken, module)
            for stage in stages
            if isinstance(stage, Llama)
            for module in stage.multi_token.values()
        ]
        self._sums = torch.zeros(n_further(config.model), 2, dtype=torch.float64, device=mesh.device)
        """(depth, 2), last step: the loss summed over valid targets, and their number."""

    @torch.no_grad()
    def finish_step(self) -> None:
        """Take over a step's sums."""
        if self._modules:
            self._sums = torch.stack([module.loss for module in self._modules])

    @torch.no_grad()
    def forget(self) -> None:
        """Forget the sums of the passes since the last step."""
        for module in self._modules:
            module.loss.zero_()

    def measure(self) -> dict[str, float] | None:
        """The last step's mean loss over the valid targets of each depth, from "1" on, in nats.

        Equal on all ranks, which must all call it; None for a model without such modules.
        """
        if not len(self._sums):
            return None
        # The sums of all tokens of the global batch, which the last stage has.
        sums = self._mesh.sum_over_pp(self._mesh.sum_over_tokens(self._sums.clone()))
        return {str(depth): loss / max(1.0, count) for depth, (loss, count) in enumerate(sums.tolist(), start=1)}
