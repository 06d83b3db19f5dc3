"""Optimizer state partitioned by owner: each whole parameter is updated by one rank (ZeRO-1, Rajbhandari et al. 2020,
section 5.1; partitioned like fairscale's OSS).

FSDP shards each parameter by rows, which suits an element-wise update but not one that needs whole matrices, such as
Muon's. Here each rank holds all parameters and gradients, as in DDP, but optimizer state only for the parameters that
it owns, which an ordinary torch optimizer updates. The owners then broadcast them, in buckets that are filled in the
order of the forward pass. Each module waits only for its own parameters, so those of the last layers are still being
sent while the first layers compute.

The broadcasts may use a narrower type. Then the owner keeps a master copy in full precision, and all ranks, including
the owner, compute with the rounded values. So the replicas stay bit-identical, and the result does not depend on the
number of ranks, as it would if each owner computed with its master copies. If the forward pass computes in that type
anyway, rounding changes nothing.

Tensor parallelism splits parameters before they get owners. Then the ranks that hold the same part of the model divide
that part among themselves, and the optimizer updates the parts, which is correct for an element-wise one. For one that
needs whole matrices, the owners of the parts gather gradient and parameter; each computes the whole update and keeps
its part. Under expert parallelism, fewer ranks hold an expert than hold other parameters: experts are in a partition of
their own, over these ranks, and never leave them.

A checkpoint takes from each rank what it owns, with the parameters' names and offsets: saving gathers nothing, and any
number of ranks, also with row shards, can load it. As a library, with `state_dict` and `load_state_dict` in the form of
a plain torch optimizer (`owner_state.py`), the partition replaces fairscale's OSS.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT

from configs.plan import plan_of
from parallelisms.cut_parameters import local
from parallelisms.grad_norm import clip_grads_with_norm, grad_norm
from parallelisms.owned_parameter import OwnedParameter
from parallelisms.owner_state import gather_state, numbered, settings_of
from parallelisms.ranks import gather

BUCKET_BYTES = 32 << 20
"""Large enough to hide a broadcast's latency, small enough that the first layers do not wait long."""

_MASTER = "master"
_MASTERS = "masters"


Name = TypeVar("Name", str, int)


def assign_owners(sizes: Mapping[Name, int], loads: Sequence[int]) -> dict[Name, int]:
    """Assign each parameter to a rank: the largest first, each to the rank with the smallest load so far.

    The largest load is at most 4/3 of the optimum (Graham 1969, section 5). Ties between sizes are broken by name and
    between loads by rank, so that all ranks and launches agree without communicating.

    Args:
        sizes: number of elements of each parameter, or what else it costs to own it, by name.
        loads: the same of what each rank already owns.
    """
    loads = list(loads)
    owners: dict[Name, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def by_holders(
    groups: Iterable[Mapping[str, Any]], all_ranks: dist.ProcessGroup
) -> dict[dist.ProcessGroup, list[dict[str, Any]]]:
    """Divide parameter groups by the ranks that hold the same parameters: under expert parallelism, experts are apart.

    Args:
        groups: with names; FSDP has replicated their parameters, over `Mesh.fsdp` or `Mesh.expert_fsdp`.
        all_ranks: hold the parameters that no technique has sharded or replicated, on a single rank.
    """
    found: dict[dist.ProcessGroup, list[dict[str, Any]]] = defaultdict(list)
    for group in groups:
        members: dict[dist.ProcessGroup, list[tuple[str, Parameter]]] = defaultdict(list)
        for name, parameter in group["params"]:
            ranks = parameter.device_mesh.get_group(0) if isinstance(parameter, DTensor) else all_ranks
            members[ranks].append((name, parameter))
        for ranks, named in members.items():
            found[ranks].append({**group, "params": named})
    return found


@dataclass(frozen=True)
class _Broadcast:
    """Parameters that one owner is sending to all ranks."""

    work: dist.Work | None
    buffer: Tensor
    """The tensor that is sent: a flat buffer, or the parameter itself if there is only one."""
    parameters: list[Parameter]
    unpacks: bool
    """Whether the parameters must be copied from the buffer."""

    def finish(self) -> None:
        """Wait (on a GPU: make its stream wait), and copy into the parameters."""
        if self.work is not None:
            self.work.wait()
        if self.unpacks:
            targets = [local(p) for p in self.parameters]
            parts = self.buffer.split([target.numel() for target in targets])
            torch._foreach_copy_(targets, [part.view_as(t) for part, t in zip(parts, targets, strict=True)])


class OwnerPartition(Optimizer):
    """Torch optimizers over the parameters that this rank owns, with the interface of one over all parameters.

    `param_groups` holds all parameters on all ranks; what a schedule sets there applies to the owners' updates. `state`
    holds only what this rank owns. Gradients must be reduced, so that they are equal on all ranks, and clipped as
    without a partition. All ranks must make the same calls in the same order, and freeze and unfreeze (`requires_grad`)
    the same parameters; a frozen parameter is neither updated nor sent, but keeps its owner and its state.
    """

    def __init__(
        self,
        params: ParamsT,
        process_group: dist.ProcessGroup | None = None,
        broadcast_dtype: torch.dtype | None = None,
        optim: Callable[..., Optimizer] = SGD,
        loads: Sequence[int] = (),
        **defaults: Any,
    ) -> None:
        """Assign the parameters to owners. A rank may own none.

        Args:
            params: parameters or groups, as for any torch optimizer, with or without names: replicated tensors, or
                DTensors that are sharded only over mesh dimensions outside of `process_group`. A group may have its own
                optimizer in "optimizer", which is called with a list of one group and does not use `defaults`; "whole"
                (default: False) makes it see whole parameters where they are split.
            process_group: the ranks that hold replicas; None: all ranks.
            broadcast_dtype: type in which parameters are sent; None: their own.
            optim: creates the optimizer of a group without its own, such as the class `torch.optim.AdamW`.
            loads: elements that each rank owns in other partitions; default: none.
            defaults: settings of that optimizer, where a group does not set them.
        """
        ranks = dist.group.WORLD if process_group is None else process_group
        assert ranks is not None, "initialize the process group first"
        self._ranks = ranks
        self._rank = dist.get_rank(self._ranks)
        self._is_alone = dist.get_world_size(self._ranks) == 1
        self._broadcast_dtype = broadcast_dtype
        self._optim = partial(optim, **defaults)
        self.loads = list(loads) or [0] * dist.get_world_size(self._ranks)
        """Elements that each rank owns, in other partitions as well."""
        self._owner: dict[Parameter, int] = {}
        self._mine: dict[Parameter, OwnedParameter] = {}
        self._inner: list[Optimizer] = []  # one per group
        self._forward_order: dict[Parameter, int] = {}
        self._on_their_way: dict[Parameter, _Broadcast] = {}
        self._consolidated: dict[str, Any] | None = None
        """Returned by `state_dict()`; {}: another rank has it, or it is out of date; None: `state_dict()` gathers."""
        super().__init__(params, defaults={})
        self._assign(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters during training; the owners of earlier ones do not change."""
        defaults = self.defaults
        self.defaults = {}  # the group's own optimizer adds the defaults
        try:
            super().add_param_group(param_group)
        finally:
            self.defaults = defaults
        self._forget_consolidated()
        if self._inner:  # otherwise the constructor is adding the first groups, which it assigns together
            self._assign([param_group])

    def overlap_forward(self, model: nn.Module) -> None:
        """Let `step` return before its broadcasts finish.

        Each group of `model.plan.fsdp_groups`, and the root for all other parameters, then waits in its next forward
        pass. Call `wait` before reading parameters between a step and the next forward pass, and before anything that
        gathers them ahead of the forward hooks, such as FSDP's `unshard`.
        """
        groups = [[model.get_submodule(name) for name in names] for names in plan_of(model).fsdp_groups]
        rest = dict.fromkeys(p for p in model.parameters() if p in self._owner)
        for modules in groups:
            parameters = [p for module in modules for p in module.parameters() if p in rest]
            for module in modules:
                # Before FSDP's own hook, which copies the parameters for the computation.
                module.register_forward_pre_hook(partial(self._before_forward, parameters), prepend=True)
            for parameter in parameters:
                rest.pop(parameter)
                self._forward_order[parameter] = len(self._forward_order) + 1
        model.register_forward_pre_hook(partial(self._before_forward, list(rest)), prepend=True)
        self._forward_order |= dict.fromkeys(rest, 0)

    # ------------------------------------------------------------------ a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:  # type: ignore[override]
        """Update the parameters that this rank owns, and send them.

        Args:
            closure: recomputes the gradients; called once, on every rank. An optimizer that calls it repeatedly (LBFGS)
                cannot be partitioned.
            arguments: passed to the `step` of each group's optimizer.

        Returns:
            What `closure` returned.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.wait()
        for group, inner in zip(self.param_groups, self._inner, strict=True):
            inner.param_groups[0].update(settings_of(group))
            owned = [self._mine[p] for p in group["params"] if p in self._mine]
            for each in owned:
                each.lend()
            inner.step(**arguments)
            group.update(settings_of(inner.param_groups[0]))  # some optimizers keep state there
            for each in owned:
                each.take_back()
        self._send([p for p in self._owner if p.requires_grad])
        self._forget_consolidated()
        return result

    def wait(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Wait for updated parameters (default: all) that owners are still sending."""
        for parameter in list(self._on_their_way if parameters is None else parameters):
            broadcast = self._on_their_way.get(parameter)
            if broadcast is not None:
                broadcast.finish()
                for arrived in broadcast.parameters:
                    del self._on_their_way[arrived]
                    if arrived in self._mine:
                        self._mine[arrived].arrived()

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[list[Parameter]], Iterable[Parameter]] | None = None,
    ) -> Tensor:
        """Clip the gradients of all parameters in place as if they were one vector; all ranks must call it.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: p of the norm; inf for the largest absolute value.
            filter_params_fn: chooses the parameters that the norm is measured on, as in fairscale: each rank calls it
                with the parameters that it owns and that have a gradient. All gradients are scaled all the same.

        Returns:
            The norm before clipping, equal on all ranks, like that of `torch.nn.utils.clip_grad_norm_`, which rejects
            differently sharded parameters.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        measured = parameters if filter_params_fn is None else self._choose(parameters, filter_params_fn)
        # A tensor without a gradient has norm 0.
        norm = grad_norm(measured or [parameters[0].detach()], float(norm_type))
        clip_grads_with_norm(parameters, float(max_norm), norm)
        return norm

    def _choose(
        self, parameters: Sequence[Parameter], choose: Callable[[list[Parameter]], Iterable[Parameter]]
    ) -> list[Parameter]:
        """The parameters that their owners choose; every rank has all gradients, so only numbers are exchanged."""
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        own = [p for p in parameters if p in self._mine and p.grad is not None]
        chosen = gather([numbers[p] for p in choose(own)], self._ranks)
        return [parameters[number] for number in sorted(set(chain.from_iterable(chosen)))]

    def _before_forward(self, parameters: list[Parameter], *_: Any) -> None:
        self.wait(parameters)

    # ------------------------------------------------------------------ broadcasts

    def _send(self, parameters: Iterable[Parameter]) -> None:
        if self._is_alone and self._broadcast_dtype is None:
            return
        for bucket in self._buckets(parameters):
            broadcast = self._start(bucket)
            self._on_their_way |= dict.fromkeys(bucket, broadcast)
        if not self._forward_order:
            self.wait()

    def _buckets(self, parameters: Iterable[Parameter]) -> Iterator[list[Parameter]]:
        """Yield parameters of one owner and type, in the order of the forward pass, up to BUCKET_BYTES in total."""
        filling: dict[tuple[int, torch.dtype], list[Parameter]] = {}
        for parameter in sorted(parameters, key=lambda p: self._forward_order.get(p, 0)):
            key = (self._owner[parameter], parameter.dtype)
            bucket = filling.setdefault(key, [])
            if bucket and sum(local(p).nbytes for p in (*bucket, parameter)) > BUCKET_BYTES:
                yield bucket
                bucket = filling[key] = []
            bucket.append(parameter)
        yield from filter(None, filling.values())

    def _start(self, bucket: list[Parameter]) -> _Broadcast:
        owner = self._owner[bucket[0]]
        is_mine = owner == self._rank
        rounds = self._broadcast_dtype is not None
        tensors = [local(p) for p in bucket]
        if len(bucket) == 1 and not rounds and tensors[0].is_contiguous():
            buffer = tensors[0]
            unpacks = False
        else:
            sizes = [t.numel() for t in tensors]
            dtype = self._broadcast_dtype or bucket[0].dtype
            buffer = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
            unpacks = rounds or not is_mine
            if is_mine:
                sources = [self._mine[p].to_send() for p in bucket]
                parts = buffer.split(sizes)
                torch._foreach_copy_([part.view_as(s) for part, s in zip(parts, sources, strict=True)], sources)
        work = None
        if not self._is_alone:
            work = dist.broadcast(buffer, group=self._ranks, group_src=owner, async_op=True)
        return _Broadcast(work, buffer, bucket, unpacks)

    # ------------------------------------------------------------------ ownership

    def _assign(self, groups: Sequence[dict[str, Any]]) -> None:
        parameters = [p for group in groups for p in group["params"]]
        # Parameters without names go by number, which is also the same on all ranks.
        names = [n for g in groups for n in g.get("param_names", ())] or list(map(str, range(len(parameters))))
        sizes = {name: local(p).numel() for name, p in zip(names, parameters, strict=True)}
        owners = assign_owners(sizes, self.loads)
        for name, owner in owners.items():
            self.loads[owner] += sizes[name]
        self._owner |= {parameter: owners[name] for name, parameter in zip(names, parameters, strict=True)}
        for group in groups:
            self._take_over(group)
        common = set.intersection(*(set(inner.defaults) for inner in self._inner))
        self.defaults = {key: value for key, value in self._inner[0].defaults.items() if key in common}

    @torch.no_grad()
    def _take_over(self, group: dict[str, Any]) -> None:
        """Create the inner optimizer of a group, over the parameters in it that this rank owns."""
        make = group.pop("optimizer", self._optim)
        needs_whole = group.pop("whole", False)
        owned = {
            p: OwnedParameter(p, self._broadcast_dtype, needs_whole)
            for p in group["params"]
            if self._owner[p] == self._rank
        }
        if self._broadcast_dtype is not None:
            for parameter in group["params"]:
                local(parameter).copy_(local(parameter).to(self._broadcast_dtype))
        self._mine |= owned
        names = dict(zip(group["params"], group.get("param_names", ()), strict=False))
        plain = [(names[p], each.plain) if names else each.plain for p, each in owned.items()]
        inner = make([{**settings_of(group), "params": plain}])
        for each in owned.values():
            each.arrived()
            each.take_back()
        for key, default in settings_of(inner.param_groups[0]).items():
            group.setdefault(key, default)
        self._inner.append(inner)
        self._show_state(owned, inner)

    def _show_state(self, owned: Iterable[Parameter], inner: Optimizer) -> None:
        # The same dicts: torch optimizers fill them in place, now or in their first step.
        self.state.update({parameter: inner.state[self._mine[parameter].plain] for parameter in owned})

    # ------------------------------------------------------------------ saving and loading

    def owned(self) -> dict[Parameter, Tensor]:
        """The parameters that this rank saves: those it owns, in full precision; DTensors where they are split.

        To restore a state, write into these and into `owned_state` in place, on all ranks, and call
        `owned_were_loaded`.
        """
        return {parameter: each.saved() for parameter, each in self._mine.items()}

    def owned_state(self, parameter: Parameter) -> dict[str, Any]:
        """The optimizer state of a parameter, DTensors where it is split; empty if another rank owns it."""
        if parameter not in self._mine:
            return {}
        return {key: self._mine[parameter].placed(value) for key, value in self.state[parameter].items()}

    @torch.no_grad()
    def owned_were_loaded(self) -> None:
        """Send all parameters, also frozen ones, after their owners have loaded them, and wait until all are there."""
        self.wait()
        self._send(self._owner)
        self.wait()

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Gather the state for later calls of `state_dict()`, by fairscale's name; all ranks must call it.

        Until the next step, `state_dict()` then returns it without communication, on the recipient alone.

        Args:
            recipient_rank: the only rank of the process group to receive the state; -1: all ranks.
        """
        self._consolidated = self._gather_state(None if recipient_rank == -1 else recipient_rank)

    def _forget_consolidated(self) -> None:
        self._consolidated = None if self._consolidated is None else {}

    def state_dict(self, rank: int | None = None) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of all ranks in CPU memory, in the form of a plain torch optimizer over the same groups.

        With a `broadcast_dtype` it also has the parameters in full precision, by number under "masters", which a plain
        optimizer ignores. All ranks must call it, unless `consolidate_state_dict` has gathered the state; tensors are
        sent one by one.

        Args:
            rank: the only rank of the process group to receive the state (others return {}); None: all ranks, or, once
                `consolidate_state_dict` was called, what that gathered.

        Raises:
            RuntimeError: `consolidate_state_dict` was called for another rank, or before the last step.
        """
        if rank is not None or self._consolidated is None:
            return self._gather_state(rank)
        if not self._consolidated:
            raise RuntimeError(
                "this rank has no consolidated state that is up to date: after the last step, call "
                "consolidate_state_dict(recipient_rank) on all ranks (-1: all receive the state), then state_dict() on "
                "the recipient"
            )
        return self._consolidated

    def _gather_state(self, rank: int | None) -> dict[str, Any]:
        parameters = [p for group in self.param_groups for p in group["params"]]
        rounds = self._broadcast_dtype is not None
        mine: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(parameters):
            state = self.owned_state(parameter)
            if rounds and parameter in self._mine:
                self._mine[parameter].follow()
                state[_MASTER] = self._mine[parameter].saved()
            if state:
                mine[number] = state
        gathered = gather_state(mine, self._ranks, local(parameters[0]).device, rank)
        if rank not in (None, self._rank):
            return {}
        masters = {number: state.pop(_MASTER) for number, state in gathered.items() if _MASTER in state}
        state_of = {number: values for number, values in gathered.items() if values}
        found = {"state": state_of, "param_groups": numbered(self.param_groups)}
        return {**found, _MASTERS: masters} if rounds else found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load what this rank owns, and the settings, from the state of a plain torch optimizer over the same groups.

        With a `broadcast_dtype`, parameters regain the full precision under "masters" if the model's values are what
        that rounds to; the model may be loaded before or after. Other parameters keep the model's values.
        """
        self.wait()
        self._forget_consolidated()
        for group, inner, saved in zip(self.param_groups, self._inner, state_dict["param_groups"], strict=True):
            owned = [(i, p) for i, p in zip(saved["params"], group["params"], strict=True) if p in self._mine]
            there = {}
            for at, (i, p) in enumerate(owned):
                state = state_dict["state"].get(i)
                if state is not None:
                    there[at] = {key: self._mine[p].taken_from(value) for key, value in state.items()}
            settings = {**settings_of(saved), "params": list(range(len(owned)))}
            inner.load_state_dict({"state": there, "param_groups": [settings]})
            group.update(settings_of(saved))
            self._show_state([p for _, p in owned], inner)
            for i, p in owned if self._broadcast_dtype is not None else ():
                self._mine[p].load_master(state_dict.get(_MASTERS, {}).get(i))
