"""SwiGLU (Shazeer 2020): the feed-forward of a dense layer, also used for a mixture's shared experts."""

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, inner_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner_dim, bias=False)
        self.up_proj = nn.Linear(dim, inner_dim, bias=False)
        self.down_proj = nn.Linear(inner_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., dim) -> the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
