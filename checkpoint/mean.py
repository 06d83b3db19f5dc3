"""The mean of copies of a weight, computed alike while training and from a checkpoint."""

from collections.abc import Sequence

import torch
from torch import Tensor


def mean_of(copies: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The mean of copies in the weight's type `dtype`; summed in their order, in that type or at least in float32."""
    if len(copies) == 1:
        return copies[0].to(dtype)
    total = torch.zeros_like(copies[0], dtype=torch.promote_types(dtype, torch.float32))
    for copy in copies:
        total += copy
    return (total / len(copies)).to(dtype)
