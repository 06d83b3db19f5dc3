"""The feed-forward of a dense layer, also used for a mixture's shared experts (Shazeer 2020; So et al. 2021)."""

import torch.nn.functional as F
from torch import Tensor, nn

from configs.architectures.llama_keys import Activation, has_gate
from configs.schema import Model


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), or with another activation (`model.activation`)."""

    def __init__(self, config: Model, inner_dim: int) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate_proj = nn.Linear(config.dim, inner_dim, bias=False) if has_gate(config.activation) else None
        self.up_proj = nn.Linear(config.dim, inner_dim, bias=False)
        self.down_proj = nn.Linear(inner_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., dim) -> the same shape."""
        gate = None if self.gate_proj is None else self.gate_proj(x)
        return self.down_proj(activate(self.activation, gate, self.up_proj(x)))


def activate(activation: Activation, gate: Tensor | None, up: Tensor) -> Tensor:
    """What a feed-forward does between its matrices; without a gate, the square of what is positive."""
    if gate is None:
        return F.relu(up).square()
    return (F.gelu(gate, approximate="tanh") if activation == "geglu" else F.silu(gate)) * up
