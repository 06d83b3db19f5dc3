"""A mixture of experts for models of one's own: stacked experts, and a router that balances their load.

A loop over experts, each with the tokens that chose it, asks for values of tensors, and a rank whose tokens choose no
expert would issue other collectives than the rest. These experts compute products of groups of rows instead, so that
every technique takes them; the router, or one of the model's own, says which experts each token goes through.
"""

from typing import Any

import torch
from torch import Tensor

from configs.architectures.llama_keys import Activation
from configs.architectures.llama_keys import Router as RouterKeys
from configs.plan import TensorRole
from models import moe
from models.load import counted
from models.moe import Choice, count, through_experts


class Experts(moe.Experts):
    """Feed-forwards side by side, of which each token goes through a few. A `configs.plan.StackedExperts`."""

    tokens_per_expert: Tensor

    tensor_parallel: dict[str, TensorRole]
    """Tensor parallelism splits each expert by its inner features."""

    def __init__(self, n_experts: int, dim: int, inner_dim: int, activation: Activation = "swiglu") -> None:
        """Make the weights: `gate_proj` and `up_proj` (n_experts, inner_dim, dim), `down_proj` (n_experts, dim,
        inner_dim).

        Args:
            n_experts: their number.
            dim: width of the residual stream.
            inner_dim: inner width of one expert.
            activation: as the key `model.activation`; "relu_squared" has no gate.
        """
        super().__init__(n_experts, dim, inner_dim, activation)
        self.register_buffer("tokens_per_expert", torch.zeros(n_experts, dtype=torch.int64), persistent=False)
        self.tensor_parallel = {"up_proj": "part_column", "down_proj": "part_row"}
        if self.gate_proj is not None:
            self.tensor_parallel["gate_proj"] = "part_column"
        self.packed: dict[str, int] = {}
        self.of_rank: Any = None  # no matrix is packed, so a rank computes with what it stores
        self.compute = super().forward

    def init_buffers(self) -> None:
        """Zero the counts."""
        self.tokens_per_expert = torch.zeros_like(self.tokens_per_expert, dtype=torch.int64)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        """Sum the outputs of each token's experts.

        Args:
            x: (..., dim).
            chosen: (..., k) int64, the experts of each token, all different.
            weights: (..., k), factors on their outputs.

        Returns:
            (..., dim).
        """
        counts = count(chosen.flatten()[None], self.n_experts)[0]
        weights = counted(weights, self.tokens_per_expert, counts)
        outputs = through_experts(self.compute, x.flatten(0, -2), chosen, counts)
        return (outputs * weights.to(x.dtype)[..., None]).sum(-2)


class Router(moe.Router):
    """Scores the experts for each token, chooses the best, and keeps their load even (`models/moe.py`).

    The experts count their tokens.
    """

    def __init__(self, dim: int, n_experts: int, experts_per_token: int, settings: RouterKeys | None = None) -> None:
        """Make the weight, (n_experts, dim).

        Args:
            dim: width of the residual stream.
            n_experts: their number.
            experts_per_token: how many of them each token goes through.
            settings: the keys of `[model.router]`, which a model's options may have as a table of theirs.
        """
        super().__init__(dim, n_experts, experts_per_token, settings or RouterKeys())

    def forward(self, x: Tensor) -> Choice:
        """x: (batch, seq, dim) -> `experts` and their `weights`, both (batch, seq, experts_per_token)."""
        choice = super().forward(x)
        return Choice(choice.experts, counted(choice.weights, self.entropy, choice.load.entropy), choice.load)
