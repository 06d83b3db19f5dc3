"""Bytes of the state that lasts from step to step: the optimizer's on a rank, and what a checkpoint holds of it."""

import math
from collections.abc import Iterable, Mapping
from math import prod

from configs.layout import MeshSizes
from configs.schema import Config
from parallelisms.owner_partition import assign_owners
from trainer.optimizer import frozen_until
from trainer.planning.skeleton import Skeleton, skeleton

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
"""Of an element, by dtype."""


def always_frozen(config: Config, model: Skeleton) -> set[str]:
    """Names of the parameters that never train."""
    return {name for name, step in frozen_until(config.optimizer, list(model.shapes)).items() if math.isinf(step)}


def optimizer_bytes(config: Config, sizes: MeshSizes, elements: Mapping[str, int]) -> list[int]:
    """Bytes of optimizer state, for each rank that holds a different part of it.

    AdamW keeps two moments, in `optimizer.moments_dtype`, and a float32 step count, Muon one momentum; neither keeps
    anything for parameters that never train. An owner that sends rounded parameters also keeps them in full precision.
    Muon's state is of whole matrices, even if tensor parallelism shards the parameters. Broadcast buffers are not
    counted, since they are freed before activations appear.

    Args:
        config, sizes: the job and its mesh.
        elements: number of elements of each parameter, by name.
    """
    state_bytes, moment_bytes = BYTES[config.training.dtype], BYTES[moments_dtype(config)]
    masters, model = config.fsdp.owner_broadcast_dtype is not None, skeleton(config.model)
    frozen = always_frozen(config, model)
    total = [0] * (sizes.replicas if sizes.by_owner else 1)
    owners = assign_owners(elements, total)
    for name, size in elements.items():
        if name in frozen:
            total[owners[name]] += masters * size * state_bytes
            continue
        by_muon = _is_by_muon(config, model, name)
        if by_muon:
            total[owners[name]] += (masters + 1) * sizes.tp * size * state_bytes
        else:
            total[owners[name]] += size * (masters * state_bytes + 2 * moment_bytes) + 4
    return total


def moments_dtype(config: Config) -> str:
    """The type of AdamW's moments."""
    return "bfloat16" if config.optimizer.moments_dtype == "bfloat16" else config.training.dtype


def checkpoint_bytes(config: Config) -> int:
    """Bytes of the tensors in a checkpoint, except the few of a mixture's balancing biases."""
    parameters, optimizer, _, _ = saved_bytes(config, skeleton(config.model).shapes)
    return parameters + optimizer


def saved_bytes(config: Config, names: Iterable[str]) -> tuple[int, int, int, int]:
    """What a checkpoint has of some parameters, whole: bytes of them and of their optimizer state; numbers of tensors
    that FSDP shards, and of the others."""
    model = skeleton(config.model)
    kept = BYTES[config.training.dtype]
    of_moment = BYTES["bfloat16" if config.checkpoint.optimizer_dtype == "bfloat16" else moments_dtype(config)]
    parameters, optimizer, sharded, whole = 0, 0, 0, 0
    frozen = always_frozen(config, model)
    for name in names:
        elements = prod(model.shapes[name])
        parameters, sharded = parameters + elements * kept, sharded + 1
        if name not in frozen:
            moments = 1 if _is_by_muon(config, model, name) else 2
            steps = moments == 2  # AdamW counts them, in float32
            optimizer += elements * of_moment * moments + 4 * steps
            sharded, whole = sharded + moments, whole + steps
    return parameters, optimizer, sharded, whole


def _is_by_muon(config: Config, model: Skeleton, name: str) -> bool:
    return config.optimizer.name == "muon" and model.block_of(name) is not None and len(model.shapes[name]) == 2
