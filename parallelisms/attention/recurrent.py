"""Context parallelism of layers with a state that passes from token to token: whole sequences for some of the heads.

A state must read the tokens in order, so that ranks with parts of a sequence would wait for each other. But heads are
independent: each rank sends its tokens' rows of the other ranks' heads, and gets all tokens' rows of its own (as
DeepSpeed Ulysses does for attention, Jacobs et al. 2023, arXiv:2309.14509). Convolution, state and documents are then
as in one process, forward and backward. A rank uses its heads' share of the weights; the ranks hold the same weights,
and the sum of their gradients joins the shares.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Mix = Callable[[Tensor, Tensor, Any, Tensor | None], Tensor]
Exchange = Callable[[Tensor, int, int], Tensor]
"""(x, dimension to split over the ranks, dimension to join their parts along, in rank order) -> tensor."""


def with_some_heads(mix: Mix, mesh: DeviceMesh, exchange: Exchange, is_zigzag: bool) -> Mix:
    """Replace a module's `mix`; is_zigzag: a rank holds an early and a late chunk of each sequence, and not one."""
    n_ranks = mesh.size()
    order = [nth for rank in range(n_ranks) for nth in (rank, 2 * n_ranks - 1 - rank)] if is_zigzag else []
    # Numbers, not the mesh, which a compiler can't trace.
    place = (mesh.get_local_rank(), n_ranks)
    return partial(_mix_some_heads, mix=mix, exchange=exchange, place=place, order=tuple(order))


def _mix_some_heads(
    rows: Tensor,
    gates: Tensor,
    heads: Any,
    documents: Tensor | None,
    mix: Mix,
    exchange: Exchange,
    place: tuple[int, int],
    order: tuple[int, ...],
) -> Tensor:
    """`configs.plan.Recurrent.mix` of this rank's part of the sequences; documents: of whole sequences.

    place: this rank, of how many; order: numbers of the chunks in the order in which ranks hold them; empty: ascending.
    """
    rank, n_ranks = place
    joined = exchange(torch.cat((rows, gates), -1), 2, 1)
    whole = _ordered(joined, [order.index(nth) for nth in range(len(order))])
    own = type(heads)(*(weight.chunk(n_ranks)[rank] for weight in heads))
    rows, gates = whole.split((rows.shape[-1], gates.shape[-1]), -1)
    out = mix(rows, gates, own, documents)
    return exchange(_ordered(out, order), 1, 2)


def _ordered(x: Tensor, order: Sequence[int]) -> Tensor:
    """The chunks of a sequence, dimension 1, in another order; not by an index, whose gradient would be added up."""
    if not order:
        return x
    chunks = x.chunk(len(order), 1)
    return torch.cat([chunks[nth] for nth in order], 1)
