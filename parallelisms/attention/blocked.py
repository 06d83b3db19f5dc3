"""Attention of some queries to one block of keys, in a form that lets blocks be merged.

The softmax over several blocks is exact given each block's output and logsumexp: the outputs are averaged with weights
exp(logsumexp), as FlashAttention does inside its kernel (Dao et al. 2022, section 3.1) and ring attention across ranks
(Liu et al. 2023). Backward is simpler still: given the output and logsumexp over all blocks, each block's gradients
are computed independently, and add up.

PyTorch's flash kernels return and accept the logsumexp. They are used where they exist (CPU: every dtype; CUDA: 16-bit
dtypes); otherwise the scores are materialized. The queries and keys of one document are contiguous in a block, so the
CUDA kernel takes them as packed sequences. On a CPU, and where scores are materialized, the document mask is built for
one tile of queries at a time, so no (queries x keys) tensor exists for a whole block.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from parallelisms.attention.backend import fused, fused_backward

# Elements of a tile's mask, and of its scores for one head. On a CPU, whose kernel does not materialize scores, that is
# 16 MiB in float32; on a GPU with 32 heads, 512 MiB of scores.
_TILE_ELEMENTS = 1 << 22

aten = torch.ops.aten


class DocumentPairs(NamedTuple):
    """Which queries and keys of a block belong to the same document."""

    queries: Tensor
    """(batch, queries), int32: the document's number, ascending over the whole batch."""
    keys: Tensor
    """(batch, keys), int32: the document's number."""
    slots: int
    """Upper bound on the numbers, exclusive."""
    longest: int
    """Upper bound on the tokens of the longest document."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of logsumexps and of partial sums over blocks."""
    return torch.promote_types(dtype, torch.float32)


def attend(
    q: Tensor, k: Tensor, v: Tensor, documents: DocumentPairs | None, causal: bool, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute the attention of `q` to this block of keys alone.

    Args:
        q: (batch, heads, queries, head_dim).
        k, v: (batch, kv_heads, keys, head_dim); heads is a multiple of kv_heads.
        documents: restricts each query to keys of its own document. None: no restriction.
        causal: query i sees the keys up to i, and there are as many keys as queries. Otherwise it sees all keys.
        kernel: `attention.backend`; "cudnn" takes the place of FlashAttention on a GPU.

    Returns:
        Output, shaped like q, in the dtype of q or in the accumulation dtype, as the kernel has it, and logsumexp
        (batch, heads, queries) in the latter. If a query sees no key of the block, its output is 0 and its logsumexp
        -inf.
    """
    if flash_takes(q) and (documents is None or _takes_packed(q)):
        return fused(q, k, v, causal, kernel) if documents is None else _flash_packed(q, k, v, documents, causal)
    out = q.new_empty(q.shape, dtype=accumulation_dtype(q.dtype))
    logsumexp = out.new_empty(q.shape[:-1])
    for rows, mask in _tiles(q, k, documents, causal):
        out[:, :, rows], logsumexp[:, :, rows] = _attend_tile(q[:, :, rows], k, v, mask)
    return out, logsumexp


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: DocumentPairs | None,
    causal: bool,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute this block's terms of the gradients of q, k and v, in the dtype in which the kernel has them.

    Args:
        grad: gradient of the output over all blocks, shaped like q.
        out, logsumexp: over all blocks, out in the dtype of q.
        q, k, v, documents, causal, kernel: as passed to `attend` for this block.
    """
    if flash_takes(q) and (documents is None or _takes_packed(q)):
        # The CUDA kernel reads the logsumexp through a raw pointer: other strides silently give wrong gradients.
        whole = grad, q, k, v, out, logsumexp.contiguous()
        if documents is not None:
            return _flash_packed_backward(*whole, documents, causal)
        return fused_backward(*whole, causal, kernel)
    by_q, by_k, by_v = (torch.zeros_like(tensor, dtype=logsumexp.dtype) for tensor in (q, k, v))
    for rows, mask in _tiles(q, k, documents, causal):
        by_q[:, :, rows], tile_by_k, tile_by_v = _attend_tile_backward(
            grad[:, :, rows], q[:, :, rows], k, v, out[:, :, rows], logsumexp[:, :, rows], mask
        )
        by_k += tile_by_k
        by_v += tile_by_v
    return by_q, by_k, by_v


def merge_(out: Tensor, logsumexp: Tensor, block_out: Tensor, block_logsumexp: Tensor) -> None:
    """Merge a further block of keys into `out` and `logsumexp`, in place; each query there has seen a key."""
    total = torch.logaddexp(logsumexp, block_logsumexp)
    out.mul_((logsumexp - total).exp_().unsqueeze(-1))
    out.add_(block_out * (block_logsumexp - total).exp_().unsqueeze(-1))
    logsumexp.copy_(total)


def gradient_of_sinks(grad: Tensor, out: Tensor, logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of sinks, scores of each head besides those of keys, which have no value.

    Args:
        grad, out, logsumexp: as for `attend_backward`, with the sinks.
        sinks: (heads,).
    """
    delta = (grad.to(logsumexp.dtype) * out).sum(-1)
    shares = (sinks.to(logsumexp.dtype)[:, None] - logsumexp).exp()
    return -(shares * delta).sum((0, 2)).to(sinks.dtype)


# --------------------------------------------------------------------------- PyTorch's kernels


def flash_takes(q: Tensor) -> bool:
    """Whether FlashAttention supports the device, type and width of these queries."""
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    return q.device.type == "cpu" or (is_half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256)


def _takes_bias(q: Tensor) -> bool:
    """Whether a kernel exists that takes a mask and returns the logsumexp."""
    return q.device.type == "cpu"


def _takes_packed(q: Tensor) -> bool:
    """Whether the kernel takes packed sequences of any lengths."""
    return q.device.type == "cuda"


def _flash_packed(q: Tensor, k: Tensor, v: Tensor, documents: DocumentPairs, causal: bool) -> tuple[Tensor, Tensor]:
    packed = [_pack(each) for each in (q, k, v)]
    out, logsumexp, *_ = aten._flash_attention_forward(*packed, *_bounds(documents), 0.0, causal, False)
    # For a query whose document has no keys in this block, the kernel returns inf.
    logsumexp = logsumexp.masked_fill(logsumexp == math.inf, -math.inf).unflatten(1, (len(q), -1)).transpose(0, 1)
    return _unpack(out, q), logsumexp.contiguous()


def _flash_packed_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: DocumentPairs,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)
    packed = [_pack(each) for each in (grad, q, k, v, out)]
    of_all = logsumexp.transpose(0, 1).flatten(1).contiguous()
    gradients = aten._flash_attention_backward(*packed, of_all, *_bounds(documents), 0.0, causal, random, random)
    by_q, by_k, by_v = (_unpack(gradient, like) for gradient, like in zip(gradients, (q, k, v), strict=True))
    return by_q, by_k, by_v


def _bounds(documents: DocumentPairs) -> tuple[Tensor, Tensor, int, int]:
    """Indices at which documents end among the packed queries and keys, and the most of each in a document."""
    slots = torch.arange(documents.slots + 1, dtype=torch.int32, device=documents.queries.device)
    ends = [
        torch.searchsorted(numbers.flatten(), slots, out_int32=True) for numbers in (documents.queries, documents.keys)
    ]
    return ends[0], ends[1], documents.longest, documents.longest


def _pack(x: Tensor) -> Tensor:
    """(batch, heads, rows, head_dim) -> (batch * rows, heads, head_dim), contiguous in the last dimension."""
    packed = x.transpose(1, 2).flatten(0, 1)
    return packed if packed.stride(-1) == 1 else packed.contiguous()


def _unpack(x: Tensor, like: Tensor) -> Tensor:
    """Undo `_pack`, giving the shape of `like`."""
    return x.unflatten(0, (like.shape[0], -1)).transpose(1, 2)


# --------------------------------------------------------------------------- tiles under a mask


def _tiles(
    q: Tensor, k: Tensor, documents: DocumentPairs | None, causal: bool
) -> Iterator[tuple[slice, Tensor | None]]:
    """Slices of the queries, each with its mask of allowed pairs, broadcastable to (batch, heads, rows, keys)."""
    n_queries = q.shape[2]
    n_keys = k.shape[2]
    n_rows = max(1, _TILE_ELEMENTS // n_keys)
    keys = torch.arange(n_keys, device=q.device)
    for start in range(0, n_queries, n_rows):
        rows = slice(start, min(start + n_rows, n_queries))
        mask = None
        if causal:
            mask = (keys[rows, None] >= keys)[None, None]
        if documents is not None:
            same = (documents.queries[:, rows, None] == documents.keys[:, None, :])[:, None]
            mask = same if mask is None else same & mask
        yield rows, mask


def _attend_tile(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `attend` for one tile and its mask."""
    dtype = accumulation_dtype(q.dtype)
    if mask is not None and _takes_bias(q):
        op = aten._scaled_dot_product_flash_attention_for_cpu
        out, logsumexp = op(q, k, v, 0.0, False, attn_mask=_bias(mask, q.dtype))
        # For a query that sees no key, the kernel returns 0.
        return out.to(dtype), logsumexp.masked_fill(~mask.any(-1), -math.inf)
    scores = _scores(q, k, mask)
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp.masked_fill(logsumexp == -math.inf, 0).unsqueeze(-1)).exp_()
    return (weights.to(v.dtype) @ _for_each_head(v, q)).to(dtype), logsumexp


def _attend_tile_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute `attend_backward` for one tile and its mask (FlashAttention, Dao et al. 2022, algorithm 4)."""
    dtype = logsumexp.dtype
    if mask is not None and _takes_bias(q):
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = op(grad, q, k, v, out, logsumexp, 0.0, False, attn_mask=_bias(mask, q.dtype))
        return tuple(gradient.to(dtype) for gradient in gradients)
    weights = (_scores(q, k, mask) - logsumexp.unsqueeze(-1)).exp_()
    by_weights = grad @ _for_each_head(v, q).mT
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    by_scores = (weights * (by_weights.to(dtype) - delta) / math.sqrt(q.shape[-1])).to(q.dtype)
    by_k = _over_heads(by_scores.mT @ q, k)
    by_v = _over_heads(weights.to(grad.dtype).mT @ grad, v)
    return (by_scores @ _for_each_head(k, q)).to(dtype), by_k.to(dtype), by_v.to(dtype)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    scores = (q @ _for_each_head(k, q).mT).to(accumulation_dtype(q.dtype)) / math.sqrt(q.shape[-1])
    return scores if mask is None else scores.masked_fill_(~mask, -math.inf)


def _for_each_head(kv: Tensor, q: Tensor) -> Tensor:
    """Keys or values, repeated for the query heads that share them."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _over_heads(gradient: Tensor, kv: Tensor) -> Tensor:
    """The gradient of `_for_each_head`: (batch, heads, ...) -> (batch, kv_heads, ...)."""
    return gradient.unflatten(1, (kv.shape[1], -1)).sum(2)
