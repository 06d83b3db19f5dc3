"""The largest attention logit of each head, of which QK-clip needs to know (`optimizer.qk_clip`).

Kernels of attention keep their logits to themselves. So a second pass multiplies queries and keys once more, and keeps
only the maxima: in the forward pass one product beside attention's two, and nothing for the backward pass. It sees what
attention sees: the past, the last tokens of a window, or a document. A module's `attend` is wrapped, so this works with
any kernel. On a GPU, in 16 bits, a kernel of its own keeps the products in registers (`logits_kernel.py`); otherwise
they are computed for a tile of queries at a time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from configs.plan import attention_of
from configs.schema import Config
from parallelisms.attention.context import Method, part_of
from parallelisms.mesh import Mesh
from parallelisms.toolchain import has_triton
from parallelisms.torch_internals import group_named

_c10d = torch.ops._c10d_functional

_TILE_ELEMENTS = 1 << 24
"""Logits of a tile, over all heads; in bfloat16, 32 MiB."""


class NotedLogits(nn.Module):
    """A module's `attend` that keeps the largest logit of each head of this rank until `reset`."""

    largest: Tensor

    def __init__(self, attention: Any, n_heads: int, place: tuple[str, Method]) -> None:
        """
        Args:
            attention: a module of `Plan.attention`.
            n_heads: how many heads this rank has.
            place: name of the group whose ranks have parts of the same sequences ("": this rank has them whole), and
                which parts.
        """
        super().__init__()
        self._attend: Callable[..., Tensor] = attention.attend
        self._window: int = getattr(attention, "window", None) or 0
        self._place = place
        self.register_buffer("largest", torch.empty(n_heads, dtype=torch.float64), persistent=False)

    def init_buffers(self) -> None:
        """Forget all logits."""
        self.largest.fill_(-torch.inf)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Attention by the wrapped `attend`, with its arguments; an evaluation, without gradients, notes nothing."""
        if torch.is_grad_enabled():
            numbers = None if mask is None or isinstance(mask, Tensor) else mask.numbers
            pairs = mask if isinstance(mask, Tensor) else None
            _note(q.detach(), k.detach(), numbers, pairs, self._window, *self._place, self.largest)
        return self._attend(q, k, v, mask)


def note_logits(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Let the attention modules of a stage note their logits; call it after techniques that replace their `attend`."""
    n_heads = config.model.n_heads // mesh.sizes.tp
    group = mesh.cp.get_group().group_name if mesh.sizes.cp > 1 else ""
    for attention in attention_of(model):
        attention.attend = NotedLogits(attention, n_heads, (group, config.context.method))


@torch.library.custom_op("keel::note_largest_logits", mutates_args=("largest",))
def _note(
    q: Tensor,
    k: Tensor,
    numbers: Tensor | None,
    pairs: Tensor | None,
    window: int,
    group: str,
    method: str,
    largest: Tensor,
) -> None:
    """Raise `largest`, (heads,), to the largest logits.

    Args:
        q: (batch, heads, seq / cp, head_dim).
        k: (batch, heads or fewer, seq / cp, head_dim).
        numbers: (batch, seq), each token's document; None: all tokens are of one document.
        pairs: (batch, 1, seq, seq), true for the pairs that see each other; None: all earlier tokens of the document.
        window: the number of last tokens that a token sees, itself among them; 0: all.
        group: name of the group whose ranks hold the parts of each sequence; "": this rank holds whole ones.
        method: of context parallelism, which chooses the parts.
        largest: in place.
    """
    keys, starts = _whole_keys(k, group, method)
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    for chunk, first in zip(q.chunk(len(starts), 2), starts, strict=True):
        if q.is_cuda and is_half and pairs is None and has_triton():
            from parallelisms.attention.logits_kernel import largest_of_heads

            found = largest_of_heads(chunk, keys, numbers, first, window)
        else:
            found = _in_tiles(chunk, keys, first, numbers, pairs, window)
        torch.maximum(largest, found.to(largest.dtype) * q.shape[-1] ** -0.5, out=largest)


@_note.register_fake
def _(*_: Any) -> None:
    return None


def _in_tiles(q: Tensor, keys: Tensor, first: int, numbers: Tensor | None, pairs: Tensor | None, window: int) -> Tensor:
    """The largest product of each head, (heads,); `first`: where the queries begin in the whole sequence."""
    of_key = q.unflatten(1, (keys.shape[1], -1))  # (batch, key heads, heads of each, queries, head_dim)
    largest = q.new_full((q.shape[1],), -torch.inf)
    rows = max(1, _TILE_ELEMENTS // (q.shape[0] * q.shape[1] * keys.shape[2]))
    for number, tile in enumerate(of_key.split(rows, 3)):
        for products, seen in _parts(tile, keys, first + number * rows, numbers, pairs, window):
            counted = products if seen is None else products.masked_fill_(~seen, -torch.inf)
            torch.maximum(largest, counted.amax((0, 3, 4)).flatten(), out=largest)
    return largest


def _parts(
    tile: Tensor, keys: Tensor, first: int, numbers: Tensor | None, pairs: Tensor | None, window: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Products (batch, key heads, heads of each, queries, keys) of a tile, and which of them count; None: all.

    Without documents and windows only the last keys need a mask, which takes longer than their product.
    """
    n = tile.shape[3]
    last = first + n
    reach = max(0, first - window + 1) if window else 0
    if numbers is None and pairs is None and not window and first:
        yield _products(tile, keys[:, :, :first]), None
        reach = first
    at = torch.arange(reach, last, device=tile.device)
    queries = at[-n:, None]
    seen = at <= queries
    if window:
        seen = seen & (at > queries - window)
    if numbers is not None:
        seen = seen & (numbers[:, reach:last].unsqueeze(1) == numbers[:, first:last].unsqueeze(2))[:, None, None]
    if pairs is not None:
        seen = seen & pairs[:, :, None, first:last, reach:last]
    yield _products(tile, keys[:, :, reach:last]), seen


def _products(tile: Tensor, keys: Tensor) -> Tensor:
    """(batch, key heads, heads of each, queries, head_dim) and (batch, key heads, keys, head_dim) -> all products."""
    return (tile.flatten(2, 3) @ keys.transpose(2, 3)).unflatten(2, tile.shape[2:4])


def _whole_keys(k: Tensor, group: str, method: Any) -> tuple[Tensor, list[int]]:
    """The keys of whole sequences, and where in them the equal chunks of this rank's queries begin."""
    if not group:
        return k, [0]
    ranks = group_named(group)
    n_ranks = ranks.size()
    gathered = _c10d.wait_tensor(_c10d.all_gather_into_tensor(k.contiguous(), n_ranks, group))
    seq_len = n_ranks * k.shape[2]
    keys = k.new_empty(*k.shape[:2], seq_len, k.shape[3])
    for rank, part in enumerate(gathered.chunk(n_ranks)):
        keys[:, :, part_of(seq_len, n_ranks, rank, method, k.device)] = part
    if method == "all_to_all":
        return keys, [ranks.rank() * k.shape[2]]
    chunk = k.shape[2] // 2
    return keys, [ranks.rank() * chunk, (2 * n_ranks - 1 - ranks.rank()) * chunk]
