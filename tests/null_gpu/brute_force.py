"""The largest logits of heads by all products of queries and keys, in some cases."""

import torch
from torch import Tensor


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


def case(name: str, times: int = 1, head_dim: int = 0) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """The arguments of the kernel: q, k, documents, the place of the first query, and the window.

    Args:
        name: of the case.
        times: how many times as long as in `CASES` the parts are.
        head_dim: in place of that of `CASES`.
    """
    n_rows, first, window, document, heads_of_key, width = CASES[name]
    n_rows, first, window, document = (times * each for each in (n_rows, first, window, document))
    generator = torch.Generator().manual_seed(3)
    seq_len = first + n_rows + 3  # later keys, which no query sees
    # (batch, seq, heads, head_dim) in memory, as projections have it.
    q = torch.randn(2, n_rows, 2 * heads_of_key, head_dim or width, generator=generator).transpose(1, 2)
    k = torch.randn(2, seq_len, 2, head_dim or width, generator=generator).transpose(1, 2)
    numbers = (torch.arange(2 * seq_len).view(2, seq_len) // document).int() if document else None
    return q, k, numbers, first, window
