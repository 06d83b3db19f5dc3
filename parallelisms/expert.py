"""Expert parallelism (Lepikhin et al. 2020, GShard): each rank holds some of the experts, and rows travel to them.

The ranks of `ep` have different tokens, like all ranks that FSDP shards over. Each rank sends the rows that its router
assigned to an expert to the rank that holds the expert, in one all-to-all, multiplies the rows it receives, and sends
the results back in another. The routing decides how many rows go where: splits are uneven, and an expert or a whole
rank may receive none. Every rank still takes part in every exchange, so all ranks issue them in the same order, also
where activation checkpointing repeats the forward pass.

The host must know the splits, so it waits for the device in each layer. `expert.exchange = "buffers"` avoids that: each
rank sends every other the same number of rows, `buffer_factor` times as many as an even load has, and whatever rows
fill up a buffer are left out of the products. Where a buffer is too small, rows are missing; the device finds that out,
the step changes nothing, and is computed again with uneven splits. So no value depends on the size of the buffers.
While rows travel in buffers, the device computes the shared experts, in both passes.

A rank's experts are whole; FSDP shards them over the remaining ranks of `dp_shard` x `cp` (`fsdp.py`), or replicates
them if parameters have owners. A parameter is a DTensor over both axes, so initialization, clipping and checkpoints
need no special case for experts.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from configs.plan import plan_of, routers_of
from configs.schema import Config, is_described
from parallelisms.mesh import Mesh
from parallelisms.ranks import local_part
from parallelisms.torch_internals import group_named

_c10d = torch.ops._c10d_functional


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, buffer_factor: float | None = None) -> None:
    """Keep this rank's share of the plan's experts, and send rows to the ranks that hold their experts.

    Args:
        model: on the meta device; tensor parallelism may already have sharded it.
        mesh: (ep,), or with tensor parallelism (ep, tp). The size of `ep` divides the number of experts.
        buffer_factor: size of a buffer over that of an even load; buffers are used inside of `Buffers.used`.
    """
    for name in plan_of(model).experts:
        experts: Any = model.get_submodule(name)
        for parameter_name, parameter in experts.named_parameters(recurse=False):
            setattr(experts, parameter_name, nn.Parameter(_own_experts(parameter, mesh)))
        experts.local = local_part
        experts.in_buffers = False
        computation = "compute" if hasattr(experts, "compute") else "forward"
        forward = getattr(experts, computation)
        group = mesh.get_group("ep").group_name
        on_their_ranks = partial(_on_their_ranks, experts, forward, group, mesh.size(0), buffer_factor)
        setattr(experts, computation, on_their_ranks)


def keep_shared_experts_between(config: Config, mesh: Mesh) -> dict[str, Any]:
    """The compiler's settings with which the shared experts stay between the beginning and the end of an exchange.

    Inductor reorders a block's operations to save memory. It would leave nothing between the beginning of an exchange
    and its end.
    """
    model = config.model
    has_shared_experts = is_described(model) and model.n_shared_experts > 0
    are_beside = has_shared_experts and mesh.sizes.ep > 1 and config.expert.exchange == "buffers"
    return {"reorder_for_peak_memory": False} if are_beside else {}


def _own_experts(parameter: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's share of a parameter (experts, ...), which tensor parallelism may have sharded within each expert."""
    within = parameter.placements if isinstance(parameter, DTensor) else [Replicate()] * (mesh.ndim - 1)
    own = local_part(parameter).detach().chunk(mesh.size(0))[mesh.get_local_rank("ep")]
    return DTensor.from_local(
        own, mesh, [Shard(0), *within], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _on_their_ranks(
    experts: Any,
    forward: Callable[[Tensor, Tensor], Tensor],
    group: str,
    n_ranks: int,
    buffer_factor: float | None,
    rows: Tensor,
    counts: Tensor,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    """Run `forward` on the ranks that hold each row's expert.

    Args:
        experts: this rank's.
        forward: their forward pass.
        group: name of the process group over which the experts are distributed, in order.
        n_ranks: its size.
        buffer_factor: as for `apply_expert_parallel`.
        rows: (n, dim), sorted by expert.
        counts: (n_experts,) int64, rows of each expert.
        meanwhile: called while the rows travel in buffers.
    """
    if experts.in_buffers and buffer_factor:
        own_counts, there, back = _route_in_buffers(counts, rows.shape[0], buffer_factor, n_ranks, group)
        travelling = _begin_exchange(rows, *there, *back, group)
        if meanwhile:
            meanwhile()
        results = _with_more_rows(forward, _end_exchange(travelling, *there, *back, group), own_counts)
        return _end_exchange(_begin_exchange(results, *back, *there, group), *back, *there, group)
    own_counts, *route = _route(counts, rows.shape[0], group)
    results = _with_more_rows(forward, _send(rows, *route, group), own_counts)
    return _return(results, *route, rows.shape[0], group)


def _with_more_rows(forward: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor) -> Tensor:
    """Run `forward`, on a CPU with more rows behind those that count, which no product computes.

    A CPU's exponential has other bits for a tensor's last elements, fewer than its vectors take. Which ones are last
    would depend on the exchange: in buffers, what fills up comes last.
    """
    if rows.device.type != "cpu":
        return forward(rows, counts)
    return forward(F.pad(rows, (0, 0, 0, _VECTOR)), counts)[: rows.shape[0]]


_VECTOR = 32
"""The most elements that a CPU computes at once: two vectors of 64 bytes, in float32."""


# --------------------------------------------------------------------------- custom ops, opaque to torch.compile


@torch.library.custom_op("keel::route_to_experts", mutates_args=())
def _route(counts: Tensor, n: int, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Exchange how many rows each rank will receive for each of its experts.

    Args:
        counts: (n_experts,) int64, rows that leave this rank for each expert.
        n: their sum.
        group: as for `_on_their_ranks`.

    Returns:
        counts: (own experts,) int64, rows that arrive for each expert of this rank.
        sizes: (2, ranks) int64, in CPU memory: rows sent to each rank, and received from it.
        by_expert: (rows that arrive,) int64, the permutation from order of arrival to order by expert.
        as_arrived: the inverse permutation.
    """
    n_ranks = group_named(group).size()
    leaving = counts.unflatten(0, (n_ranks, -1))  # (ranks, experts of each)
    arriving = _all_to_all(counts, [leaving.shape[1]] * n_ranks, [leaving.shape[1]] * n_ranks, group).view_as(leaving)
    # The CPU waits for the device here, because it must know a collective's sizes.
    sizes = torch.stack((leaving.sum(1), arriving.sum(1))).cpu()
    # Rows arrive by rank, and from each rank by expert.
    experts = torch.arange(arriving.shape[1], device=counts.device).repeat(n_ranks)
    n_arriving = int(sizes[1].sum())
    by_expert = experts.repeat_interleave(arriving.flatten(), output_size=n_arriving).argsort(stable=True)
    as_arrived = torch.empty_like(by_expert)
    as_arrived[by_expert] = torch.arange(n_arriving, device=counts.device)
    return arriving.sum(0), sizes, by_expert, as_arrived


@_route.register_fake
def _(counts: Tensor, n: int, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n_ranks = group_named(group).size()
    n_arriving: int | torch.SymInt
    try:
        n_arriving = torch.library.get_ctx().new_dynamic_size()
    except DynamicOutputShapeException:  # tracing with concrete sizes but no values: assume an even load
        n_arriving = n
    by_expert = counts.new_empty(n_arriving)
    sizes = counts.new_empty(2, n_ranks, device="cpu")
    return counts.new_empty(len(counts) // n_ranks), sizes, by_expert, torch.empty_like(by_expert)


@torch.library.custom_op("keel::send_to_experts", mutates_args=())
def _send(rows: Tensor, sizes: Tensor, by_expert: Tensor, as_arrived: Tensor, group: str) -> Tensor:
    """Send rows (n, dim), sorted by expert, to their experts' ranks: (rows that arrive, dim), sorted by expert."""
    leaving, arriving = sizes.tolist()
    return _all_to_all(rows, arriving, leaving, group)[by_expert]


@_send.register_fake
def _(rows: Tensor, sizes: Tensor, by_expert: Tensor, as_arrived: Tensor, group: str) -> Tensor:
    return rows.new_empty(by_expert.shape[0], rows.shape[1])


@torch.library.custom_op("keel::return_from_experts", mutates_args=())
def _return(rows: Tensor, sizes: Tensor, by_expert: Tensor, as_arrived: Tensor, n: int, group: str) -> Tensor:
    """Undo `_send`; n is the number of rows that had left this rank."""
    leaving, arriving = sizes.tolist()
    return _all_to_all(rows[as_arrived], leaving, arriving, group)


@_return.register_fake
def _(rows: Tensor, sizes: Tensor, by_expert: Tensor, as_arrived: Tensor, n: int, group: str) -> Tensor:
    return rows.new_empty(n, rows.shape[1])


def _keep_route(ctx: Any, inputs: tuple, output: Tensor) -> None:
    rows, *route = inputs[:4]
    ctx.save_for_backward(*route)
    ctx.n = rows.shape[0]
    ctx.group = inputs[-1]


def _return_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _return(grad, *ctx.saved_tensors, ctx.n, ctx.group), None, None, None, None


def _send_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _send(grad, *ctx.saved_tensors, ctx.group), None, None, None, None, None


_send.register_autograd(_return_gradients, setup_context=_keep_route)
_return.register_autograd(_send_gradients, setup_context=_keep_route)


def _all_to_all(x: Tensor, arriving: list[int], leaving: list[int], group: str) -> Tensor:
    """Send each rank its rows of x; returns the rows received, in rank order."""
    return _c10d.wait_tensor(_c10d.all_to_all_single(x.contiguous(), arriving, leaving, group))


# --------------------------------------------------------------------------- buffers of one size


def buffer_rows(n: int, factor: float, n_ranks: int) -> int:
    """Rows that a rank with `n` rows sends to each rank."""
    return min(n, ceil(n * (factor / n_ranks)))


def _route_in_buffers(
    counts: Tensor, n: int, factor: float, n_ranks: int, group: str
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Exchange how many rows arrive for each expert, and find each row's place, without waiting for the device.

    All but the exchange is arithmetic on small tensors, without sorting, which torch.compile joins into few kernels.

    Args:
        counts, n, group: as for `_route`.
        factor: size of a buffer over that of an even load.
        n_ranks: the size of the group.

    Returns:
        counts: (own experts,) int64, rows that arrive for each expert of this rank.
        there: `sent` and `kept` of `_begin_exchange`: any row fills a buffer up, and rows are kept by expert, what
            fills up last.
        back: the same for the results: in order of arrival, and each row's place in the buffers, or any place for a row
            for which there is none.
    """
    size = buffer_rows(n, factor, n_ranks)
    position = torch.arange(size, device=counts.device)
    by_rank = counts.unflatten(0, (n_ranks, -1))  # (ranks, experts of each)
    ends = by_rank.sum(1).cumsum(0)  # the rows are sorted by rank
    starts = F.pad(ends[:-1], (1, 0))
    leaving = (starts[:, None] + position).clamp(max=n - 1).flatten()
    row = torch.arange(n, device=counts.device)
    rank = torch.searchsorted(ends, row, right=True)
    places = rank * size + (row - starts[rank]).clamp(max=size - 1)

    n_experts = by_rank.shape[1]
    even = [n_experts] * n_ranks
    # How many rows leave for each expert.
    arriving = _all_to_all(counts, even, even, group).unflatten(0, (n_ranks, -1))
    own_ends = arriving.cumsum(1).clamp(max=size)
    # (ranks, own experts + 1): where each expert's rows begin in a buffer, and last what fills it up.
    begins = F.pad(own_ends, (1, 0))
    lengths = F.pad(own_ends, (0, 1), value=size) - begins
    before = (lengths.T.flatten().cumsum(0) - lengths.T.flatten()).unflatten(0, (-1, n_ranks)).T  # by expert, then rank
    expert = torch.searchsorted(own_ends, position.expand(n_ranks, -1).contiguous(), right=True)
    as_arrived = (before.gather(1, expert) + position - begins.gather(1, expert)).flatten()
    by_expert = torch.empty_like(as_arrived)
    by_expert[as_arrived] = torch.arange(len(as_arrived), device=counts.device)
    return lengths[:, :-1].sum(0), (leaving, by_expert), (as_arrived, places)


# An exchange is two ops, and what is computed between them runs while the rows travel. The gradient takes the way back
# in the same two ops: that of `_end_exchange` begins the exchange, that of `_begin_exchange` ends it. Autograd only
# passes on what lies between them, and meanwhile computes the gradients of what was computed there.


@torch.library.custom_op("keel::begin_exchange", mutates_args=())
def _begin_exchange(
    rows: Tensor, sent: Tensor, kept: Tensor, sent_back: Tensor, kept_back: Tensor, group: str
) -> Tensor:
    """Begin to send rows to all ranks, as many to each.

    Args:
        rows: (n, dim).
        sent: (ranks * buffer,) int64, the rows to send, by rank.
        kept: (m,) int64, the rows to return of those that arrive.
        sent_back, kept_back: the same for the way back, which gradients take.
        group: as for `_on_their_ranks`.

    Returns:
        (ranks * buffer, dim), for `_end_exchange` alone: not there yet.
    """
    even = _even(sent, group)
    return _c10d.all_to_all_single(rows[sent], even, even, group)


@_begin_exchange.register_fake
def _(rows: Tensor, sent: Tensor, kept: Tensor, sent_back: Tensor, kept_back: Tensor, group: str) -> Tensor:
    return rows.new_empty(sent.shape[0], rows.shape[1])


@torch.library.custom_op("keel::end_exchange", mutates_args=())
def _end_exchange(
    travelling: Tensor, sent: Tensor, kept: Tensor, sent_back: Tensor, kept_back: Tensor, group: str
) -> Tensor:
    """Wait for rows: those to keep, (m, dim). Takes what `_begin_exchange` has returned, and its arguments."""
    return _c10d.wait_tensor(travelling)[kept]


@_end_exchange.register_fake
def _(travelling: Tensor, sent: Tensor, kept: Tensor, sent_back: Tensor, kept_back: Tensor, group: str) -> Tensor:
    return travelling.new_empty(kept.shape[0], travelling.shape[1])


def _even(sent: Tensor, group: str) -> list[int]:
    """How many rows each rank is sent."""
    n_ranks = group_named(group).size()
    return [len(sent) // n_ranks] * n_ranks


def _keep_places(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, *places, ctx.group = inputs
    ctx.save_for_backward(*places)


def _begin_for_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    sent, kept, sent_back, kept_back = ctx.saved_tensors
    return _begin_exchange(grad, sent_back, kept_back, sent, kept, ctx.group), *(None,) * 5


def _end_for_gradients(ctx: Any, travelling: Tensor) -> tuple[Tensor | None, ...]:
    sent, kept, sent_back, kept_back = ctx.saved_tensors
    return _end_exchange(travelling, sent_back, kept_back, sent, kept, ctx.group), *(None,) * 5


_begin_exchange.register_autograd(_end_for_gradients, setup_context=_keep_places)
_end_exchange.register_autograd(_begin_for_gradients, setup_context=_keep_places)


class Buffers:
    """The buffers of the experts of all stages on a rank: when they are used, and whether one was too small."""

    def __init__(self, stages: Iterable[nn.Module], n_ranks: int, factor: float, device: torch.device) -> None:
        """
        Args:
            stages: this rank's, after `apply_expert_parallel`.
            n_ranks: the size of `ep`.
            factor: size of a buffer over that of an even load.
            device: of the model.
        """
        self._experts: list[Any] = []
        self._routers: list[Any] = []
        for stage in stages:
            self._experts += [stage.get_submodule(name) for name in plan_of(stage).experts]
            self._routers += routers_of(stage).values()
        self._n_ranks = n_ranks
        self._factor = factor
        self._missing = torch.zeros((), dtype=torch.float64, device=device)

    @contextmanager
    def used(self, is_used: bool) -> Iterator[None]:
        """Exchange rows in buffers inside, if they are used, and note which are too small from now on."""
        self._missing.zero_()
        self._set(is_used, self._note if is_used else None)
        try:
            yield
        finally:
            self._set(False, None)

    def missing(self) -> Tensor:
        """The most rows that a buffer of this rank had no place for since `used` was last entered; a float64 scalar."""
        return self._missing.clone()

    def _set(self, in_buffers: bool, note: Callable[[Tensor], None] | None) -> None:
        for experts in self._experts:
            experts.in_buffers = in_buffers
        for router in self._routers:
            router.note = note

    def _note(self, tokens: Tensor) -> None:
        """tokens: (n_experts,), rows that leave this rank for each expert in a layer and micro-batch."""
        leaving = tokens.unflatten(0, (self._n_ranks, -1)).sum(1).double()
        size = (leaving.sum() * (self._factor / self._n_ranks)).ceil()  # as `buffer_rows` has it
        torch.maximum(self._missing, leaving.max() - size, out=self._missing)
