"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982).

It updates a matrix by the orthogonal matrix nearest to its momentum. This needs the whole matrix, so Muon runs where
whole parameters have owners. AdamW updates the norms, and also the embedding and the head, whose rows are looked up or
compared one by one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon

from trainer.optimizers import rule

NEWTON_SCHULZ_STEPS = 5
"""Iterations that orthogonalize the momentum, as many as its author takes."""


class Rule(rule.Rule):
    """One momentum of each matrix."""

    hidden_matrices_only = True

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def without_state(self, groups: list[dict[str, Any]]) -> Muon:
        config = self.config
        # The adjustment makes updates as large as AdamW's, so that one learning rate fits both.
        return Muon(groups, momentum=config.momentum, ns_steps=NEWTON_SCHULZ_STEPS, adjust_lr_fn="match_rms_adamw")
