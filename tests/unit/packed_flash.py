"""FlashAttention's kernels for packed sequences as a CPU can compute them: by softmax written out, in any type.

It stands in for `torch.ops.aten` in a module that calls CUDA's kernels, and holds the caller to what they rely on and
do not check, or check only on a GPU.
"""

import itertools
import math

import torch
from torch import Tensor


class PackedFlash:
    """`torch.ops.aten` with the two ops computed here."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str):
        return getattr(torch.ops.aten, name)

    def _flash_attention_forward(self, q, k, v, ends_q, ends_k, longest_q, longest_k, dropout, causal, debug, **window):
        self.calls.append("forward")
        _check(q, k, v, ends_q, ends_k, longest_q, longest_k)
        assert (dropout, debug) == (0.0, False)
        out, logsumexp = _packed(q, k, v, ends_q, ends_k, causal, _left(**window))
        nothing = torch.empty(0)
        return out, logsumexp, nothing, nothing, nothing

    def _flash_attention_backward(
        self, grad, q, k, v, out, logsumexp, ends_q, ends_k, longest_q, longest_k, dropout, causal, *random, **window
    ):
        self.calls.append("backward")
        _check(q, k, v, ends_q, ends_k, longest_q, longest_k)
        for each in (grad, out):
            assert each.shape == q.shape
            assert each.stride(-1) == 1
        assert logsumexp.shape == (q.shape[1], q.shape[0])
        assert logsumexp.is_contiguous()
        gradients = [torch.zeros_like(each) for each in (q, k, v)]
        group = q.shape[1] // k.shape[1]
        for queries, keys in _stretches(ends_q, ends_k):
            k_there, v_there = (each[keys].repeat_interleave(group, dim=1) for each in (k, v))
            scores = _scores(q[queries], k_there, causal, _left(**window))
            weights = (scores - logsumexp[:, queries, None]).exp()
            by_weights = torch.einsum("qhd,khd->hqk", grad[queries], v_there)
            delta = (grad[queries] * out[queries]).sum(-1).T[..., None]
            by_scores = weights * (by_weights - delta) / math.sqrt(q.shape[-1])
            gradients[0][queries] = torch.einsum("hqk,khd->qhd", by_scores, k_there)
            by_k = torch.einsum("hqk,qhd->khd", by_scores, q[queries])
            by_v = torch.einsum("hqk,qhd->khd", weights, grad[queries])
            gradients[1][keys] = by_k.unflatten(1, (-1, group)).sum(2)
            gradients[2][keys] = by_v.unflatten(1, (-1, group)).sum(2)
        return gradients


def _check(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, longest_q: int, longest_k: int) -> None:
    for each in (q, k, v):
        assert each.ndim == 3
        assert each.stride(-1) == 1
    for ends, packed, longest in ((ends_q, q, longest_q), (ends_k, k, longest_k)):
        assert (ends.dtype, ends.is_contiguous()) == (torch.int32, True)
        assert (ends[0], ends[-1]) == (0, len(packed))
        assert ends.diff().min() >= 0
        assert ends.diff().max() <= longest
        assert type(longest) is int
    assert len(ends_q) == len(ends_k)


def _stretches(ends_q: Tensor, ends_k: Tensor):
    for queries, keys in zip(itertools.pairwise(ends_q.tolist()), itertools.pairwise(ends_k.tolist()), strict=True):
        yield slice(*queries), slice(*keys)


def _left(window_size_left: int = -1, window_size_right: int = 0) -> int:
    """Keys in reach before a query's own; -1: all."""
    assert window_size_right == 0
    return window_size_left


def _scores(q: Tensor, k: Tensor, causal: bool, left: int) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    if not causal:
        return scores
    last = scores.shape[2] - scores.shape[1]  # the first query's own key
    allowed = torch.ones(scores.shape[1:], dtype=torch.bool).tril(last)
    allowed = allowed.triu(last - left) if left >= 0 else allowed
    return scores.masked_fill(~allowed, -math.inf)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, causal: bool, left: int
) -> tuple[Tensor, Tensor]:
    """Output, and logsumexp (heads, queries), inf where a query sees no key."""
    out, logsumexp = torch.zeros_like(q), q.new_full((q.shape[1], len(q)), math.inf)
    group = q.shape[1] // k.shape[1]
    for queries, keys in _stretches(ends_q, ends_k):
        if keys.stop == keys.start or queries.stop == queries.start:
            continue
        k_there, v_there = (each[keys].repeat_interleave(group, dim=1) for each in (k, v))
        scores = _scores(q[queries], k_there, causal, left)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_there)
        logsumexp[:, queries] = scores.logsumexp(-1)
    return out, logsumexp
