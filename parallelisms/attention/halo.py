"""Halo exchange: the tokens just before a rank's own, from the ranks that hold them.

A window of attention, and a convolution, reach a fixed number of tokens back. With context parallelism these may be in
other ranks' parts of the sequence. Every rank knows from the lengths alone who needs what, so that one collective
brings each rank what it lacks, and nothing else: for a reach of at most one chunk, from the neighbors only.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallelisms.attention.blocked import accumulation_dtype
from parallelisms.torch_internals import group_named

_c10d = torch.ops._c10d_functional


def chunks_of(rank: int, n_ranks: int, is_zigzag: bool) -> tuple[int, ...]:
    """Numbers of the chunks of a sequence that a rank holds: an early and a late one of 2 n_ranks, or one."""
    return (rank, 2 * n_ranks - 1 - rank) if is_zigzag else (rank,)


def spans_of(rank: int, n_ranks: int, n_tokens: int, reach: int, is_zigzag: bool) -> list[tuple[int, int]]:
    """Where each of a rank's chunks begins, and the first of the up to `reach` tokens before it, in whole sequences.

    Args:
        rank, n_ranks: this rank, of how many.
        n_tokens: that each rank holds.
        reach: as for `with_halo`.
        is_zigzag: as for `chunks_of`.
    """
    chunks = chunks_of(rank, n_ranks, is_zigzag)
    size = n_tokens // len(chunks)
    return [(nth * size, max(0, nth * size - reach)) for nth in chunks]


def largest_halo(n_ranks: int, n_tokens: int, reach: int) -> int:
    """Tokens before its two chunks that the rank with the most of them takes; arguments as for `spans_of`."""
    spans = [spans_of(rank, n_ranks, n_tokens, reach, is_zigzag=True) for rank in range(n_ranks)]
    return max(sum(start - first for start, first in each) for each in spans)


@torch.library.custom_op("keel::with_halo", mutates_args=())
def with_halo(part: Tensor, reach: int, dim: int, is_zigzag: bool, group: str) -> Tensor:
    """Each of this rank's chunks with the tokens before it, one after the other.

    Args:
        part: this rank's tokens, along `dim`.
        reach: tokens before each chunk; there are fewer before the first.
        dim: the dimension of tokens.
        is_zigzag: as for `chunks_of`.
        group: name of the process group.

    Returns:
        The shape of `part`, but for `dim`: of each chunk, the tokens that `spans_of` says, and the chunk.
    """
    pieces = _pieces(part.shape[dim], reach, is_zigzag, group)
    own = part.movedim(dim, 0)
    arrived = _exchange([piece.of(own) for piece in pieces.given], pieces.n_given, pieces.n_taken, own, group)
    found = dict(zip(pieces.taken, arrived.split([piece.size for piece in pieces.taken]), strict=True))
    extended: list[Tensor] = []
    for chunk, mine in enumerate(own.chunk(pieces.n_chunks)):
        extended += [found[piece] for piece in sorted(pieces.taken) if piece.chunk == chunk]
        extended.append(mine)
    return torch.cat(extended).movedim(0, dim).contiguous()


@with_halo.register_fake
def _(part: Tensor, reach: int, dim: int, is_zigzag: bool, group: str) -> Tensor:
    shape = list(part.shape)
    shape[dim] += sum(_pieces(part.shape[dim], reach, is_zigzag, group).n_taken)
    return part.new_empty(shape)


@torch.library.custom_op("keel::with_halo_backward", mutates_args=())
def _with_halo_backward(gradient: Tensor, reach: int, dim: int, is_zigzag: bool, n_tokens: int, group: str) -> Tensor:
    """Gradients of this rank's tokens: the sum of its own, and of those of the ranks that they were sent to."""
    pieces = _pieces(n_tokens, reach, is_zigzag, group)
    extended = gradient.movedim(dim, 0)
    size = n_tokens // pieces.n_chunks
    by_piece: dict[_Piece, Tensor] = {}
    own: list[Tensor] = []
    start = 0
    for chunk in range(pieces.n_chunks):
        for piece in sorted(each for each in pieces.taken if each.chunk == chunk):
            by_piece[piece] = extended[start : start + piece.size]
            start += piece.size
        own.append(extended[start : start + size])
        start += size
    total = torch.cat(own).to(accumulation_dtype(gradient.dtype))
    back = _exchange([by_piece[piece] for piece in pieces.taken], pieces.n_taken, pieces.n_given, extended, group)
    for piece, there in zip(pieces.given, back.split([piece.size for piece in pieces.given]), strict=True):
        piece.of(total).add_(there)
    return total.to(gradient.dtype).movedim(0, dim).contiguous()


@_with_halo_backward.register_fake
def _(gradient: Tensor, _reach: int, dim: int, _is_zigzag: bool, n_tokens: int, _group: str) -> Tensor:
    shape = list(gradient.shape)
    shape[dim] = n_tokens
    return gradient.new_empty(shape)


def _keep_lengths(ctx: Any, inputs: tuple[Tensor, int, int, bool, str], output: Tensor) -> None:
    part, reach, dim, is_zigzag, group = inputs
    ctx.arguments = reach, dim, is_zigzag, part.shape[dim], group


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _with_halo_backward(gradient, *ctx.arguments), None, None, None, None


with_halo.register_autograd(_backward, setup_context=_keep_lengths)


class _Piece(NamedTuple):
    """Tokens that lie together on one rank, and that one chunk of another rank needs."""

    chunk: int
    """Which chunk of the rank that needs it, counted from its first."""
    first: int
    """Its first token, in whole sequences."""
    size: int
    there: int
    """Where they begin in the part of the rank that holds them."""

    def of(self, part: Tensor) -> Tensor:
        """What the rank that holds them has of them, (size, ...)."""
        return part[self.there : self.there + self.size]


class _Pieces(NamedTuple):
    """What a rank gives and takes; both in the order of the other ranks, and of `_needed` for each."""

    n_chunks: int
    given: list[_Piece]
    n_given: list[int]
    """Tokens for each rank."""
    taken: list[_Piece]
    n_taken: list[int]


def _pieces(n_tokens: int, reach: int, is_zigzag: bool, group: str) -> _Pieces:
    process_group = group_named(group)
    return _pieces_of(process_group.rank(), process_group.size(), n_tokens, reach, is_zigzag)


@cache
def _pieces_of(rank: int, n_ranks: int, n_tokens: int, reach: int, is_zigzag: bool) -> _Pieces:
    lengths = n_ranks, n_tokens, reach, is_zigzag
    given = [(other, piece) for other in range(n_ranks) for source, piece in _needed(other, *lengths) if source == rank]
    taken = sorted(_needed(rank, *lengths), key=lambda needed: needed[0])
    n_given, n_taken = (
        [sum(piece.size for rank, piece in pieces if rank == other) for other in range(n_ranks)]
        for pieces in (given, taken)
    )
    n_chunks = len(chunks_of(rank, n_ranks, is_zigzag))
    return _Pieces(n_chunks, [piece for _, piece in given], n_given, [piece for _, piece in taken], n_taken)


def _needed(rank: int, n_ranks: int, n_tokens: int, reach: int, is_zigzag: bool) -> Iterator[tuple[int, _Piece]]:
    """The rank that holds it, and the piece, for all that a rank needs, in the order of its chunks."""
    chunks = [chunks_of(each, n_ranks, is_zigzag) for each in range(n_ranks)]
    size = n_tokens // len(chunks[0])
    for nth, (end, start) in enumerate(spans_of(rank, n_ranks, n_tokens, reach, is_zigzag)):
        for chunk in range(start // size, -(-end // size)):
            holder = next(source for source, held in enumerate(chunks) if chunk in held)
            first = max(start, chunk * size)
            offset = chunks[holder].index(chunk) * size - chunk * size
            stop = min(end, (chunk + 1) * size)
            yield holder, _Piece(nth, first, stop - first, first + offset)


def _exchange(given: list[Tensor], n_given: list[int], n_taken: list[int], like: Tensor, group: str) -> Tensor:
    """Send each rank its tokens, along the first dimension, and return what the ranks sent, in their order."""
    sent = torch.cat(given) if given else like[:0]
    return _c10d.wait_tensor(_c10d.all_to_all_single(sent.contiguous(), n_taken, n_given, group))
