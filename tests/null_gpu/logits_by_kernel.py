"""The kernel of the largest logits in Triton's interpreter, and all products: both results of some cases, as JSON.

Triton's own functions are interpreted as well, so the variable is set before it is imported, in a process of its own.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from parallelisms.attention import logits_kernel


def brute_force(q: Tensor, k: Tensor, numbers: Tensor | None, first: int, window: int) -> Tensor:
    """By all products."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    queries = torch.arange(first, first + q.shape[2])[:, None]
    at = torch.arange(k.shape[2])
    seen = (at <= queries) & (at > queries - (window or k.shape[2]))
    if numbers is not None:
        seen = seen & (numbers[:, None, first : first + q.shape[2], None] == numbers[:, None, None, :])
    return (q @ keys.transpose(2, 3)).where(seen, -torch.inf).amax((0, 2, 3))


CASES = {
    "whole sequences": (40, 0, 0, 0, 2, 16),
    "a part of each": (24, 40, 0, 0, 1, 8),
    "a window": (70, 0, 5, 0, 3, 12),
    "a window in a part": (20, 50, 30, 0, 2, 24),
    "documents": (50, 0, 0, 7, 1, 16),
    "documents and a window in a part": (33, 31, 4, 9, 2, 40),
}
"""Queries, the first one's place, window, length of documents, heads of a key, width of a head."""


def results(name: str) -> tuple[list[float], list[float]]:
    """By the kernel, and by all products."""
    n_rows, first, window, document, heads_of_key, head_dim = CASES[name]
    generator = torch.Generator().manual_seed(3)
    seq_len = first + n_rows + 3  # later keys, which no query sees
    # (batch, seq, heads, head_dim) in memory, as projections have it.
    q = torch.randn(2, n_rows, 2 * heads_of_key, head_dim, generator=generator).transpose(1, 2)
    k = torch.randn(2, seq_len, 2, head_dim, generator=generator).transpose(1, 2)
    numbers = (torch.arange(2 * seq_len).view(2, seq_len) // document).int() if document else None
    given = q, k, numbers, first, window
    return logits_kernel.largest_of_heads(*given).tolist(), brute_force(*given).tolist()


if __name__ == "__main__":
    logits_kernel.ROWS = logits_kernel.KEYS = 16  # several blocks
    print(json.dumps({name: results(name) for name in CASES}))
