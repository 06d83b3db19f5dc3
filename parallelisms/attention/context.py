"""Context parallelism: every rank holds a part of each sequence, and only attention looks beyond it.

The ranks of the `cp` axis read the same samples, and each keeps its part of the tokens (`shard_batch`). Positions are
sharded along with them, since a rotary angle depends on the position in the whole sequence. One function of the model
is replaced, the `attend` of the plan's attention modules, by one of three methods (docs/parallelism.md says
when to use which):

    gather      all ranks' keys and values at once (Llama 3, Dubey et al. 2024, section 3.3.2)
    ring        one rank's keys and values at a time, passed around a ring (Liu et al. 2023, arXiv:2310.01889)
    all_to_all  the whole sequence for some of the heads (DeepSpeed Ulysses, Jacobs et al. 2023, arXiv:2309.14509)

The first two leave the queries in place. A causal query sees only the past, so contiguous parts would give the first
rank the least work. Instead, rank r of n takes chunks r and 2n - 1 - r of 2n (zigzag), and all ranks see equally many
keys. For backward, each rank saves only its own keys and values and fetches the others' again. With either method,
layers with a window fetch the nearest keys and values alone, and keep them (`halo.py`). Each method takes attention
sinks, too (models/documents.py says what they are).

With gather, a module may also compute its own attention of a rank's queries, with any mask, from the keys and
values of whole sequences (`whole_sequence`). Its memory grows with all pairs of the rank's queries and all keys.

Layers whose state passes from token to token pass states on, or exchange heads (`recurrent.py`).

The collectives run inside custom ops, which torch.compile and selective checkpointing treat as opaque. An op waits for
its collectives before it returns.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from configs.plan import attention_of, recurrent_of
from parallelisms.attention.blocked import (
    DocumentPairs,
    accumulation_dtype,
    attend,
    attend_backward,
    flash_takes,
    gradient_of_sinks,
    merge_,
)
from parallelisms.attention.halo import chunks_of, spans_of, with_halo
from parallelisms.attention.recurrent import pass_states, with_some_heads
from parallelisms.ranks import swap
from parallelisms.torch_internals import group_named

_c10d = torch.ops._c10d_functional

Method = Literal["gather", "ring", "all_to_all"]


class Batch(Protocol):
    """A dataclass that has these fields, int64, (batch, seq)."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor | None:
        """Defaults to 0, 1, 2, ... if None."""

    @property
    def document_ids(self) -> Tensor | None: ...
    @property
    def further(self) -> Tensor | None:
        """What modules that predict further tokens see, and their targets, (batch, seq, depth, 2)."""


B = TypeVar("B", bound=Batch)


def shard_batch(batch: B, mesh: DeviceMesh, method: Method) -> B:
    """This rank's part of every sequence, (batch, seq / cp). Document ids stay whole, since attention needs them all.

    Args:
        batch: whole sequences, the same on all ranks of `mesh`.
        mesh: the single axis `cp`.
        method: as for `apply_context_parallel`.
    """
    if mesh.size() == 1:
        return batch
    device = batch.tokens.device
    part = part_of(batch.tokens.shape[1], mesh.size(), mesh.get_local_rank(), method, device)

    def own(whole: Tensor) -> Tensor:
        # Indexing drops pinned memory, and a copy to a GPU from unpinned memory would block: pin the part again.
        return whole[:, part].pin_memory() if whole.is_pinned() else whole[:, part]

    if batch.positions is not None:
        positions = own(batch.positions)
    else:
        positions = part[None].pin_memory() if batch.tokens.is_pinned() else part[None]
    further = None if batch.further is None else own(batch.further)
    return replace(batch, tokens=own(batch.tokens), targets=own(batch.targets), positions=positions, further=further)  # type: ignore[type-var]


def part_of(seq_len: int, n_ranks: int, rank: int, method: Method, device: torch.device | str = "cpu") -> Tensor:
    """Ascending indices, in the whole sequence, of the tokens that a rank holds: (seq_len / n_ranks,)."""
    sequence = torch.arange(seq_len, device=device)
    if method == "all_to_all":
        return sequence.chunk(n_ranks)[rank]
    chunks = sequence.chunk(2 * n_ranks)
    return torch.cat([chunks[nth] for nth in chunks_of(rank, n_ranks)])


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh, method: Method, kernel: str) -> None:
    """Let a model's attention see whole sequences while the model computes on `shard_batch`'s parts.

    Args:
        model: its plan names the attention modules.
        mesh: the single axis `cp`.
        method: gather and ring need a sequence length divisible by twice the number of ranks; all_to_all needs one
            divisible by the number of ranks, which must also divide the number of key and value heads.
        kernel: `attention.backend`, for gather and ring; all_to_all uses the model's own `attend`.
    """
    group = mesh.get_group().group_name
    attention: list[Any] = list(attention_of(model))
    # Not the group's own object, which a compiler can't trace.
    place = (mesh.get_local_rank(), mesh.size())
    if method == "all_to_all":
        for module in attention:
            module.attend = partial(_attend_some_heads, attend=module.attend, group=group, place=place)
        for state in recurrent_of(model):
            state.mix = with_some_heads(state.mix, mesh, partial(_exchange, group=group))
        return
    for state in recurrent_of(model):
        pass_states(state, mesh)
    model.mask = _numbered  # type: ignore[assignment]
    if method == "gather":
        model.places = partial(_places, mesh)  # type: ignore[assignment]
    for module in attention:
        window = getattr(module, "window", None) or 0
        module.attend = partial(_attend_part, group=group, place=place, method=method, kernel=kernel, window=window)
        if method == "gather":
            module.whole_sequence = partial(_whole_sequence, group=group)


def _places(mesh: DeviceMesh, n_tokens: int, device: torch.device) -> tuple[Tensor, int]:
    """Where the tokens of this rank's parts are in whole sequences, (1, n_tokens), and the length of those."""
    seq_len = n_tokens * mesh.size()
    return part_of(seq_len, mesh.size(), mesh.get_local_rank(), "gather", device)[None], seq_len


class NumberedDocuments(Protocol):
    """Where documents lie in whole, concatenated sequences; see models/documents.py."""

    @property
    def numbers(self) -> Tensor:
        """(batch, seq), int32: ascending from 0."""

    @property
    def ends(self) -> Tensor:
        """(slots + 1,), where `slots` is at least the number of documents."""

    @property
    def longest(self) -> Tensor:
        """Upper bound on the tokens of the longest document; a scalar in CPU memory."""


def _numbered(documents: Any, _dtype: torch.dtype) -> NumberedDocuments:
    """Replaces the model's mask: blocks of queries and keys build their own masks from the numbers."""
    return documents.numbered()


# --------------------------------------------------------------------------- gather and ring


def _attend_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: NumberedDocuments | None,
    group: str,
    place: tuple[int, int],
    method: Method,
    kernel: str,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of this rank's queries to the whole sequence; shapes as in the model's `attend`.

    Args:
        place: this rank, of how many.
        window: the number of last tokens that a token sees, itself among them; 0: all.
        sinks: (heads,): scores besides those of keys; None: there are none.
    """
    if 0 < window < q.shape[2] * place[1]:
        return _attend_near_part(q, k, v, documents, group, place, window, sinks)
    known = (None, None, None) if documents is None else (documents.numbers, documents.ends, documents.longest)
    return _context_attention(q, k, v, *known, group, method, kernel, sinks)[0]


# The name lets a model's pattern for attention ops (`save_ops`) match this one as well.
@torch.library.custom_op("keel::_scaled_dot_product_context_attention", mutates_args=())
def _context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numbers: Tensor | None,
    ends: Tensor | None,
    longest: Tensor | None,
    group: str,
    method: str,
    kernel: str,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output, shaped like q, and its logsumexp (batch, heads, seq / cp)."""
    ranks = _Ranks(q, numbers, ends, longest, group)
    transport = _TRANSPORTS[method](torch.stack((k, v)), ranks.group)  # from now on, beside the rank's own block
    out, logsumexp = attend(q, k, v, ranks.documents(ranks.rank, ranks.all, ranks.all), True, kernel)
    out = out.to(logsumexp.dtype)
    for source, (k_there, v_there) in transport.others():
        rows, keys = ranks.visible(source)
        documents_seen = ranks.documents(source, rows, keys)
        block = attend(q[:, :, rows], k_there[:, :, keys], v_there[:, :, keys], documents_seen, False, kernel)
        merge_(out[:, :, rows], logsumexp[:, :, rows], *block)
    if sinks is not None:  # one more key of all queries, whose value is 0
        merge_(out, logsumexp, out.new_zeros(()), sinks.to(logsumexp.dtype)[:, None])
    # In the memory layout of the following projection, so that one saved tensor serves both.
    out = out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return out, logsumexp.contiguous()


@_context_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)
    return out, q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op("keel::_scaled_dot_product_context_attention_backward", mutates_args=())
def _context_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    numbers: Tensor | None,
    ends: Tensor | None,
    longest: Tensor | None,
    group: str,
    method: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's queries, keys and values; the latter two sum the contributions of all ranks."""
    ranks = _Ranks(q, numbers, ends, longest, group)
    own = torch.stack((k, v))
    transport = _TRANSPORTS[method](own, ranks.group)
    of_own = ranks.documents(ranks.rank, ranks.all, ranks.all)
    by_q, *by_own = attend_backward(grad, q, k, v, out, logsumexp, of_own, True, kernel)
    by_q = by_q.to(logsumexp.dtype)
    transport.give_back(ranks.rank, torch.stack(by_own).to(logsumexp.dtype))
    for source, (k_there, v_there) in transport.others():
        rows, keys = ranks.visible(source)
        by_rows, *by_keys = attend_backward(
            grad[:, :, rows],
            q[:, :, rows],
            k_there[:, :, keys],
            v_there[:, :, keys],
            out[:, :, rows],
            logsumexp[:, :, rows],
            ranks.documents(source, rows, keys),
            False,
            kernel,
        )
        by_q[:, :, rows] += by_rows
        by_source = torch.zeros_like(own, dtype=by_q.dtype)
        by_source[:, :, :, keys] = torch.stack(by_keys)
        transport.give_back(source, by_source)
    by_k, by_v = transport.given_back()
    return by_q.to(q.dtype).contiguous(), by_k.to(k.dtype).contiguous(), by_v.to(v.dtype, copy=True).contiguous()


@_context_attention_backward.register_fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *documents, ctx.group, ctx.method, ctx.kernel, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, *documents, sinks)


def _backward(ctx: Any, grad: Tensor, _by_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    _, _, _, out, logsumexp, *_ = saved
    gradients = _context_attention_backward(grad.contiguous(), *saved, ctx.group, ctx.method, ctx.kernel)
    by_sinks = None if sinks is None else gradient_of_sinks(grad, out, logsumexp, sinks)
    return *gradients, None, None, None, None, None, None, by_sinks


_context_attention.register_autograd(_backward, setup_context=_save_for_backward)


class _Ranks:
    """Determines which of this rank's queries see which keys of another rank, in zigzag order."""

    all = slice(None)

    def __init__(
        self, q: Tensor, numbers: Tensor | None, ends: Tensor | None, longest: Tensor | None, group: str
    ) -> None:
        """
        Args:
            q: this rank's queries, (batch, heads, seq / cp, head_dim).
            numbers, ends, longest: as in `NumberedDocuments`; all None without documents.
            group: name of the process group.
        """
        self.group = group_named(group)
        self.rank = self.group.rank()
        self.n_ranks = self.group.size()
        self._chunk = q.shape[2] // 2
        self._numbers = numbers
        self._ends = ends
        self._longest = longest

    def visible(self, source: int) -> tuple[slice, slice]:
        """The one block (queries here, keys there) in which every query sees every key: half of all pairs.

        If `source` is an earlier rank, both of our chunks see its first chunk; if later, our second chunk sees both.
        """
        if source < self.rank:
            return self.all, slice(0, self._chunk)
        return slice(self._chunk, None), self.all

    def documents(self, source: int, rows: slice, keys: slice) -> DocumentPairs | None:
        """The documents of the given queries here and keys there; None without documents."""
        if self._numbers is None or self._ends is None or self._longest is None:
            return None
        queries = self._of(self._numbers, self.rank)[:, rows]
        their_keys = self._of(self._numbers, source)[:, keys]
        return DocumentPairs(queries, their_keys, self._ends.shape[0] - 1, int(self._longest))

    def _of(self, numbers: Tensor, rank: int) -> Tensor:
        return numbers[:, part_of(numbers.shape[1], self.n_ranks, rank, "gather", numbers.device)]


class _Gather:
    """Gathers all ranks' keys and values in one collective, which it begins, and returns all gradients in another."""

    def __init__(self, own: Tensor, group: dist.ProcessGroup) -> None:
        """own: keys and values, (2, batch, kv_heads, seq / cp, head_dim)."""
        self._own = own.contiguous()
        self._group = group
        self._gathered = _c10d.all_gather_into_tensor(self._own, group.size(), group.group_name)
        self._by_source: dict[int, Tensor] = {}

    def others(self) -> Iterator[tuple[int, Tensor]]:
        """Every other rank's number, with its keys and values."""
        gathered = _c10d.wait_tensor(self._gathered)
        for source, there in enumerate(gathered.unflatten(0, (self._group.size(), -1))):
            if source != self._group.rank():
                yield source, there

    def give_back(self, source: int, gradient: Tensor) -> None:
        """Contribute to the gradient of a rank's keys and values; call it once per rank, this rank first."""
        self._by_source[source] = gradient

    def given_back(self) -> Tensor:
        """The sum of all ranks' contributions for this rank's keys and values."""
        n_ranks = self._group.size()
        name = self._group.group_name
        gradients = torch.cat([self._by_source[source] for source in range(n_ranks)])
        return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(gradients, "sum", n_ranks, name))


class _Ring:
    """Passes keys and values around the ranks, receiving the next ones while computing; gradient sums follow them.

    See `_Gather` for the methods.
    """

    def __init__(self, own: Tensor, group: dist.ProcessGroup) -> None:
        self._own = own.contiguous()  # until it is sent
        self._group = group
        self._first = self._pass_on(self._own)
        self._sum: Callable[[], Tensor] | None = None

    def others(self) -> Iterator[tuple[int, Tensor]]:
        rank = self._group.rank()
        n_ranks = self._group.size()
        arriving = self._first
        del self._first
        for step in range(1, n_ranks):
            keys_values = arriving()
            if step < n_ranks - 1:
                arriving = self._pass_on(keys_values)
            yield (rank - step) % n_ranks, keys_values

    def give_back(self, source: int, gradient: Tensor) -> None:
        """Add to the sum for `source`, which the previous rank updated one step ago, and pass it on."""
        if self._sum is not None:
            gradient += self._sum()
        self._sum = self._pass_on(gradient)

    def given_back(self) -> Tensor:
        assert self._sum is not None
        return self._sum()

    def _pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Send to the next rank; returns a function that waits for what the previous rank sent."""
        rank = self._group.rank()
        n_ranks = self._group.size()
        return swap(tensor, (rank + 1) % n_ranks, (rank - 1) % n_ranks, self._group)


_TRANSPORTS: dict[str, type[_Gather] | type[_Ring]] = {"gather": _Gather, "ring": _Ring}


# --------------------------------------------------------------------------- whole sequences


@torch.library.custom_op("keel::whole_sequence", mutates_args=())
def _whole_sequence(part: Tensor, group: str) -> Tensor:
    """Gather all ranks' keys or values: (batch, heads, seq / cp, head_dim) -> (batch, heads, seq, head_dim)."""
    n_ranks = group_named(group).size()
    gathered = _c10d.wait_tensor(_c10d.all_gather_into_tensor(part.contiguous(), n_ranks, group))
    chunks = gathered.unflatten(0, (n_ranks, -1)).chunk(2, -2)
    # The first chunks of all ranks, then the second ones from the last rank to the first.
    return torch.cat((*chunks[0].unbind(), *chunks[1].flip(0).unbind()), -2)


@_whole_sequence.register_fake
def _(part: Tensor, group: str) -> Tensor:
    *others, n_tokens, width = part.shape
    return part.new_empty(*others, n_tokens * group_named(group).size(), width)


@torch.library.custom_op("keel::own_of_sequence", mutates_args=())
def _own_of_sequence(gradient: Tensor, group: str) -> Tensor:
    """Sum all ranks' gradients of whole sequences, and return those of this rank's part; undoes `_whole_sequence`."""
    n_ranks = group_named(group).size()
    chunks = gradient.chunk(2 * n_ranks, -2)
    parts = [torch.cat((chunks[rank], chunks[2 * n_ranks - 1 - rank]), -2) for rank in range(n_ranks)]
    wide = torch.cat(parts).to(accumulation_dtype(gradient.dtype))
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(wide, "sum", n_ranks, group)).to(gradient.dtype)


@_own_of_sequence.register_fake
def _(gradient: Tensor, group: str) -> Tensor:
    *others, n_tokens, width = gradient.shape
    return gradient.new_empty(*others, n_tokens // group_named(group).size(), width)


def _keep_group(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.group = inputs[1]


_whole_sequence.register_autograd(
    lambda ctx, gradient: (_own_of_sequence(gradient, ctx.group), None), setup_context=_keep_group
)


# --------------------------------------------------------------------------- windows


def _attend_near_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: NumberedDocuments | None,
    group: str,
    place: tuple[int, int],
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """`_attend_part` with a window shorter than the whole sequence.

    Each of the rank's two chunks needs its own keys and those of the `window - 1` tokens before it. No others are sent,
    kept for the backward pass, or multiplied.
    """
    chunk = q.shape[2] // 2
    reach = window - 1
    spans = spans_of(*place, q.shape[2], reach)
    sizes = [begin + chunk - first for begin, first in spans]
    keys, values = with_halo(torch.cat((k, v)), reach, 2, group).chunk(2)
    if not flash_takes(q):
        return _attend_near_by_masks(q, keys, values, documents, spans, window, sinks)
    # To the op, each chunk is a document of its own, or the documents in it are.
    if documents is None:
        nth = torch.arange(2 * len(q) + 1, dtype=torch.int32, device=q.device)
        bounds = (nth * chunk, nth // 2 * sum(sizes) + nth % 2 * sizes[0])
    else:
        begins, firsts = map(list, zip(*spans, strict=True))
        bounds = _ends_in_chunks(documents.numbers, documents.ends, begins, firsts, chunk)
    longest = torch.full((), max(sizes), device="cpu")
    # The model's own op, which computes attention to the last tokens in one process, too (models/documents.py).
    return torch.ops.keel._scaled_dot_product_document_attention(q, keys, values, *bounds, longest, window, sinks)[0]


def _attend_near_by_masks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: NumberedDocuments | None,
    spans: list[tuple[int, int]],
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """The same with a mask of each chunk's pairs, where no kernel takes the window itself."""
    chunk = q.shape[2] // 2
    sizes = [begin + chunk - first for begin, first in spans]
    outputs = []
    parts = zip(q.chunk(2, 2), k.split(sizes, 2), v.split(sizes, 2), spans, strict=True)
    for queries, keys, values, (begin, first) in parts:
        rows = torch.arange(begin, begin + chunk, device=q.device)[:, None]
        columns = torch.arange(first, begin + chunk, device=q.device)
        pairs = (columns <= rows) & (columns > rows - window)
        if documents is not None:
            own = documents.numbers[:, None, begin : begin + chunk, None]
            pairs = pairs & (own == documents.numbers[:, None, None, first : begin + chunk])
        if sinks is not None:  # one more key of all queries, whose value is 0
            keys, values = (F.pad(each, (0, 0, 1, 0)) for each in (keys, values))
            shape = (len(q), q.shape[1], chunk)
            added = torch.zeros_like(pairs, dtype=q.dtype).masked_fill(~pairs, -torch.inf).expand(*shape, -1)
            pairs = torch.cat((sinks.to(q.dtype)[:, None, None].expand(*shape, 1), added), -1)
        grouped = q.shape[1] != k.shape[1]
        outputs.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=pairs, enable_gqa=grouped))
    return torch.cat(outputs, 2)


# An op, since inductor of torch 2.11 can't lower a search in a part of a tensor.
@torch.library.custom_op("keel::ends_in_chunks", mutates_args=())
def _ends_in_chunks(
    numbers: Tensor, ends: Tensor, begins: list[int], firsts: list[int], chunk: int
) -> tuple[Tensor, Tensor]:
    """`NumberedDocuments.ends` of the queries of chunks of each sequence, and of the keys, which begin at `firsts`."""
    begun = torch.stack([numbers[:, first] for first in firsts], dim=1)
    counts = torch.stack([numbers[:, begin + chunk - 1] for begin in begins], dim=1) - begun + 1
    # A chunk's numbers go on where those of the chunk before it end, though its keys may be the same.
    moved = (counts.flatten().cumsum(0, dtype=counts.dtype).view_as(counts) - counts - begun).split(1, dim=1)
    slots = torch.arange(len(begins) * (len(ends) - 1) + 1, dtype=torch.int32, device=ends.device)
    found: list[Tensor] = []
    for starts in (begins, firsts):
        parts = zip(starts, begins, moved, strict=True)
        apart = torch.cat([numbers[:, start : begin + chunk] + by for start, begin, by in parts], dim=1)
        found.append(torch.searchsorted(apart.flatten(), slots, out_int32=True))
    return found[0], found[1]


@_ends_in_chunks.register_fake
def _(_numbers: Tensor, ends: Tensor, begins: list[int], _firsts: list[int], _chunk: int) -> tuple[Tensor, Tensor]:
    n_ends = len(begins) * (len(ends) - 1) + 1
    return ends.new_empty(n_ends), ends.new_empty(n_ends)


# --------------------------------------------------------------------------- all to all


def _attend_some_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    attend: Callable[..., Tensor],
    group: str,
    place: tuple[int, int],
    sinks: Tensor | None = None,
    **window: int,
) -> Tensor:
    """Run the model's `attend` on whole sequences for this rank's share of the heads; arguments as `_attend_part`."""
    q, k, v = (_exchange(tensor, 1, 2, group) for tensor in (q, k, v))
    rank, n_ranks = place
    own = {} if sinks is None else {"sinks": sinks.chunk(n_ranks)[rank]}
    return _exchange(attend(q, k, v, mask, **window, **own), 2, 1, group)


@torch.library.custom_op("keel::exchange", mutates_args=())
def _exchange(x: Tensor, split_dim: int, join_dim: int, group: str) -> Tensor:
    """Split `split_dim` over the ranks, and concatenate what the ranks send along `join_dim`, in rank order."""
    given = torch.stack(x.chunk(group_named(group).size(), split_dim))
    ones = [1] * len(given)
    taken = _c10d.wait_tensor(_c10d.all_to_all_single(given, ones, ones, group))
    return torch.cat(taken.unbind(), join_dim)


@_exchange.register_fake
def _(x: Tensor, split_dim: int, join_dim: int, group: str) -> Tensor:
    n_ranks = group_named(group).size()
    shape = list(x.shape)
    shape[split_dim] //= n_ranks
    shape[join_dim] *= n_ranks
    return x.new_empty(shape)


def _keep_dims(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, *ctx.arguments = inputs


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    split_dim, join_dim, group = ctx.arguments
    return _exchange(grad, join_dim, split_dim, group), None, None, None


_exchange.register_autograd(_exchange_back, setup_context=_keep_dims)
