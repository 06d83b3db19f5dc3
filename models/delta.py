"""Gated DeltaNet: a layer that remembers the past in a matrix of one size (Yang et al. 2024, arXiv:2412.06464).

A value head's memory S, (key_head_dim, value_head_dim), maps keys to values. A token lets it fade by a factor a, then
corrects what it holds for the token's key k by a share b of the error, and reads it with the query q:

    S_t = a_t S_{t-1} + k_t (b_t (v_t - a_t S_{t-1}^T k_t))^T,   o_t = S_t^T q_t

The tokens of a chunk are computed at once (Yang et al. 2024, arXiv:2406.06484, section 3.2). With c the products of the
factors since the chunk began, and S the memory before it,

    A_ij = b_i (k_i . k_j) c_i / c_j  for j < i      the errors that a chunk's tokens correct for each other
    U, W = (1 + A)^-1 (b v), (1 + A)^-1 (b c k)      so that the corrections are U - W S
    S'   = (c_C - K^T W) S + K^T U,                  where the rows of K are k_i c_C / c_i

so that only this last line, one product for each chunk, goes through the sequence in order. It is one op:
from a loop, the compiler would make a graph as long as the sequence.

As in Qwen3-Next, whose names and layout the weights have, a short causal convolution comes first, queries and keys have
length 1, several value heads share a key head, and outputs are normed and gated. Nothing passes from one document to
the next, neither by the memory nor by the convolution.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import Model
from models.moe import unchanged

CHUNK = 64
"""Tokens that are computed at once; longer chunks cost more products, shorter ones are more steps."""
_LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys: so in Hugging Face's code and in flash-linear-attention's."""


class Heads(NamedTuple):
    """The weights of the key heads, each with those of its `sharing` value heads."""

    filters: Tensor
    """(key_heads, channels, conv_kernel), the oldest token's first."""
    log_rate: Tensor
    """(key_heads, sharing): logarithm of the rate at which a memory fades."""
    rate_bias: Tensor
    """(key_heads, sharing)."""


class State(NamedTuple):
    """What a layer keeps of the tokens that it has read."""

    tail: Tensor
    """(batch, conv_kernel - 1, key_heads, channels): the last tokens' rows."""
    memory: Tensor
    """(batch, key_heads, sharing, key_head_dim, value_head_dim)."""


Before = Callable[[Tensor, Tensor], Tensor]
"""Finds the memory before a sequence's tokens, when it is known what they make of it: of a memory M, kept @ M + gained.

(kept (batch, key_heads, sharing, key_dim, key_dim), gained (batch, key_heads, sharing, key_dim, value_dim)) -> memory,
shaped like gained."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Before | None], Tensor]
"""(q, k, v, log_decay, strength, documents, memory) -> the outputs of `delta_rule`."""


class DeltaNet(nn.Module):
    """Mixes tokens in place of attention. A tensor-parallel rank has some of the key heads, and their value heads."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        delta = config.delta
        self.reach = delta.conv_kernel - 1
        self.key_dim = delta.key_head_dim
        self.sharing = delta.value_heads // delta.key_heads
        self.value_dim = self.sharing * delta.value_head_dim  # of a key head
        self.q_conv = nn.Parameter(torch.empty(delta.keys, delta.conv_kernel))
        self.k_conv = nn.Parameter(torch.empty(delta.keys, delta.conv_kernel))
        self.v_conv = nn.Parameter(torch.empty(delta.values, delta.conv_kernel))
        self.A_log = nn.Parameter(torch.empty(delta.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(delta.value_heads))
        self.in_proj_qkvz = nn.Linear(config.dim, 2 * delta.keys + 2 * delta.values, bias=False)
        self.in_proj_ba = nn.Linear(config.dim, 2 * delta.value_heads, bias=False)
        self.norm = GatedNorm(delta.value_head_dim, config.norm_eps)
        self.out_proj = nn.Linear(delta.values, config.dim, bias=False)
        self.local: Callable[[Tensor], Tensor] = unchanged
        """Maps a stored weight to the plain tensor to compute with; techniques that shard the weights replace it."""
        self.mix: Callable[[Tensor, Tensor, Heads, Tensor | None], Tensor] = self._mix
        """The only function that reads other tokens; replaced where they are elsewhere."""
        self.rule: Rule = outputs
        """Its second part, after the convolution; replaced by a backend with kernels."""

    def forward(self, x: Tensor, _cos: Tensor, _sin: Tensor, documents: Tensor | None) -> Tensor:
        """x: (batch, seq, dim) -> the same shape; documents: (batch, seq), the number of each token's, or None."""
        heads = (-1, 2 * self.key_dim + 2 * self.value_dim)  # -1: a tensor-parallel rank holds only some of them
        projected = self.in_proj_qkvz(x).unflatten(-1, heads)
        rows, gate = projected.split((2 * self.key_dim + self.value_dim, self.value_dim), -1)
        strength_rate = self.in_proj_ba(x).unflatten(-1, (-1, 2 * self.sharing))
        out = self.mix(rows, strength_rate, self._heads(), documents)
        return self.out_proj(self.norm(*(t.unflatten(-1, (self.sharing, -1)) for t in (out, gate))).flatten(2))

    def _heads(self) -> Heads:
        widths = (self.key_dim, self.key_dim, self.value_dim)
        convolutions = zip((self.q_conv, self.k_conv, self.v_conv), widths, strict=True)
        filters = [self.local(weight).unflatten(0, (-1, width)) for weight, width in convolutions]
        vectors = (self.local(weight).unflatten(0, (-1, self.sharing)) for weight in (self.A_log, self.dt_bias))
        return Heads(torch.cat(filters, 1), *vectors)

    def _mix(self, rows: Tensor, strength_rate: Tensor, heads: Heads, documents: Tensor | None) -> Tensor:
        return self.mix_after(rows, strength_rate, heads, documents, 0, None)

    def mix_after(
        self,
        rows: Tensor,
        strength_rate: Tensor,
        heads: Heads,
        documents: Tensor | None,
        n_before: int,
        memory: Before | None,
    ) -> Tensor:
        """Mix tokens that follow others: the first `n_before` of those given are for the convolution only."""
        given, _ = rule_inputs(rows, strength_rate, heads, self.key_dim, documents)
        q, k, v, log_decay, strength = (each[:, n_before:] for each in given)
        documents = None if documents is None else documents[:, n_before:]
        return self.rule(q, k, v, log_decay, strength, documents, memory).flatten(-2).to(rows.dtype)

    def continued(self, rows: Tensor, strength_rate: Tensor, heads: Heads, state: State | None) -> tuple[Tensor, State]:
        """Go on with the document of the tokens before, whose state is given; as `mix`, which has no state."""
        given, tail = rule_inputs(rows, strength_rate, heads, self.key_dim, tail=state.tail if state else None)
        out, memory = delta_rule(*given, memory=state.memory if state else None)
        return out.flatten(-2).to(rows.dtype), State(tail, memory)


class GatedNorm(nn.Module):
    """RMSNorm of each head, multiplied by silu(gate)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.local: Callable[[Tensor], Tensor] = unchanged
        """The same as in `DeltaNet`."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate: (..., dim) -> the same shape."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.local(self.weight).to(wide)
        return (F.rms_norm(x.to(wide), weight.shape, weight, self.eps) * F.silu(gate.to(wide))).to(x.dtype)


def rule_inputs(
    rows: Tensor,
    strength_rate: Tensor,
    heads: Heads,
    key_dim: int,
    documents: Tensor | None = None,
    tail: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Convolution and gates: what `delta_rule` takes.

    Args:
        rows: (batch, seq, key_heads, channels): a key head's query, its key, and the values of its value heads.
        strength_rate: (batch, seq, key_heads, 2 * sharing): b, before the sigmoid, of its value heads, and a, from
            which their rates follow.
        heads: the weights.
        key_dim: width of queries and keys.
        documents: (batch, seq), ascending numbers; nothing passes from one to another.
        tail: of the state of the tokens before, which are of the first token's document; None: there are none.

    Returns:
        q, k, v, log_decay and strength, and the last tokens' rows.
    """
    sharing = heads.log_rate.shape[-1]
    convolved, tail = convolve(rows, heads.filters, documents, tail)
    wide = torch.promote_types(rows.dtype, torch.float32)
    q, k, v = convolved.to(wide).split((key_dim, key_dim, convolved.shape[-1] - 2 * key_dim), -1)
    strength, rate = strength_rate.to(wide).chunk(2, -1)
    log_decay = -heads.log_rate.to(wide).exp() * F.softplus(rate + heads.rate_bias.to(wide))
    given = (
        _of_length_one(q) * key_dim**-0.5,
        _of_length_one(k),
        v.unflatten(-1, (sharing, -1)),
        log_decay,
        strength.sigmoid(),
    )
    return given, tail


def convolve(rows: Tensor, filters: Tensor, documents: Tensor | None, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    """Causal convolution of each channel with its own filter, then silu; returns the last tokens' rows as well.

    Tokens of other documents count as zeros, and so do those before the first, unless `tail` has them.
    """
    seq_len = rows.shape[1]
    reach = filters.shape[-1] - 1
    before = rows.new_zeros(len(rows), reach, *rows.shape[2:]) if tail is None else tail
    padded = torch.cat((before, rows), 1)
    out = rows * filters[..., reach]
    for distance in range(1, reach + 1):
        earlier = padded[:, reach - distance : reach - distance + seq_len]
        if documents is not None:
            earlier = earlier * _is_same(documents, distance)[:, :, None, None]
        out = out + earlier * filters[..., reach - distance]
    return F.silu(out), padded[:, seq_len:]


def _is_same(documents: Tensor, distance: int) -> Tensor:
    """(batch, seq): whether the token `distance` before is of the same document; tokens before the first are."""
    earlier = F.pad(documents, (distance, 0))[:, : documents.shape[1]]
    earlier[:, :distance] = documents[:, :1]
    return earlier == documents


def _of_length_one(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _LENGTH_EPS).rsqrt()


def outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    documents: Tensor | None,
    memory: Before | None = None,
) -> Tensor:
    """The outputs of `delta_rule`, by torch's operations."""
    return delta_rule(q, k, v, log_decay, strength, documents, memory)[0]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    documents: Tensor | None = None,
    memory: Tensor | Before | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence of the module docstring, in chunks.

    Args:
        q, k: (batch, seq, key_heads, key_dim).
        v: (batch, seq, key_heads, sharing, value_dim).
        log_decay, strength: (batch, seq, key_heads, sharing): ln a, at most 0, and b, from 0 to 1.
        documents: as for `rule_inputs`.
        memory: (batch, key_heads, sharing, key_dim, value_dim) before the first token, or what finds it; None: zeros.

    Returns:
        Outputs, shaped like v, and the memory after the last token.
    """
    seq_len = q.shape[1]
    size = min(CHUNK, 1 << (seq_len - 1).bit_length())
    q, k, v, log_decay, strength = (
        _chunks(each, size) for each in (q[:, :, :, None], k[:, :, :, None], v, log_decay, strength)
    )  # (batch, key_heads, sharing or 1, chunks, size, width)
    strength = strength[..., None]
    since_start = log_decay.cumsum(-1)
    between, from_before, to_end = _decays(since_start, None if documents is None else _number_chunks(documents, size))
    by_tokens = strength * (k @ k.mT) * between
    wanted = strength * torch.cat((v, k * from_before), -1)
    corrections, by_memory = (_inverse(by_tokens) @ wanted).split((v.shape[-1], k.shape[-1]), -1)
    written = (k * to_end).mT
    gained = written @ corrections
    kept = torch.diag_embed(from_before[..., -1, :].expand(*written.shape[:-1])) - written @ by_memory
    if memory is None or isinstance(memory, Tensor):
        memories = _all_memories(kept, gained, torch.zeros_like(gained[..., 0, :, :]) if memory is None else memory)
    else:
        memories = _after_all_others(kept, gained, memory)
    before = memories[..., :-1, :, :]
    out = (q * from_before) @ before + (q @ k.mT * between) @ (corrections - by_memory @ before)
    return out.movedim((3, 4), (1, 2)).flatten(1, 2)[:, :seq_len], memories[..., -1, :, :]


def _after_all_others(kept: Tensor, gained: Tensor, memory: Before) -> Tensor:
    """The memories of `_all_memories`, where that before the first chunk may depend on all chunks.

    They go through the sequence with zeros and with the identity, from which all memories follow at once.
    """
    widths = gained.shape[-1], kept.shape[-1]
    one = torch.eye(widths[1], dtype=kept.dtype, device=kept.device).expand(*kept.shape[:3], -1, -1)
    both = _all_memories(kept, F.pad(gained, (0, widths[1])), F.pad(one, (widths[0], 0)))
    gained, kept = both.split(widths, -1)
    return gained + kept @ memory(kept[..., -1, :, :], gained[..., -1, :, :])[..., None, :, :]


def _all_memories(kept: Tensor, gained: Tensor, memory: Tensor) -> Tensor:
    """The memories of `_memories`, with heads in the first three dimensions of each tensor."""
    return _memories(*(each.flatten(0, 2) for each in (kept, gained, memory))).unflatten(0, gained.shape[:3])


@torch.library.custom_op("keel::delta_memories", mutates_args=())
def _memories(kept: Tensor, gained: Tensor, memory: Tensor) -> Tensor:
    """The memory before each chunk and after the last one, (heads, chunks + 1, key_dim, value_dim).

    Args:
        kept: (heads, chunks, key_dim, key_dim): what a chunk makes of the memory before it.
        gained: (heads, chunks, key_dim, value_dim): what it adds.
        memory: (heads, key_dim, value_dim): before the first chunk.
    """
    memories = _like_memories(kept, gained, memory)
    memories[:, 0] = memory
    for chunk in range(kept.shape[1]):
        memories[:, chunk + 1] = torch.baddbmm(gained[:, chunk], kept[:, chunk], memories[:, chunk])
    return memories


@_memories.register_fake
def _like_memories(kept: Tensor, gained: Tensor, _memory: Tensor) -> Tensor:
    heads, chunks, key_dim, value_dim = gained.shape
    return gained.new_empty(heads, chunks + 1, key_dim, value_dim)


@torch.library.custom_op("keel::delta_memories_backward", mutates_args=())
def _memories_backward(gradient: Tensor, kept: Tensor) -> Tensor:
    """Gradients of the memories themselves: of each, by all that comes after it."""
    by_memories = gradient.clone(memory_format=torch.contiguous_format)
    for chunk in reversed(range(kept.shape[1])):
        by_memories[:, chunk] += kept[:, chunk].mT @ by_memories[:, chunk + 1]
    return by_memories


@_memories_backward.register_fake
def _(gradient: Tensor, _kept: Tensor) -> Tensor:
    return gradient.new_empty(gradient.shape)


def _keep_memories(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kept, memories = ctx.saved_tensors
    by_memories = _memories_backward(gradient, kept)
    by_gained = by_memories[:, 1:]
    return by_gained @ memories[:, :-1].mT, by_gained, by_memories[:, 0]


_memories.register_autograd(_backward, setup_context=_keep_memories)


_POWERS = 8
"""Rows of a triangle whose inverse is a sum of powers."""


@torch.library.custom_op("keel::inverse_of_triangles", mutates_args=())
def _inverse(a: Tensor) -> Tensor:
    """The inverse of 1 + a, of which the part below the diagonals counts, (..., n, n) with n a power of 2.

    By products alone: of halves, [[P, 0], [-Q C P, Q]], down to 8 rows, of which the eighth power is 0, and the sum of
    powers has no large terms. With a solver of triangles, the layer takes 1.3 times as long on a CPU.
    """
    return _inverse_of_lower(a.tril(-1))


def _inverse_of_lower(a: Tensor) -> Tensor:
    size = a.shape[-1]
    if size <= _POWERS:
        one = torch.eye(size, dtype=a.dtype, device=a.device)
        squared = a @ a
        return (one - a) @ (one + squared) @ (one + squared @ squared)
    blocks = a.unflatten(-2, (2, -1)).unflatten(-1, (2, -1))
    first, second = _inverse_of_lower(torch.stack((blocks[..., 0, :, 0, :], blocks[..., 1, :, 1, :]))).unbind()
    inverse = a.new_zeros(blocks.shape)
    inverse[..., 0, :, 0, :] = first
    inverse[..., 1, :, 1, :] = second
    inverse[..., 1, :, 0, :] = -second @ blocks[..., 1, :, 0, :] @ first
    return inverse.flatten(-2).flatten(-3, -2)


@_inverse.register_fake
def _(a: Tensor) -> Tensor:
    return a.new_empty(a.shape)


def _keep_inverse(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward_of_inverse(ctx: Any, gradient: Tensor) -> Tensor:
    transposed = ctx.saved_tensors[0].mT
    return -(transposed @ gradient @ transposed).tril(-1)


_inverse.register_autograd(_backward_of_inverse, setup_context=_keep_inverse)


def _chunks(x: Tensor, size: int) -> Tensor:
    """(batch, seq, key_heads, sharing, ...) -> (batch, key_heads, sharing, chunks, size, ...); zeros at the end."""
    missing = -x.shape[1] % size
    padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    return padded.unflatten(1, (-1, size)).movedim((1, 2), (3, 4))


def _number_chunks(documents: Tensor, size: int) -> Tensor:
    """(batch, seq) -> (batch, 1, 1, chunks, size); the last document goes on to the end."""
    missing = -documents.shape[1] % size
    whole = torch.cat((documents, documents[:, -1:].expand(-1, missing)), 1)
    return whole.unflatten(1, (-1, size))[:, None, None]


def _decays(since_start: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What is left of a token's correction and of the memory, as products of the factors a.

    Args:
        since_start: (batch, key_heads, sharing, chunks, size): logarithms of the products since the chunk began.
        documents: (batch, 1, 1, chunks, size), or None.

    Returns:
        Of an earlier token at a later one (..., size, size); of the memory before the chunk at each token, and of each
        token at the end of the chunk (..., size, 1). 0 where a document ends between.
    """
    seen = torch.ones(since_start.shape[-1:] * 2, dtype=torch.bool, device=since_start.device).tril()
    from_before = since_start.exp()
    to_end = (since_start[..., -1:] - since_start).exp()
    if documents is not None:
        seen = seen & (documents[..., :, None] == documents[..., None, :])
        ends = documents[..., -1:]
        last_before = torch.cat((documents[..., :1, :1], ends[..., :-1, :]), -2)
        from_before = from_before * (documents == last_before)
        to_end = to_end * (documents == ends)
    differences = since_start[..., :, None] - since_start[..., None, :]
    between = differences.masked_fill(~seen, -torch.inf).exp()  # masked first: elsewhere the product may overflow
    return between, from_before[..., None], to_end[..., None]
