"""Attention within documents, to the last tokens only, or with sinks, without a mask of (seq x seq) pairs.

Documents are contiguous parts of a sequence, so attention within them is causal attention over several short sequences
instead of one long one. FlashAttention's kernels take such sequences packed, with the indices at which they end; on a
CPU they are computed one after the other. Pairs of tokens from different documents, which a mask would compute and
discard, cost nothing. Where attention sees the last `window` tokens only, time and memory grow with seq x window: the
kernels skip what is farther away, and on a CPU blocks of queries read the keys in reach of them.

The number and length of documents differ from batch to batch. A GPU kernel needs bounds of both at launch. The host
computes them, because it has the batch before the GPU does (`Documents.find`). Both are rounded up to powers of two,
and reach compiled blocks as a tensor's size and as a tensor: Python numbers would recompile a block for each value,
which is why torch's own `torch.nn.attention.varlen`, which takes the bounds as Python numbers, is not used here.

A sink is one more score of each head, which takes part in the softmax but has no value (Xiao et al. 2023; GPT-OSS). It
only scales what the kernels compute without it, and their backward passes are right with the output and logsumexp that
include it.
"""

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


class Documents(NamedTuple):
    """The documents in a batch of windows."""

    ids: Tensor
    """(batch, seq), equal for the tokens of one document, which are contiguous."""
    slots: int
    """Upper bound on the number of documents in the whole batch."""
    longest: int
    """Upper bound on the tokens of the longest document."""

    @classmethod
    def find(cls, ids: Tensor) -> "Documents":
        """Count the documents with these ids; keep `ids` in CPU memory, since counting on a GPU would wait for it."""
        lengths = _numbers(ids).flatten().bincount()
        return cls(ids, _power_of_two(len(lengths)), min(_power_of_two(int(lengths.max())), ids.shape[1]))

    def to(self, device: torch.device) -> "Documents":
        """The same on `device`; from pinned memory the copy does not wait."""
        return self._replace(ids=self.ids.to(device, non_blocking=True))

    @property
    def numbers(self) -> Tensor:
        """(batch, seq), int32: the document's number, counted from 0 over the whole batch."""
        return _numbers(self.ids)

    def numbered(self) -> "NumberedDocuments":
        """The form that attention takes."""
        numbers = self.numbers
        slots = torch.arange(self.slots + 1, dtype=torch.int32, device=self.ids.device)
        ends = torch.searchsorted(numbers.flatten(), slots, out_int32=True)
        torch._dynamo.maybe_mark_dynamic(ends, 0)  # `slots` differs between batches: compile once for all sizes
        return NumberedDocuments(numbers, ends, torch.tensor(self.longest))


class NumberedDocuments(NamedTuple):
    """Documents in the form that each block's `attend` takes."""

    numbers: Tensor
    """(batch, seq), int32: the document's number, counted from 0 over the whole batch."""
    ends: Tensor
    """(slots + 1,), int32: 0, then the index at which each document ends, in the concatenated windows; empty slots
    repeat the last document's end."""
    longest: Tensor
    """Upper bound as in `Documents`; a scalar in CPU memory."""


def _numbers(ids: Tensor) -> Tensor:
    begins = torch.ones_like(ids, dtype=torch.int32)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return (begins.flatten().cumsum(0, dtype=torch.int32) - 1).view(ids.shape)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def has_kernel(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `attend_within` supports these; otherwise a mask of all pairs is needed."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return device_type == "cpu" or (is_half and head_dim % 8 == 0 and head_dim <= 256)


def attend_within(
    q: Tensor, k: Tensor, v: Tensor, documents: NumberedDocuments, window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention within each document.

    Args:
        q: (batch, heads, seq, head_dim).
        k, v: same shape, with as many heads or fewer (grouped queries).
        documents: the batch's documents.
        window: the number of last tokens that a token sees, itself among them; 0: all.
        sinks: (heads,): scores besides those of keys; None: there are none.
    """
    return attend_to_parts(q, k, v, documents.ends, documents.ends, documents.longest, window, sinks)


def attend_near(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: NumberedDocuments | Tensor | None,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention; `window` and `sinks` as for `attend_within`, other arguments as in a model's `attend`."""
    seq_len = q.shape[2]
    if isinstance(mask, NumberedDocuments):
        return attend_within(q, k, v, mask, window, sinks)
    if mask is None and has_kernel(q.device.type, q.dtype, q.shape[-1]):
        ends = torch.arange(0, (q.shape[0] + 1) * seq_len, seq_len, dtype=torch.int32, device=q.device)
        longest = torch.full((), seq_len, device="cpu")
        return attend_to_parts(q, k, v, ends, ends, longest, window, sinks)
    near = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device).tril().triu(1 - (window or seq_len))
    pairs = near if mask is None else mask & near
    if sinks is not None:
        q, k, v, pairs = _with_sinks_as_keys(q, k, v, pairs, sinks)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=pairs, enable_gqa=q.shape[1] != k.shape[1])


def _with_sinks_as_keys(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
    """A further key and value of zeros, and a mask for all pairs that is added to scores and has the sinks."""
    shape = (len(q), q.shape[1], q.shape[2])
    added = torch.zeros_like(pairs, dtype=q.dtype).masked_fill(~pairs, -torch.inf).expand(*shape, -1)
    column = sinks.to(q.dtype)[:, None, None].expand(*shape, 1)
    k, v = (F.pad(each, (0, 0, 1, 0)) for each in (k, v))
    return q, k, v, torch.cat((column, added), -1)


def attend_to_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    key_ends: Tensor,
    longest: Tensor,
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of documents' queries to their own keys, which may begin before the queries; both end together.

    Args:
        q: (batch, heads, queries, head_dim).
        k, v: (batch, heads or fewer, keys, head_dim).
        ends, key_ends: (slots + 1,), int32: where each document's queries and keys end, as `NumberedDocuments.ends`.
        longest: upper bound on the keys of a document; a scalar in CPU memory.
        window, sinks: as for `attend_within`.
    """
    return _document_attention(q, k, v, ends, key_ends, longest, window, sinks)[0]


# The name lets a pattern for attention ops (`save_ops`) match this one as well.
@torch.library.custom_op("keel::_scaled_dot_product_document_attention", mutates_args=())
def _document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    key_ends: Tensor,
    longest: Tensor,
    window: int,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output, shaped like q, and its logsumexp (heads, batch * queries)."""
    packed = _pack(q), _pack(k), _pack(v)
    if _flash_takes_packed(q):
        bounds = ends, key_ends, int(longest), int(longest)
        out, logsumexp, *_ = aten._flash_attention_forward(*packed, *bounds, 0.0, True, False, **_sides(window))
    else:
        out, logsumexp = _one_by_one(*packed, ends, key_ends, window)
    if sinks is not None:
        total = torch.logaddexp(logsumexp, sinks.to(logsumexp.dtype)[:, None])
        out = (out * (logsumexp - total).exp().T[..., None]).to(q.dtype)
        logsumexp = total
    return _unpack(out, q), logsumexp


@_document_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return _empty_like_unpacked(q), q.new_empty((q.shape[1], q.shape[0] * q.shape[2]), dtype=dtype)


@torch.library.custom_op("keel::_scaled_dot_product_document_attention_backward", mutates_args=())
def _document_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    ends: Tensor,
    key_ends: Tensor,
    longest: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    packed = _pack(grad), _pack(q), _pack(k), _pack(v), _pack(out)
    if _flash_takes_packed(q):
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the dropout's state; there is no dropout
        bounds = ends, key_ends, int(longest), int(longest)
        # The kernel reads the logsumexp through a raw pointer and ignores strides.
        given = (*packed, logsumexp.contiguous(), *bounds, 0.0, True, random, random)
        gradients = aten._flash_attention_backward(*given, **_sides(window))
    else:
        gradients = _one_by_one_backward(*packed, logsumexp, ends, key_ends, window)
    by_q, by_k, by_v = (_unpack(gradient, of) for gradient, of in zip(gradients, (q, k, v), strict=True))
    return by_q, by_k, by_v


@_document_attention_backward.register_fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like_unpacked(q), _empty_like_unpacked(k), _empty_like_unpacked(v)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ends, key_ends, longest, ctx.window, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, ends, key_ends, longest, sinks)


def _backward(ctx: Any, grad: Tensor, _by_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    _, _, _, out, logsumexp, *_ = saved
    of_keys = _document_attention_backward(grad, *saved, ctx.window)
    by_sinks = None if sinks is None else gradient_of_sinks(grad, out, logsumexp, sinks)
    return *of_keys, None, None, None, None, by_sinks


_document_attention.register_autograd(_backward, setup_context=_save_for_backward)


def gradient_of_sinks(grad: Tensor, out: Tensor, logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of (heads,) sinks.

    Args:
        grad, out: (batch, heads, seq, head_dim): the output and its gradient.
        logsumexp: (heads, batch * seq), with the sinks.
    """
    delta = (grad.to(logsumexp.dtype) * out).sum(-1).transpose(0, 1).flatten(1)
    shares = (sinks.to(logsumexp.dtype)[:, None] - logsumexp).exp()
    return -(shares * delta).sum(1).to(sinks.dtype)


def _sides(window: int) -> dict[str, int]:
    """FlashAttention's arguments for a window: tokens in reach on either side."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _flash_takes_packed(q: Tensor) -> bool:
    return q.device.type == "cuda"


def _pack(x: Tensor) -> Tensor:
    """(batch, heads, seq, head_dim) -> (batch * seq, heads, head_dim), contiguous in the last dimension."""
    packed = x.transpose(1, 2).flatten(0, 1)
    return packed if packed.stride(-1) == 1 else packed.contiguous()


def _unpack(x: Tensor, like: Tensor) -> Tensor:
    """Undo `_pack`, in the memory layout of the projections around attention: (batch, seq, heads, head_dim)."""
    return x.contiguous().view(like.shape[0], like.shape[2], like.shape[1], like.shape[3]).transpose(1, 2)


def _empty_like_unpacked(x: Tensor) -> Tensor:
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


# --------------------------------------------------------------------------- on a CPU


_BLOCK = 256
"""Queries of a block with a window; longer blocks compute more pairs out of reach, shorter ones take more calls."""


class _Piece(NamedTuple):
    """Queries that are computed in one call, and the keys in reach of them."""

    rows: slice
    keys: slice
    mask: Tensor | None
    """(queries, keys), added to the scores; None: causal."""


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor, window: int) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    logsumexp = q.new_empty((q.shape[1], len(q)), dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, keys, mask in _pieces(ends, key_ends, window, q.dtype):
        op = aten._scaled_dot_product_flash_attention_for_cpu
        given = (_alone(q[rows]), _alone(k[keys]), _alone(v[keys]))
        piece, piece_logsumexp = op(*given, 0.0, mask is None, attn_mask=mask)
        out[rows] = piece[0].transpose(0, 1)
        logsumexp[:, rows] = piece_logsumexp[0]
    return out, logsumexp


def _one_by_one_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    ends: Tensor,
    key_ends: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    by_q = torch.empty_like(q)
    wide = torch.promote_types(q.dtype, torch.float32)
    by_k, by_v = (torch.zeros_like(each, dtype=wide if window else each.dtype) for each in (k, v))
    for rows, keys, mask in _pieces(ends, key_ends, window, q.dtype):
        given = (_alone(grad[rows]), _alone(q[rows]), _alone(k[keys]), _alone(v[keys]), _alone(out[rows]))
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = op(*given, logsumexp[None, :, rows], 0.0, mask is None, attn_mask=mask)
        by_q[rows], own_k, own_v = (gradient[0].transpose(0, 1) for gradient in gradients)
        if mask is None:  # no other queries see these keys
            by_k[keys] = own_k
            by_v[keys] = own_v
        else:
            by_k[keys] += own_k
            by_v[keys] += own_v
    return by_q, by_k.to(k.dtype), by_v.to(v.dtype)


def _pieces(ends: Tensor, key_ends: Tensor, window: int, dtype: torch.dtype) -> Iterator[_Piece]:
    """The documents, in blocks of queries if there is a window; empty slots are skipped."""
    both = zip(itertools.pairwise(ends.tolist()), itertools.pairwise(key_ends.tolist()), strict=True)
    for (start, end), (first_key, last_key) in both:
        if not window and end > start:
            yield _Piece(slice(start, end), slice(first_key, last_key), None)
            continue
        before = (last_key - first_key) - (end - start)  # keys before the first query
        for block in range(start, end, _BLOCK):
            last = min(block + _BLOCK, end)
            place = before + block - start  # of the block's first query among the keys
            reach = max(0, place - window + 1)
            keys = slice(first_key + reach, first_key + before + last - start)
            yield _Piece(slice(block, last), keys, _near(last - block, keys.stop - keys.start, window, dtype))


@lru_cache(maxsize=8)
def _near(n_queries: int, n_keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """0 for the last `window` keys of each query, of which the last one has the last key; -inf for others."""
    last = n_keys - n_queries
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(last).triu(last + 1 - window)
    return torch.zeros(n_queries, n_keys, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _alone(x: Tensor) -> Tensor:
    """(length, heads, head_dim) -> (1, heads, length, head_dim)."""
    return x.transpose(0, 1)[None]
