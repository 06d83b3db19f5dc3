"""Attention that keeps the documents of a window apart, without a mask of (seq x seq) pairs.

Documents are stretches of a window, so that attention within them is causal attention to several short sequences in
place of one long one. FlashAttention's kernels take such sequences packed, by the indices at which they end; on a CPU
they are computed one after the other. What a document's neighbors cost under a mask is not spent at all.

How many documents there are, and how long, differs from batch to batch. A GPU's kernel must be told bounds of both when
it is launched: the host counts them, where it has the batch before the GPU has (`Documents.find`). Both are rounded up
to powers of two, and reach compiled blocks as a tensor's size and as a tensor: numbers there would compile a block once
more for each value.
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
    """(batch, seq), equal for the tokens of one document, which are neighbors."""
    slots: int
    """At least as many as there are documents in the whole batch."""
    longest: int
    """At least as many tokens as the longest document has."""

    @classmethod
    def find(cls, ids: Tensor) -> "Documents":
        """The documents with these ids, which should lie in the host's memory: to count them waits for a GPU."""
        lengths = _numbers(ids).flatten().bincount()
        return cls(ids, _power_of_two(len(lengths)), min(_power_of_two(int(lengths.max())), ids.shape[1]))

    def to(self, device: torch.device) -> "Documents":
        """The same on `device`; from pinned memory the copy does not wait."""
        return self._replace(ids=self.ids.to(device, non_blocking=True))

    def numbered(self) -> "NumberedDocuments":
        """What attention takes of it."""
        numbers = _numbers(self.ids)
        slots = torch.arange(self.slots + 1, dtype=torch.int32, device=self.ids.device)
        ends = torch.searchsorted(numbers.flatten(), slots, out_int32=True)
        torch._dynamo.maybe_mark_dynamic(ends, 0)
        return NumberedDocuments(numbers, ends, torch.tensor(self.longest))


class NumberedDocuments(NamedTuple):
    """Documents as `attend` of each block is given them."""

    numbers: Tensor
    """(batch, seq), int32: ascending over the whole batch, from 0."""
    ends: Tensor
    """(slots + 1,), int32: 0, then the index, in the windows laid end to end, at which each document ends; slots that
    hold none end where the last document does."""
    longest: Tensor
    """As in `Documents`; a scalar in the host's memory."""


def _numbers(ids: Tensor) -> Tensor:
    begins = torch.ones_like(ids, dtype=torch.int32)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return (begins.flatten().cumsum(0, dtype=torch.int32) - 1).view(ids.shape)


def _power_of_two(number: int) -> int:
    """The smallest that is not below `number`."""
    return 1 << (number - 1).bit_length()


def has_kernel(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `attend_within` can be computed there; elsewhere a mask of all pairs has to do."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return device_type == "cpu" or (is_half and head_dim % 8 == 0 and head_dim <= 256)


def attend_within(q: Tensor, k: Tensor, v: Tensor, documents: NumberedDocuments) -> Tensor:
    """Causal attention of each document to itself.

    Args:
        q: (batch, heads, seq, head_dim).
        k, v: the same with as many heads or fewer (grouped queries).
        documents: of the batch.
    """
    return _document_attention(q, k, v, documents.ends, documents.longest)[0]


# The name lets a pattern for attention ops (`save_ops`) match this one, too.
@torch.library.custom_op("keel::_scaled_dot_product_document_attention", mutates_args=())
def _document_attention(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: Tensor) -> tuple[Tensor, Tensor]:
    """Output, shaped as q, and its logsumexp (heads, batch * seq)."""
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
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
        bounds = ends, ends, int(longest), int(longest)
        # The kernel reads the logsumexp by a bare pointer.
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
    """(batch, heads, seq, head_dim) -> (batch * seq, heads, head_dim), its last dimension without gaps."""
    packed = x.transpose(1, 2).flatten(0, 1)
    return packed if packed.stride(-1) == 1 else packed.contiguous()


def _unpack(x: Tensor, like: Tensor) -> Tensor:
    """The reverse, laid out in memory as the projections around attention have it: (batch, seq, heads, head_dim)."""
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
        out[rows], logsumexp[:, rows] = document_out[0].transpose(0, 1), document_logsumexp[0]
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
    """Where each document lies; slots that hold none are left out."""
    indices = ends.tolist()
    for start, end in itertools.pairwise(indices):
        if end > start:
            yield slice(start, end)


def _alone(x: Tensor) -> Tensor:
    """(length, heads, head_dim) -> (1, heads, length, head_dim)."""
    return x.transpose(0, 1)[None]
