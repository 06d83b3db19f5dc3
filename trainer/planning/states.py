"""Bytes of the state that lasts from step to step: the optimizer's on a rank, and what a checkpoint holds of it."""

import math
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from configs.layout import MeshSizes
from configs.schema import Config
from parallelisms.owner_partition import BUCKET_BYTES, assign_owners
from trainer.optimizers.build import frozen_until, rule_name
from trainer.optimizers.rule import Rule, rule_of
from trainer.planning.skeleton import Skeleton, skeleton

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
"""Bytes of an element, by dtype."""
AVERAGE = "average"
"""Key of a parameter's average among the tensors of its state."""


_frozen: dict[tuple[Skeleton, str], frozenset[str]] = {}


def always_frozen(config: Config, model: Skeleton) -> frozenset[str]:
    """Names of the parameters that never train, found once for all jobs of the same groups."""
    key = model, repr(config.optimizer.groups)
    if key not in _frozen:
        until = frozen_until(config.optimizer, list(model.shapes))
        _frozen[key] = frozenset(name for name, step in until.items() if math.isinf(step))
    return _frozen[key]


def optimizer_bytes(
    config: Config, sizes: MeshSizes, elements: Mapping[str, int], with_parameters: bool = False
) -> list[int]:
    """Bytes of optimizer state, for each rank that holds a different part of it, in order.

    What never trains has none. An owner that sends rounded parameters also keeps them in full precision. An owner's
    rule that needs whole matrices (Muon's) has its state for them whole, even if tensor parallelism shards the
    parameters; so are the parameters in full precision and their average, but not the average of others. What an update
    exchanges is not counted, since it is freed before activations appear.

    Args:
        config, sizes: the job and its mesh.
        elements: number of elements of each parameter, by name.
        with_parameters: also count the parameters that go with it into a checkpoint.
    """
    has_masters = with_parameters or config.fsdp.owner_broadcast_dtype is not None
    masters = BYTES[config.training.dtype] * has_masters
    model = skeleton(config.model)
    frozen = always_frozen(config, model)
    total = [0] * (sizes.replicas if sizes.by_owner else 1)
    owners = _owners(sizes, model, elements)
    states: dict[tuple, dict[str, Tensor]] = {}  # of many parameters, few differ
    for name, size in elements.items():
        own = masters * size
        if name not in frozen:
            shape = model.shapes[name]
            kind = (shape, model.block_of(name) is None, model.is_of_experts(name))  # what a rule is chosen by
            if kind not in states:
                states[kind] = _state(config, model, name)
            is_gathered = sizes.by_owner and model.tp_dimension(name) is not None
            whole = sizes.tp if is_gathered and _rule(config, model, name).hidden_matrices_only else 1
            kept = whole if config.fsdp.owner_broadcast_dtype else 1
            own *= kept
            for key, tensor in states[kind].items():
                times = kept if key.startswith(AVERAGE) else whole
                own += tensor.itemsize * (size * times if tensor.shape == shape else tensor.numel())
        for owner in owners[name]:
            total[owner] += own
    return total


def sent_by_owners(config: Config, sizes: MeshSizes, elements: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Calls and bytes in which owners broadcast what they have updated, by the axis of the ranks that hold it.

    Args:
        config, sizes, elements: as for `optimizer_bytes`.
    """
    if not sizes.by_owner:
        return {}
    model = skeleton(config.model)
    frozen = always_frozen(config, model)
    owners = _owners(sizes, model, elements)
    element = BYTES[config.fsdp.owner_broadcast_dtype or config.training.dtype]
    found: dict[str, tuple[int, int]] = {}
    filled: dict[tuple[str, int], int] = {}
    for name, size in elements.items():
        if name not in frozen:
            axis = "expert_replicas" if sizes.ep > 1 and model.is_of_experts(name) else "replicas"
            bucket = axis, owners[name][0]
            n_bytes = size * BYTES[config.training.dtype]
            begins = bucket not in filled or filled[bucket] + n_bytes > BUCKET_BYTES
            filled[bucket] = n_bytes if begins else filled[bucket] + n_bytes
            calls, before = found.get(axis, (0, 0))
            found[axis] = calls + begins, before + size * element
    return found


def _owners(sizes: MeshSizes, model: Skeleton, elements: Mapping[str, int]) -> dict[str, Sequence[int]]:
    """The ranks with different tokens that own each parameter: several, if each has some of the experts."""
    if not sizes.by_owner:
        return {name: [0] for name in elements}
    apart = {name: size for name, size in elements.items() if sizes.ep > 1 and model.is_of_experts(name)}
    others = {name: size for name, size in elements.items() if name not in apart}
    found: dict[str, Sequence[int]] = {}
    loads = [0] * sizes.replicas
    for name, owner in assign_owners(apart, [0] * sizes.expert_replicas).items():
        found[name] = range(owner * sizes.ep, (owner + 1) * sizes.ep)
        for rank in found[name]:
            loads[rank] += apart[name]
    for name, owner in assign_owners(others, loads).items():
        found[name] = [owner]
    return found


def checkpoint_bytes(config: Config) -> int:
    """Bytes of the tensors in a checkpoint, except the few of a mixture's balancing biases."""
    model = skeleton(config.model)
    frozen = always_frozen(config, model)
    total = 8 * max(1, config.average.last) if config.average.interval else 0  # the average's updates
    for name, shape in model.shapes.items():
        total += prod(shape) * BYTES[config.training.dtype]
        for tensor in () if name in frozen else _state(config, model, name).values():
            total += tensor.nbytes
    return total


def _rule(config: Config, model: Skeleton, name: str) -> type[Rule]:
    """The rule that updates a parameter."""
    is_hidden = model.block_of(name) is not None and len(model.shapes[name]) == 2 + model.is_of_experts(name)
    return rule_of(rule_name(config.optimizer, is_hidden))


_states: dict[tuple, dict[str, Tensor]] = {}


def _state(config: Config, model: Skeleton, name: str) -> dict[str, Tensor]:
    """The optimizer's state of a whole parameter, and its average, on the meta device; made once for all like it."""
    rule = _rule(config, model, name)
    shape = model.shapes[name]
    key = rule, repr(config.optimizer), config.training.dtype, repr(config.average), shape
    if key not in _states:
        parameter = torch.empty(shape, dtype=getattr(torch, config.training.dtype), device="meta")
        kept = parameter.bfloat16() if config.average.dtype == "bfloat16" else parameter
        copies = max(1, config.average.last) if config.average.interval else 0
        average = {f"{AVERAGE}{number}": kept for number in range(copies)}
        _states[key] = rule(config.optimizer).state(parameter) | average
    return _states[key]
