"""Context parallelism of layers with a state that passes from token to token: ranks pass on what they make of it.

A state must read the tokens in order, so that ranks with later parts of a sequence would wait for those with earlier
ones. But what a chunk of tokens makes of the state before it is linear, kept @ state + gained, and both matrices follow
from the chunk alone. So each rank finds them for its chunks, gets those of the chunks before them, and knows the
states to begin with. They have one size, whatever the number of tokens. (Gated DeltaNet is computed so within a rank,
too: models/delta.py; Yang et al. 2024, arXiv:2406.06484, section 3.2.)

The convolution before it takes the last tokens of the chunk before (`halo.py`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from configs.plan import Recurrent
from parallelisms.attention.halo import chunks_of, spans_of, with_halo


def pass_states(module: Recurrent, mesh: DeviceMesh, is_zigzag: bool) -> None:
    """Let a module mix parts of sequences; is_zigzag: a rank holds an early and a late chunk of each, and not one."""
    # Numbers and a name, not the mesh, which a compiler can't trace.
    place = (mesh.get_local_rank(), mesh.size())
    group = mesh.get_group().group_name
    module.mix = partial(_mix_part, module=module, place=place, is_zigzag=is_zigzag, group=group)


def _mix_part(
    rows: Tensor,
    gates: Tensor,
    heads: Any,
    documents: Tensor | None,
    module: Recurrent,
    place: tuple[int, int],
    is_zigzag: bool,
    group: str,
) -> Tensor:
    """`configs.plan.Recurrent.mix` of this rank's part of the sequences; documents: of whole sequences.

    place: this rank, of how many. The chunks of each sequence are computed side by side, as sequences of their own.
    """
    n_tokens = rows.shape[1]
    reach = module.reach
    spans = spans_of(*place, n_tokens, reach, is_zigzag)
    size = n_tokens // len(spans)
    given = with_halo(torch.cat((rows, gates), -1), reach, 1, is_zigzag, group)
    parts = given.split([begin - first + size for begin, first in spans], 1)
    extended = torch.cat([F.pad(part, (0, 0, 0, 0, reach + size - part.shape[1], 0)) for part in parts])
    continues: list[Tensor] | None = None
    if documents is not None:
        # Numbers before the first token: its own; what is there is zeros.
        padded = torch.cat((documents[:, :1].expand(-1, reach), documents, documents[:, -1:]), 1)
        continues = [
            padded[:, reach + end] == padded[:, reach + end - 1] for end in (begin + size for begin, _ in spans)
        ]
        documents = torch.cat([padded[:, begin : begin + reach + size] for begin, _ in spans])
    memory = partial(_states_before, chunks=chunks_of(*place, is_zigzag), continues=continues, group=group)
    rows, gates = extended.split((rows.shape[-1], gates.shape[-1]), -1)
    return torch.cat(module.mix_after(rows, gates, heads, documents, reach, memory).chunk(len(spans)), 1)


def _states_before(
    kept: Tensor, gained: Tensor, chunks: Sequence[int], continues: Sequence[Tensor] | None, group: str
) -> Tensor:
    """The states before this rank's chunks, which lie one after the other in the first dimension of each tensor.

    Args:
        kept, gained: what each chunk makes of the state before it, (chunks * batch, ..., n, n) and (..., n, m).
        chunks: their numbers.
        continues: for each, (batch,), whether the document of its last token goes on; None: there is one document.
        group: name of the process group.
    """
    made = torch.cat((kept, gained), -1).unflatten(0, (len(chunks), -1))
    if continues is not None:
        goes_on = torch.stack(list(continues)).to(made.dtype)
        made = made * goes_on.view(*goes_on.shape, *[1] * (made.ndim - 2))
    earlier = with_halo(made, max(chunks) + 1, 0, len(chunks) > 1, group)
    states = [_passed_on(part[:-1], gained) for part in earlier.split([nth + 1 for nth in chunks])]
    return torch.cat(states)


def _passed_on(made: Tensor, like: Tensor) -> Tensor:
    """What chunks make of zeros, one after the other: (chunks, batch, ..., n, n + m) -> (batch, ..., n, m)."""
    width = made.shape[-2]
    state = like.new_zeros(*made.shape[1:-1], like.shape[-1])
    for kept, gained in (each.split((width, like.shape[-1]), -1) for each in made.unbind()):
        state = kept @ state + gained
    return state
