"""RMSNorm (Zhang and Sennrich 2019), as torch has it, and with Gemma's offset."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import Model
from models.moe import unchanged


class OffsetNorm(nn.Module):
    """RMSNorm that multiplies by 1 + weight, with weights that start at 0 (Gemma)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.local: Callable[[Tensor], Tensor] = unchanged
        """Maps the stored weight to the plain tensor to compute with; techniques that shard the weight replace it."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., dim) -> the same shape."""
        wide = torch.promote_types(x.dtype, torch.float32)  # near 1, bfloat16 has steps of 1/128
        factor = 1.0 + self.local(self.weight).to(wide)
        return F.rms_norm(x.to(wide), factor.shape, factor, self.eps).to(x.dtype)


def norm(config: Model, dim: int, eps: float | None = None) -> nn.RMSNorm | OffsetNorm:
    """A norm of the model, over `dim` features; eps: default norm_eps."""
    return (OffsetNorm if config.norm_offset else nn.RMSNorm)(dim, eps=eps or config.norm_eps)
