"""Halo exchange: each rank has the tokens before its chunks, and their gradients come back to who holds them."""

import pytest
import torch
import torch.distributed as dist

from parallelisms.attention.halo import _pieces_of, chunks_of, spans_of, with_halo

BATCH, WIDTH = 2, 3


def differences(seq_len, reach, dim):
    """Largest differences of what this rank has, and of the gradient by its part, from slices of whole sequences."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(BATCH, seq_len, WIDTH, generator=generator, dtype=torch.float64).movedim(1, dim)
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    n_tokens = seq_len // n_ranks

    def extended(of_rank, tensor):
        size = n_tokens // 2
        spans = spans_of(of_rank, n_ranks, n_tokens, reach)
        return torch.cat([tensor.movedim(dim, 0)[first : begin + size] for begin, first in spans]).movedim(0, dim)

    def weight_of(of_rank, like):
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(1 + of_rank), dtype=torch.float64)

    leaf = whole.clone().requires_grad_()
    expected = [extended(each, leaf) for each in range(n_ranks)]
    by_whole = torch.autograd.grad(sum((each * weight_of(nth, each)).sum() for nth, each in enumerate(expected)), leaf)[
        0
    ]

    size = n_tokens // 2
    tokens = torch.cat([torch.arange(nth * size, (nth + 1) * size) for nth in chunks_of(rank, n_ranks)])
    part = whole.index_select(dim, tokens).requires_grad_()
    found = with_halo(part, reach, dim, dist.distributed_c10d._get_default_group().group_name)
    by_part = torch.autograd.grad((found * weight_of(rank, found)).sum(), part)[0]
    pairs = ((found, expected[rank]), (by_part, by_whole.index_select(dim, tokens)))
    assert all(mine.shape == theirs.shape for mine, theirs in pairs)
    return [(mine - theirs).abs().max().item() for mine, theirs in pairs]


@pytest.mark.parametrize("reach", [1, 3, 6, 10, 100], ids="reach {}".format)
@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_it_is_a_slice_of_the_whole_sequence(ranks, n_ranks, reach):
    for forward, backward in ranks(n_ranks, differences, 12 * n_ranks, reach, 1):
        assert forward == 0
        assert backward < 1e-14
    for forward, backward in ranks(n_ranks, differences, 12 * n_ranks, reach, 2):
        assert forward == 0
        assert backward < 1e-14


def sent(reach):
    """Tokens that this rank sends to each rank."""
    return _pieces_of(dist.get_rank(), 4, 24, reach).n_given


def test_a_short_reach_takes_from_neighbors_only(ranks):
    """Chunks 3 and 4 of 8 are both on the last rank, which so has the tokens before chunk 4 itself."""
    assert list(ranks(4, sent, 5)) == [[0, 5, 0, 0], [5, 0, 5, 0], [0, 5, 0, 5], [0, 0, 5, 5]]
