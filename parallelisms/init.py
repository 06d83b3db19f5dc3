"""Initial weights that do not depend on the mesh.

If each rank drew from its own random stream, the weights would depend on the mesh. Instead, every block of rows of
every parameter has its own generator, keyed by (seed, parameter name, block), and a rank draws only the blocks that
contain rows of its shard. The values are therefore bitwise equal on any mesh and device, and a rank never holds more
than its shard and one block per thread. Values are drawn on the CPU in float32, whatever the parameter's device and
dtype, so that a float64 proof and a bfloat16 run start from the same point.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import Any, cast

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs.machine import available_cores
from configs.plan import Initial
from parallelisms.ranks import local_part
from parallelisms.ties import ties_kept

BLOCK_ELEMENTS = 1 << 20  # 4 MiB in float32: cheap to draw and discard, and large enough to need few generators
TRUNCATION = 3.0  # standard deviations; as in torchtitan and OLMo, so that no weight starts as an outlier


def materialize(model: nn.Module, device: torch.device, seed: int, offload: bool = False) -> None:
    """Move a model (possibly sharded) from the meta device to `device` and initialize its weights.

    Args:
        model: its `init_std(name)` says how each parameter starts; modules with buffers have `init_buffers()`.
        device: where the model computes.
        seed: the run's seed.
        offload: keep parameters in CPU memory, wherever the model computes.

    Raises:
        RuntimeError: a parameter or buffer was not initialized; the message names it.
    """
    allocate(model, device, offload)
    if hasattr(model, "initial_values"):
        _fill(model, cast(Callable[[int], Callable[[str], Tensor]], model.initial_values)(seed))
        check_initialized(model, lambda name: True)
        return
    init_std = cast(Callable[[str], Initial], model.init_std)
    zeros = {name for name, _ in model.named_parameters() if init_std(name) == 0.0}
    with ThreadPoolExecutor(_threads()) as pool:
        for name, parameter in model.named_parameters():
            _unset(parameter)
            _initialize(parameter, init_std(name), f"{seed}/{name}", pool)
    check_initialized(model, zeros.__contains__)


def allocate(model: nn.Module, device: torch.device, offload: bool = False) -> None:
    """Move a model from the meta device, with values in its buffers alone; arguments as of `materialize`."""
    with ties_kept(model):
        model.to_empty(device="cpu" if offload else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            is_persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, _unset(buffer.to(device)), persistent=is_persistent)
    for module in model.modules():
        if hasattr(module, "init_buffers"):
            cast(Callable[[], None], module.init_buffers)()


def _fill(model: nn.Module, whole: Callable[[str], Tensor]) -> None:
    """Copy this rank's part of values that the model draws whole, one parameter after the other."""
    for name, parameter in model.named_parameters():
        values = whole(name)
        for dim, index in enumerate(local_indices(parameter)):
            if len(index) < values.shape[dim]:
                values = values.index_select(dim, index)
        local_part(parameter).detach().copy_(values)


def _threads() -> int:
    """Threads for drawing: this process's share of the machine's cores."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _unset(tensor: Tensor) -> Tensor:
    """Fill with NaN to mark every element as uninitialized; integer tensors cannot be marked."""
    with torch.no_grad():
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor


def _initialize(parameter: Tensor, std: Initial, key: str, pool: ThreadPoolExecutor) -> None:
    local = local_part(parameter).detach()
    if std == "log_of_uniform":
        (rows,) = local_indices(parameter)
        rates = torch.rand(parameter.shape, dtype=torch.float32, generator=_generator(key)) * (16 - 0.01) + 0.01
        local.copy_(rates.log()[rows])
        return
    if not std:
        local.fill_(1.0 if std is None else 0.0)
        return
    if local.numel() == 0:
        return
    *stacked, columns = local_indices(parameter)
    n_columns = parameter.shape[-1]
    n_rows = parameter.numel() // n_columns
    # Stacked matrices (a mixture's experts) are drawn as one tall matrix, so that a block is no larger for them.
    rows = torch.zeros(1, dtype=torch.int64)
    for size, index in zip(parameter.shape, stacked, strict=False):
        rows = (rows[:, None] * size + index).flatten()
    local = local.view(len(rows), len(columns))
    block_rows = max(1, BLOCK_ELEMENTS // n_columns)

    def fill(block: int) -> None:
        here = (rows // block_rows == block).nonzero().flatten()  # positions in the shard of this block's rows
        shape = (min(block_rows, n_rows - block * block_rows), n_columns)
        values = _truncated_normal(shape, std, f"{key}/{block}")[rows[here] - block * block_rows]
        if len(columns) < n_columns:
            values = values.index_select(1, columns)
        local[here[0] : here[-1] + 1] = values.to(local)

    list(pool.map(fill, (rows // block_rows).unique().tolist()))


def local_indices(parameter: Tensor) -> list[Tensor]:
    """The global indices of the elements in this rank's shard, ascending, for each dimension."""
    return [torch.arange(indices.start, indices.stop) for indices in local_ranges(parameter)]


def local_ranges(parameter: Tensor) -> list[range]:
    """The same without tensors."""
    coordinates = parameter.device_mesh.get_coordinate() if isinstance(parameter, DTensor) else ()
    assert coordinates is not None
    ranges = ranges_at(parameter, coordinates)
    assert tuple(map(len, ranges)) == local_part(parameter).shape, (parameter, ranges)
    return ranges


def ranges_at(parameter: Tensor, coordinates: Sequence[int]) -> list[range]:
    """The global indices of a rank's shard, for each dimension; `coordinates`: its place in the parameter's mesh.

    FSDP shards what tensor parallelism left of a dimension, so the mesh's axes apply from the innermost outward.
    """
    ranges = [range(size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        for axis in reversed(range(parameter.device_mesh.ndim)):
            placement: Any = parameter.placements[axis]
            if not placement.is_replicate():
                here = ranges[placement.dim]
                chunk = ceil(len(here) / parameter.device_mesh.size(axis))
                ranges[placement.dim] = here[coordinates[axis] * chunk :][:chunk]
    return ranges


def _truncated_normal(shape: Iterable[int], std: float, key: str) -> Tensor:
    """Normally distributed values; those beyond the bounds are drawn again.

    `nn.init.trunc_normal_` does this from torch 2.13 on; before, it drew other values of the same distribution.
    """
    generator = _generator(key)
    values = torch.empty(tuple(shape), dtype=torch.float32).normal_(0.0, std, generator=generator)
    bound = torch.tensor(TRUNCATION * std, dtype=torch.float32)
    while (is_beyond := values.abs() > bound).any():
        again = torch.empty_like(values).normal_(0.0, std, generator=generator)
        values = torch.where(is_beyond, again, values)
    return values


def _generator(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(key.encode()) >> 1)


def check_initialized(model: nn.Module, may_be_zero: Callable[[str], bool] = lambda name: False) -> None:
    """Find parameters and buffers that contain a NaN, and parameters that are zero everywhere though they may not be.

    Raises:
        RuntimeError: something was not initialized; the message names each such tensor.
    """
    forgotten = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        local = local_part(tensor)
        is_zero = isinstance(tensor, nn.Parameter) and not may_be_zero(name) and not local.any()
        if local.numel() and (local.isnan().any() or is_zero):
            forgotten.append(name)
    if forgotten:
        raise RuntimeError(f"never initialized: {', '.join(forgotten)}")
