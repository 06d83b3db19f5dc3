"""Context parallelism of layers with a state that passes from token to token, in one of two ways.

A state must read the tokens in order, so that ranks with later parts of a sequence would wait for those with earlier
ones. But:

* What a chunk of tokens makes of the state before it is linear, kept @ state + gained, and both matrices follow from
  the chunk alone (Yang et al. 2024, arXiv:2406.06484, section 3.2; models/delta.py computes a rank's tokens so, too).
  With gather and ring, each rank finds them for its chunks, gets those of the chunks before them, and so knows the
  states to begin with. They have one size, whatever the number of tokens. The convolution before it takes the last
  tokens of the chunk before (`halo.py`).
* Heads are independent. With all_to_all, each rank sends its tokens' rows of the other ranks' heads, and gets all
  tokens' rows of its own, as attention does (DeepSpeed Ulysses, Jacobs et al. 2023, arXiv:2309.14509). A rank uses its
  heads' share of the weights; the ranks hold the same weights, and the sum of their gradients joins the shares.

The first has no limit of heads and sends less, but finding the matrices takes half as many products again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from configs.plan import Recurrent
from parallelisms.attention.halo import chunks_of, spans_of, with_halo

Mix = Callable[[Tensor, Tensor, Any, Tensor | None], Tensor]
Exchange = Callable[[Tensor, int, int], Tensor]
"""(x, dimension to split over the ranks, dimension to join their parts along, in rank order) -> tensor."""

# --------------------------------------------------------------------------- states


def pass_states(module: Recurrent, mesh: DeviceMesh) -> None:
    """Let a module mix parts of sequences, an early and a late chunk of each (`halo.chunks_of`)."""
    # Numbers and a name, not the mesh, which a compiler can't trace.
    place = (mesh.get_local_rank(), mesh.size())
    group = mesh.get_group().group_name
    module.mix = partial(_mix_part, module=module, place=place, group=group)


def _mix_part(
    rows: Tensor,
    gates: Tensor,
    heads: Any,
    documents: Tensor | None,
    module: Recurrent,
    place: tuple[int, int],
    group: str,
) -> Tensor:
    """`configs.plan.Recurrent.mix` of this rank's part of the sequences; documents: of whole sequences.

    place: this rank, of how many. The chunks of each sequence are computed side by side, as sequences of their own.
    """
    n_tokens = rows.shape[1]
    reach = module.reach
    spans = spans_of(*place, n_tokens, reach)
    size = n_tokens // len(spans)
    given = with_halo(torch.cat((rows, gates), -1), reach, 1, group)
    parts = given.split([begin - first + size for begin, first in spans], 1)
    extended = torch.cat([F.pad(part, (0, 0, 0, 0, reach + size - part.shape[1], 0)) for part in parts])
    continues = None
    if documents is not None:
        # Numbers before the first token: its own; what is there is zeros.
        padded = torch.cat((documents[:, :1].expand(-1, reach), documents, documents[:, -1:]), 1)
        ends = [begin + size + reach for begin, _ in spans]
        continues = torch.stack([padded[:, end] == padded[:, end - 1] for end in ends])
        documents = torch.cat([padded[:, begin : begin + reach + size] for begin, _ in spans])
    memory = partial(_states_before, place=place, continues=continues, group=group)
    rows, gates = extended.split((rows.shape[-1], gates.shape[-1]), -1)
    return torch.cat(module.mix_after(rows, gates, heads, documents, reach, memory).chunk(len(spans)), 1)


def _states_before(
    kept: Tensor,
    gained: Tensor,
    place: tuple[int, int],
    continues: Tensor | None,
    group: str,
) -> Tensor:
    """The states before this rank's chunks, which lie one after the other in the first dimension of each tensor.

    Args:
        kept, gained: what each chunk makes of the state before it, (chunks * batch, ..., n, n) and (..., n, m).
        place: as for `_mix_part`.
        continues: (chunks, batch), whether the document of a chunk's last token goes on; None: there is one document.
        group: name of the process group.
    """
    chunks = chunks_of(*place)
    made = torch.cat((kept, gained), -1).unflatten(0, (len(chunks), -1))
    if continues is not None:
        made = made * continues.view(*continues.shape, *[1] * (made.ndim - 2))
    everything = len(chunks) * place[1]
    earlier = with_halo(made, everything, 0, group)
    states = [_passed_on(part[:-1]) for part in earlier.split([nth + 1 for nth in chunks])]
    return torch.cat(states)


def _passed_on(made: Tensor) -> Tensor:
    """What chunks make of zeros, one after the other: (chunks, batch, ..., n, n + m) -> (batch, ..., n, m)."""
    width = made.shape[-2]
    state = made.new_zeros(*made.shape[1:-1], made.shape[-1] - width)
    for chunk in made.unbind():
        state = chunk[..., :width] @ state + chunk[..., width:]
    return state


# --------------------------------------------------------------------------- heads


def with_some_heads(mix: Mix, mesh: DeviceMesh, exchange: Exchange) -> Mix:
    """Replace a module's `mix`: it sees whole sequences of this rank's share of the heads."""
    return partial(_mix_some_heads, mix=mix, exchange=exchange, place=(mesh.get_local_rank(), mesh.size()))


def _mix_some_heads(
    rows: Tensor,
    gates: Tensor,
    heads: Any,
    documents: Tensor | None,
    mix: Mix,
    exchange: Exchange,
    place: tuple[int, int],
) -> Tensor:
    """`configs.plan.Recurrent.mix` of this rank's part of the sequences; arguments as for `_mix_part`."""
    rank, n_ranks = place
    whole = exchange(torch.cat((rows, gates), -1), 2, 1)
    own = type(heads)(*(weight.chunk(n_ranks)[rank] for weight in heads))
    rows, gates = whole.split((rows.shape[-1], gates.shape[-1]), -1)
    return exchange(mix(rows, gates, own, documents), 1, 2)
