"""Finds out whether a forward pass draws random numbers, which a mesh would change."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RandomListener(TorchDispatchMode):
    """Listens for random numbers, which every mesh would draw otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.random = ""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attention has the tag for its dropout, whose rate is known.
        if torch.Tag.nondeterministic_seeded in op.tags and "attention" not in str(op) and not self.random:
            self.random = str(op)
        return op(*args, **(kwargs or {}))
