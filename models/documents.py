"""Attention that keeps the documents of a window apart, without a mask of (seq x seq) pairs.

Documents are contiguous parts of a window, so attention within them is causal attention over several short sequences
instead of one long one. FlashAttention's kernels take such sequences packed, with the indices at which they end; on a
CPU they are computed one after the other. Pairs of tokens from different documents, which a mask would compute and
discard, cost nothing.

The number and length of documents differ from batch to batch. A GPU kernel needs bounds of both at launch. The host
computes them, because it has the batch before the GPU does (`Documents.find`). Both are rounded up to powers of two,
and reach compiled blocks as a tensor's size and as a tensor: Python numbers would recompile a block for each value,
which is why torch's own `torch.nn.attention.varlen`, which takes the bounds as Python numbers, is not used here.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
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

    def numbered(self) -> "NumberedDocuments":
        """The form that attention takes."""
        numbers = _numbers(self.ids)
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


def attend_within(q: Tensor, k: Tensor, v: Tensor, documents: NumberedDocuments) -> Tensor:
    """Causal attention within each document.

    Args:
        q: (batch, heads, seq, head_dim).
        k, v: same shape, with as many heads or fewer (grouped queries).
        documents: the batch's documents.
    """
    return _document_attention(q, k, v, documents.ends, documents.longest)[0]


# The name lets a pattern for attention ops (`save_ops`) match this one as well.
@torch.library.custom_op("keel::_scaled_dot_product_document_attention", mutates_args=())
def _document_attention(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: Tensor) -> tuple[Tensor, Tensor]:
    """Output, shaped like q, and its logsumexp (heads, batch * seq)."""
    packed = _pack(q), _pack(k), _pack(v)
    if _flash_takes_packed(q):
        bounds = ends, ends, int(longest), int(longest)
        out, logsumexp, *_ = aten._flash_attention_forward(*packed, *bounds, 0.0, True, False)
    else:
        out, logsumexp = _one_by_one(*packed, ends)
    return _unpack(out, q), logsumexp


@_document_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return _empty_like_unpacked(q), q.new_empty((q.shape[1], q.shape[0] * q.shape[2]), dtype=dtype)


@torch.library.custom_op("keel::_scaled_dot_product_document_attention_backward", mutates_args=())
def _document_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, ends: Tensor, longest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    packed = _pack(grad), _pack(q), _pack(k), _pack(v), _pack(out)
    if _flash_takes_packed(q):
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the dropout's state; there is no dropout
        bounds = ends, ends, int(longest), int(longest)
        # The kernel reads the logsumexp through a raw pointer and ignores strides.
        gradients = aten._flash_attention_backward(*packed, logsumexp.contiguous(), *bounds, 0.0, True, random, random)
    else:
        gradients = _one_by_one_backward(*packed, logsumexp, ends)
    by_q, by_k, by_v = (_unpack(gradient, of) for gradient, of in zip(gradients, (q, k, v), strict=True))
    return by_q, by_k, by_v


@_document_attention_backward.register_fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like_unpacked(q), _empty_like_unpacked(k), _empty_like_unpacked(v)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ends, longest = inputs
    ctx.save_for_backward(q, k, v, *output, ends, longest)


def _backward(ctx: Any, grad: Tensor, _by_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
    return *_document_attention_backward(grad, *ctx.saved_tensors), None, None


_document_attention.register_autograd(_backward, setup_context=_save_for_backward)


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


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    logsumexp = q.new_empty((q.shape[1], len(q)), dtype=torch.promote_types(q.dtype, torch.float32))
    for rows in _rows(ends):
        op = aten._scaled_dot_product_flash_attention_for_cpu
        document_out, document_logsumexp = op(*(_alone(each[rows]) for each in (q, k, v)), 0.0, True)
        out[rows] = document_out[0].transpose(0, 1)
        logsumexp[:, rows] = document_logsumexp[0]
    return out, logsumexp


def _one_by_one_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    by_q, by_k, by_v = (torch.empty_like(each) for each in (q, k, v))
    for rows in _rows(ends):
        given = (_alone(each[rows]) for each in (grad, q, k, v, out))
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = op(*given, logsumexp[None, :, rows], 0.0, True)
        by_q[rows], by_k[rows], by_v[rows] = (gradient[0].transpose(0, 1) for gradient in gradients)
    return by_q, by_k, by_v


def _rows(ends: Tensor) -> Iterator[slice]:
    """The rows of each document; empty slots are skipped."""
    indices = ends.tolist()
    for start, end in itertools.pairwise(indices):
        if end > start:
            yield slice(start, end)


def _alone(x: Tensor) -> Tensor:
    """(length, heads, head_dim) -> (1, heads, length, head_dim)."""
    return x.transpose(0, 1)[None]
