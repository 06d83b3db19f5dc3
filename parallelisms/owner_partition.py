"""Optimizer state shared out by owner: whole parameters, each updated by one rank (ZeRO-1, Rajbhandari et al. 2020,
section 5.1; cut as fairscale's OSS cuts it).

FSDP cuts every parameter by rows, which suits an element-wise update. An update that needs whole matrices, such as
Muon's, has none there. Here every rank holds all parameters and gradients, as in DDP, but the optimizer's state of
only those that it owns, and an ordinary torch optimizer updates them. Then the owners broadcast them, in buckets that
are filled in the order of the forward pass: each module waits for its own parameters only, so what belongs to the last
layers is still on its way while the first ones compute.

The broadcasts may be in a narrower type. Then the owner keeps a master copy in full precision, and every rank, the
owner included, computes with the rounded values: the replicas stay equal bit for bit, and the result does not depend
on the number of ranks, as it would if each owner computed with its masters. Where the forward pass computes in that
type anyway, rounding changes nothing at all.

Tensor parallelism cuts parameters before they have owners. Then the ranks with one part of the model share that part
out among them, and the optimizer updates parts, which an element-wise one may. For one that needs whole matrices the
owners of the parts put gradient and parameter together; each computes the whole update, and keeps its part.

A checkpoint takes from each rank what it owns, by the parameters' names and with its place in the whole: nothing is
gathered to save it, and any number of ranks, or ranks that cut by rows, load it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from configs.plan import plan_of

BUCKET_BYTES = 32 << 20
"""Large enough that a broadcast's latency does not count, small enough that the first layers need not wait long."""

_NOT_SETTINGS = ("params", "param_names")


def assign_owners(sizes: Mapping[str, int], loads: Sequence[int]) -> dict[str, int]:
    """The rank that owns each parameter: the largest first, each to the rank that has least so far.

    The largest load is at most 4/3 of the best possible one (Graham 1969, section 5). Equal sizes go by name, equal
    loads by rank, so that all ranks and all launches agree without a word.

    Args:
        sizes: elements of each parameter, by name.
        loads: elements that each rank owns already.
    """
    loads = list(loads)
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


@dataclass(frozen=True)
class _Broadcast:
    """Parameters of one owner on their way to all ranks."""

    work: dist.Work | None
    buffer: Tensor
    """What is sent: flat, or the only parameter itself."""
    parameters: list[Parameter]
    unpacks: bool
    """Whether the parameters are to be filled from the buffer."""

    def finish(self) -> None:
        """Wait (on a GPU: let its stream wait), and fill the parameters."""
        if self.work is not None:
            self.work.wait()
        if self.unpacks:
            targets = [_local(p) for p in self.parameters]
            parts = self.buffer.split([target.numel() for target in targets])
            torch._foreach_copy_(targets, [part.view_as(t) for part, t in zip(parts, targets, strict=True)])


class OwnerPartition(Optimizer):
    """Torch optimizers over what this rank owns, behind the interface of one over all parameters.

    `param_groups` hold all parameters, on all ranks alike: what a schedule sets there counts for the owners' updates.
    `state` holds what this rank owns. Gradients must be reduced, so that they are the same on all ranks, and clipped
    as if there were no partition. All ranks make the same calls in the same order, and freeze and unfreeze
    (`requires_grad`) alike; a frozen parameter is neither updated nor sent, and keeps its owner and its state.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        process_group: dist.ProcessGroup,
        broadcast_dtype: torch.dtype | None = None,
    ) -> None:
        """Share the parameters out. A rank may own none.

        Args:
            groups: parameter groups. "params" holds (name, parameter) pairs: replicated tensors, or DTensors that no
                mesh dimension but one outside of `process_group` cuts; "optimizer" makes an optimizer of a list of one
                group, as the class `torch.optim.AdamW` does; "whole" (default: False) says that it is to see whole
                parameters where they are cut; the rest are its settings.
            process_group: the ranks that hold replicas.
            broadcast_dtype: None sends parameters as they are.
        """
        self._ranks, self._rank = process_group, dist.get_rank(process_group)
        self._broadcast_dtype = broadcast_dtype
        self._owner: dict[Parameter, int] = {}
        self._mine: dict[Parameter, Parameter] = {}  # as a plain tensor: the parameter's memory, or its master
        self._put_together: set[Parameter] = set()  # of those, the ones that are cut, and updated whole
        self._inner: list[Optimizer] = []  # one a group
        self._forward_order: dict[Parameter, int] = {}
        self._on_their_way: dict[Parameter, _Broadcast] = {}
        super().__init__(groups, defaults={})
        self._share_out(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters in the middle of a run; who owns the earlier ones does not change."""
        super().add_param_group(param_group)
        if self._inner:  # else the constructor adds the first groups, to share them out together
            self._share_out([param_group])

    def overlap_forward(self, model: nn.Module) -> None:
        """Let a step end before its broadcasts do: each group of `model.plan.fsdp_groups`, and the root for the rest,
        waits at its next forward pass. Without this, `step` waits.

        Whoever reads parameters between a step and the next forward pass must call `wait` first.
        """
        groups = [[model.get_submodule(name) for name in names] for names in plan_of(model).fsdp_groups]
        rest = dict.fromkeys(p for p in model.parameters() if p in self._owner)
        for modules in groups:
            parameters = [p for module in modules for p in module.parameters() if p in rest]
            for module in modules:
                # Ahead of FSDP's own hook, which copies the parameters for the computation.
                module.register_forward_pre_hook(partial(self._before_forward, parameters), prepend=True)
            for parameter in parameters:
                rest.pop(parameter)
                self._forward_order[parameter] = len(self._forward_order) + 1
        model.register_forward_pre_hook(partial(self._before_forward, list(rest)), prepend=True)
        self._forward_order |= dict.fromkeys(rest, 0)

    # ------------------------------------------------------------------ a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update what this rank owns and send it.

        Args:
            closure: computes the gradients anew; it is called once, on every rank. An optimizer that calls it again
                and again (LBFGS) cannot be partitioned.

        Returns:
            What `closure` returned.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.wait()
        for group, inner in zip(self.param_groups, self._inner, strict=True):
            inner.param_groups[0].update(_settings(group))
            owned = [p for p in group["params"] if p in self._mine]
            self._lend(owned)
            inner.step()
            self._take_back(owned)
        self._send([p for p in self._owner if p.requires_grad])
        return result

    def wait(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Wait for updated parameters, by default all, that are still on their way from their owners."""
        for parameter in list(self._on_their_way if parameters is None else parameters):
            broadcast = self._on_their_way.get(parameter)
            if broadcast is not None:
                broadcast.finish()
                for arrived in broadcast.parameters:
                    del self._on_their_way[arrived]

    def _lend(self, owned: list[Parameter]) -> None:
        """Show the inner optimizer this step's gradients, and the parameters' memory, which FSDP may have moved."""
        for parameter in owned:
            if parameter.grad is None:  # frozen: it is not updated
                continue
            plain, seen = self._mine[parameter], _whole if parameter in self._put_together else _local
            if self._broadcast_dtype is None:
                plain.data = seen(parameter)
            plain.grad = seen(parameter.grad)

    def _take_back(self, owned: list[Parameter]) -> None:
        """Let go of gradients, and of parameters that were put together, after keeping this rank's part of them."""
        for parameter in owned:
            plain = self._mine[parameter]
            if parameter in self._put_together and self._broadcast_dtype is None:
                if plain.grad is not None:
                    _local(parameter).copy_(_own_part(plain.data, parameter))
                plain.data = plain.data.new_empty(0)
            plain.grad = None

    def _before_forward(self, parameters: list[Parameter], *_: Any) -> None:
        self.wait(parameters)

    # ------------------------------------------------------------------ broadcasts

    def _send(self, parameters: Iterable[Parameter]) -> None:
        for bucket in self._buckets(parameters):
            broadcast = self._start(bucket)
            self._on_their_way |= dict.fromkeys(bucket, broadcast)
        if not self._forward_order:
            self.wait()

    def _buckets(self, parameters: Iterable[Parameter]) -> Iterator[list[Parameter]]:
        """Parameters of one owner and type, in the order of the forward pass, up to BUCKET_BYTES together."""
        filling: dict[tuple[int, torch.dtype], list[Parameter]] = {}
        for parameter in sorted(parameters, key=lambda p: self._forward_order.get(p, 0)):
            key = (self._owner[parameter], parameter.dtype)
            bucket = filling.setdefault(key, [])
            if bucket and sum(_local(p).nbytes for p in (*bucket, parameter)) > BUCKET_BYTES:
                yield bucket
                bucket = filling[key] = []
            bucket.append(parameter)
        yield from filter(None, filling.values())

    def _start(self, bucket: list[Parameter]) -> _Broadcast:
        owner = self._owner[bucket[0]]
        is_mine, rounds = owner == self._rank, self._broadcast_dtype is not None
        tensors = [_local(p) for p in bucket]
        if len(bucket) == 1 and not rounds and tensors[0].is_contiguous():
            buffer, unpacks = tensors[0], False
        else:
            sizes, dtype = [t.numel() for t in tensors], self._broadcast_dtype or bucket[0].dtype
            buffer = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
            unpacks = rounds or not is_mine
            if is_mine:
                sources = [_own_part(self._mine[p].detach(), p) for p in bucket] if rounds else tensors
                parts = buffer.split(sizes)
                torch._foreach_copy_([part.view_as(s) for part, s in zip(parts, sources, strict=True)], sources)
        work = dist.broadcast(buffer, group=self._ranks, group_src=owner, async_op=True)
        return _Broadcast(work, buffer, bucket, unpacks)

    # ------------------------------------------------------------------ who owns what

    def _share_out(self, groups: Sequence[dict[str, Any]]) -> None:
        if not all("param_names" in group for group in groups):
            raise ValueError("the parameters of an owner partition need names: by them all ranks agree on the owners")
        named = {n: p for group in groups for n, p in zip(group["param_names"], group["params"], strict=True)}
        loads = [0] * dist.get_world_size(self._ranks)
        for parameter, rank in self._owner.items():
            loads[rank] += _local(parameter).numel()
        owners = assign_owners({name: _local(p).numel() for name, p in named.items()}, loads)
        self._owner |= {parameter: owners[name] for name, parameter in named.items()}
        for group in groups:
            self._take_over(group)

    @torch.no_grad()
    def _take_over(self, group: dict[str, Any]) -> None:
        """Make the inner optimizer of a group, over those of its parameters that this rank owns."""
        make, needs_whole = group.pop("optimizer"), group.pop("whole", False)
        owned = [p for p in group["params"] if self._owner[p] == self._rank]
        rounds = self._broadcast_dtype is not None
        if needs_whole:
            self._put_together |= {p for p in owned if _cut(p)}
        for parameter in owned:
            seen = _whole(parameter) if parameter in self._put_together else _local(parameter)
            self._mine[parameter] = Parameter(seen.clone() if rounds else seen)
        if rounds:
            for parameter in group["params"]:
                _local(parameter).copy_(_local(parameter).to(self._broadcast_dtype))
        inner = make([{**_settings(group), "params": [self._mine[p] for p in owned]}])
        self._take_back(owned)
        for key, default in _settings(inner.param_groups[0]).items():
            group.setdefault(key, default)
        self._inner.append(inner)
        self._show_state(owned, inner)

    def _show_state(self, owned: list[Parameter], inner: Optimizer) -> None:
        # The same dicts: torch's optimizers fill them in place, now or at their first step.
        self.state.update({parameter: inner.state[self._mine[parameter]] for parameter in owned})

    # ------------------------------------------------------------------ saving and loading

    def owned(self) -> dict[Parameter, Tensor]:
        """What this rank saves of the parameters: those it owns, in full precision; DTensors where they are cut.

        Writing into these and into `owned_state` in place, on all ranks, and calling `owned_were_loaded` restores a
        state.
        """
        rounds = self._broadcast_dtype is not None
        return {p: _placed((plain if rounds else _local(p)).detach(), p) for p, plain in self._mine.items()}

    def owned_state(self, parameter: Parameter) -> dict[str, Any]:
        """The optimizer's state of a parameter, DTensors where it is cut; empty if another rank owns it."""
        state = self.state[parameter] if parameter in self._mine else {}
        return {key: _placed(value, parameter) for key, value in state.items()}

    @torch.no_grad()
    def owned_were_loaded(self) -> None:
        """Send all parameters, the frozen ones too, after their owners have loaded them."""
        self.wait()
        self._send(self._owner)

    def state_dict(self, rank: int | None = None) -> dict[str, Any]:  # type: ignore[override]
        """The state of all ranks, as a plain torch optimizer over the same groups has and loads it, in CPU memory.

        To be called by all ranks; tensors travel one by one.

        Args:
            rank: of the process group, the only one that is to have it (the others return {}); None: all ranks.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        mine = {i: state for i, p in enumerate(parameters) if (state := self.owned_state(p))}
        tables: list[Any] = [None] * dist.get_world_size(self._ranks)
        described = {i: {key: _described(value) for key, value in state.items()} for i, state in mine.items()}
        dist.all_gather_object(tables, described, group=self._ranks)
        owners = {i: owner for owner, table in enumerate(tables) for i in table}
        state = {
            i: {
                key: self._delivered(mine.get(i, {}).get(key), description, owners[i], rank)
                for key, description in tables[owners[i]][i].items()
            }
            for i in sorted(owners)
        }
        if rank not in (None, self._rank):
            return {}
        groups, first = [], 0
        for group in self.param_groups:
            last = first + len(group["params"])
            groups.append({**_settings(group), "params": list(range(first, last))})
            first = last
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def _delivered(self, value: Any, description: Any, owner: int, rank: int | None) -> Any:
        """Bring a value from its owner to `rank`, or to all; None elsewhere."""
        if not isinstance(description, _Description):
            return description
        if value is None:
            value = torch.empty(description.shape, dtype=description.dtype, device=description.device)
        value = (value.full_tensor() if isinstance(value, DTensor) else value).detach().contiguous()
        if rank is None:
            dist.broadcast(value, group=self._ranks, group_src=owner)
        elif rank != owner and self._rank == owner:
            dist.send(value, group=self._ranks, group_dst=rank)
        elif rank != owner and self._rank == rank:
            dist.recv(value, group=self._ranks, group_src=owner)
        return value.cpu().clone() if rank in (None, self._rank) else None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Take from the state of a plain torch optimizer over the same groups what this rank owns, and the settings."""
        for group, inner, saved in zip(self.param_groups, self._inner, state_dict["param_groups"], strict=True):
            owned = [(i, p) for i, p in zip(saved["params"], group["params"], strict=True) if p in self._mine]
            there = {
                at: {
                    key: value if p in self._put_together else _own_part(value, p)
                    for key, value in state_dict["state"][i].items()
                }
                for at, (i, p) in enumerate(owned)
                if i in state_dict["state"]
            }
            settings = {**_settings(saved), "params": list(range(len(owned)))}
            inner.load_state_dict({"state": there, "param_groups": [settings]})
            group.update(_settings(saved))
            self._show_state([p for _, p in owned], inner)


def select_groups(state_dict: Mapping[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """The part of an optimizer's state dict that an optimizer over some of its groups loads, in their order.

    For groups of different optimizers: `select_groups(partition.state_dict(), muon_groups)` is one for
    `torch.optim.Muon`.
    """
    state: dict[int, Any] = {}
    groups, first = [], 0
    for number in chosen:
        group = state_dict["param_groups"][number]
        state |= {at: state_dict["state"].get(i, {}) for at, i in enumerate(group["params"], start=first)}
        groups.append({**group, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return {"state": {i: values for i, values in state.items() if values}, "param_groups": groups}


@dataclass(frozen=True)
class _Description:
    """A tensor that another rank has."""

    shape: torch.Size
    dtype: torch.dtype
    device: str


def _described(value: Any) -> Any:
    return _Description(value.shape, value.dtype, value.device.type) if isinstance(value, Tensor) else value


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_SETTINGS}


def _local(tensor: Tensor) -> Tensor:
    """The memory behind a parameter or gradient: the whole, or what tensor parallelism leaves this rank of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _whole(tensor: Tensor) -> Tensor:
    """A parameter or gradient that is cut, put together; to be called by all ranks over which it is cut."""
    return _placed(_local(tensor), tensor).full_tensor()


def _placed(value: Any, parameter: Tensor) -> Any:
    """The optimizer's tensor for this rank's part of a parameter, with its place in the whole; a count as it is."""
    cut = _cut(parameter)
    if cut is None or not isinstance(value, Tensor) or value.shape != _local(parameter).shape:
        return value
    return DTensor.from_local(value, *cut, run_check=False)


def _own_part(value: Any, parameter: Tensor) -> Any:
    """The reverse: what this rank keeps of the optimizer's tensor for a whole parameter."""
    cut = _cut(parameter)
    if cut is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value, *cut, src_data_rank=None).to_local()  # every rank has the whole: none is sent


def _cut(parameter: Tensor) -> tuple[DeviceMesh, list[Placement]] | None:
    """Over which ranks a parameter is cut, and how; None if they all hold the whole."""
    if not isinstance(parameter, DTensor):
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    axes = [i for i, placement in enumerate(placements) if mesh.size(i) > 1 and not placement.is_replicate()]
    if not axes:
        return None
    [axis] = axes
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[axis]], [placements[axis]]
