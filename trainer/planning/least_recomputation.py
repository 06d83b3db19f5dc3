"""The least recomputation that fits a limit of memory: what `activation_checkpoint.memory_limit_gib` asks for.

There are a few ways to checkpoint a block, each of which keeps less and repeats more than the one before: recompute
the norms, the rotary positions and SwiGLU; also every second matrix product; all but attention; everything. Each way
is tried on the first layers of every pipeline stage, as few as fit, and the one that repeats the least is taken. The
memory is `estimate_memory`'s, so that the choice is the same on every rank, and known before anything is built.

What is repeated is estimated in FLOPs, in which a byte that is moved counts as much as the products that a GPU could
compute meanwhile.

A single rank that keeps copies of its parameters in compute_dtype (`parallelisms/compute_copies.py`) can free them
instead. Then parameters are cast for each pass of a group of layers, which counts as what is repeated does.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

import torch

from configs.checks import check
from configs.errors import ConfigError
from configs.layout import MeshSizes, mesh_sizes, reshard_after_forward
from configs.reading.toml_text import value_text
from configs.schema import ActivationCheckpoint, Config, Fsdp
from configs.stages import layers_of_stages
from parallelisms.compute_copies import CAST_BYTES, keeps_copies
from parallelisms.mesh import Mesh
from parallelisms.ranks import gather
from trainer.planning.activations import measure_blocks
from trainer.planning.block_memory import FLOPS_PER_BYTE
from trainer.planning.memory import estimate_memory
from trainer.planning.skeleton import skeleton
from trainer.report.units import size

SHARE_OF_A_CARD = 0.9
"""The part of a GPU's memory that memory_limit_gib = "device" fills with tensors, by estimate. CUDA and NCCL take up to
1 GiB of the rest, the allocator's unused pieces and the estimate's error another few percent."""
_FREED = 'fsdp.reshard_after_forward = "always"'


@dataclass(frozen=True)
class Choice:
    """The way of checkpointing that was chosen."""

    table: ActivationCheckpoint
    """The table as if the job had set it."""
    frees_copies: bool
    """Whether a single rank is to free its copies in compute_dtype, by `fsdp.reshard_after_forward`."""
    asked: float | str
    """`memory_limit_gib`; 0: only the copies were in question."""
    limit: int
    """Bytes that a rank's tensors may take."""
    needed: int
    """Bytes that they take by estimate."""
    repeated: float
    """The recomputation as a fraction of all blocks' forward pass."""

    def __str__(self) -> str:
        changed = self.table.model_dump(exclude_defaults=True) or {"mode": "none"}
        keys = ", ".join(f"{key} = {value_text(value)}" for key, value in changed.items())
        needed = f"about {size(self.needed)} of {size(self.limit)}"
        if not self.asked:
            return f"{_FREED}, since copies of the parameters in compute_dtype do not fit: {needed}"
        also = f", {_FREED}" if self.frees_copies else ""
        return (
            f"activation_checkpoint.memory_limit_gib = {value_text(self.asked)} chooses {keys}{also}: {needed}, "
            f"{self.repeated:.0%} of the blocks' forward pass repeated"
        )


def least_recomputation(config: Config, mesh: Mesh) -> Choice | None:
    """The choice for a run on this mesh, the same on all its ranks, which all must call it; None: the job as it is.

    Raises:
        ConfigError: the job does not fit, or asks for a GPU's memory on a CPU.
    """
    asked = config.activation_checkpoint.memory_limit_gib
    device = mesh.device
    if not asked:
        return _without_copies(config, mesh.sizes, _share_of(device)) if device.type == "cuda" else None
    if asked != "device":
        return choose(config, mesh.sizes, device.type, asked * 2**30, mesh)
    if device.type != "cuda":
        raise ConfigError(
            'activation_checkpoint.memory_limit_gib = "device" is about a GPU\'s memory, and this run is on a CPU; set '
            "a number of GiB, or 0 to choose activation_checkpoint.mode yourself"
        )
    return choose(config, mesh.sizes, device.type, min(gather(_share_of(device))), mesh)


def _share_of(device: torch.device) -> float:
    return SHARE_OF_A_CARD * torch.cuda.mem_get_info(device)[1]


def planned_choice(config: Config, ranks: int, card_bytes: int | None) -> Choice | None:
    """The choice for a run on other machines; None: the job as it is.

    Args:
        config, ranks: the job, and the number of its ranks.
        card_bytes: a GPU's memory; None if unknown.

    Raises:
        ConfigError: the job does not fit, or its limit is an unknown GPU's.
    """
    asked = config.activation_checkpoint.memory_limit_gib
    if not asked:
        return _without_copies(config, mesh_sizes(config, ranks), SHARE_OF_A_CARD * card_bytes) if card_bytes else None
    if asked != "device":
        limit = asked * 2**30
    elif card_bytes:
        limit = SHARE_OF_A_CARD * card_bytes
    else:
        raise ConfigError(
            'activation_checkpoint.memory_limit_gib = "device" chooses by the memory of a GPU; say with --memory-gib '
            "how much one has"
        )
    return choose(config, mesh_sizes(config, ranks), "cpu" if config.job.device == "cpu" else "cuda", limit)


def chosen(config: Config, choice: Choice | None) -> Config:
    """The job with the choice in place of the limit."""
    if not choice:
        return config
    config = config.model_copy(update={"activation_checkpoint": choice.table})
    return config.model_copy(update={"fsdp": _freeing(config.fsdp)}) if choice.frees_copies else config


def choose(config: Config, sizes: MeshSizes, device_type: str, limit: float, mesh: Mesh | None = None) -> Choice:
    """The way of checkpointing that costs the least and fits `limit` bytes.

    Args:
        config, sizes, device_type: the job, its mesh, and "cpu" or "cuda".
        limit: bytes that a rank's tensors may take.
        mesh: as for `measure_blocks`.

    Raises:
        ConfigError: even full recomputation does not fit.
    """
    if (freeing := freeing_copies(config, sizes)) == config:
        return _least(config, sizes, device_type, limit, mesh)
    freed = replace(_least(freeing, sizes, device_type, limit, mesh), frees_copies=True)
    with suppress(ConfigError):  # the copies may take too much
        kept = _least(config, sizes, device_type, limit, mesh)
        return kept if kept.repeated <= freed.repeated + _casts(config, sizes) else freed
    return freed


def _least(config: Config, sizes: MeshSizes, device_type: str, limit: float, mesh: Mesh | None) -> Choice:
    """Do what `choose` does, with the copies that `config` asks for."""
    asked = config.activation_checkpoint.memory_limit_gib

    def needed(table: ActivationCheckpoint) -> int:
        return estimate_memory(_with(config, table), sizes, device_type, mesh).device

    def costs(table: ActivationCheckpoint) -> tuple[float, float]:
        return _costs(_with(config, table), sizes, device_type, mesh)

    plain = ActivationCheckpoint()
    if (all_kept := needed(plain)) <= limit:
        return Choice(plain, False, asked, int(limit), all_kept, 0.0)
    forward, backward = costs(plain)
    found: list[Choice] = []
    for way in _ways(config):
        if check(_with(config, way), sizes.world_size):
            continue  # a zero-bubble pipeline can't keep single ops
        at_most = needed(way)
        if at_most <= limit:
            table = _on_fewest_layers(config, way, lambda table: needed(table) <= limit)
            repeated = (costs(table)[1] - backward) / forward
            found.append(Choice(table, False, asked, int(limit), needed(table), repeated))
    if not found:
        raise ConfigError(
            f"activation_checkpoint.memory_limit_gib = {value_text(asked)} allows {size(limit)} for a rank's tensors, "
            f"and even with full recomputation they take about {size(at_most)}; raise it, lower "
            f"training.micro_batch_size (now {config.training.micro_batch_size}), or use more ranks"
        )
    return min(found, key=lambda choice: choice.repeated)


def _with(config: Config, table: ActivationCheckpoint) -> Config:
    return config.model_copy(update={"activation_checkpoint": table})


def _costs(config: Config, sizes: MeshSizes, device_type: str, mesh: Mesh | None = None) -> tuple[float, float]:
    """FLOPs of all blocks' forward passes and of their backward passes, for a micro-batch."""
    blocks = measure_blocks(config, range(config.model.n_layers), sizes, device_type == "cuda", mesh)
    samples = config.training.micro_batch_size
    forward = sum(block.forward_cost for block in blocks.values())
    return samples * forward, samples * sum(block.backward_cost for block in blocks.values())


# --------------------------------------------------------------------------- copies in compute_dtype


def freeing_copies(config: Config, sizes: MeshSizes) -> Config:
    """The job with its copies freed; the job itself if it has none, or asks for them by name."""
    has_copies = keeps_copies(sizes.world_size, config)
    if not has_copies or reshard_after_forward(config.fsdp) != "default":
        return config
    return config.model_copy(update={"fsdp": _freeing(config.fsdp)})


def _freeing(fsdp: Fsdp) -> Fsdp:
    return fsdp.model_copy(update={"reshard_after_forward": "always"})


def _without_copies(config: Config, sizes: MeshSizes, limit: float) -> Choice | None:
    """The job's own way of checkpointing without copies, if they do not fit `limit` bytes of a GPU."""
    freeing = freeing_copies(config, sizes)
    if freeing == config or estimate_memory(config, sizes, "cuda").device <= limit:
        return None
    needed = estimate_memory(freeing, sizes, "cuda").device
    return Choice(config.activation_checkpoint, True, 0, int(limit), needed, 0.0)


def _casts(config: Config, sizes: MeshSizes) -> float:
    """A micro-batch's extra cost of transient copies over kept ones, as a fraction of all blocks' forward pass."""
    elements = sum(map(prod, skeleton(config.model).shapes.values()))
    forward, _ = _costs(_with(config, ActivationCheckpoint()), sizes, "cuda")
    return FLOPS_PER_BYTE * CAST_BYTES * elements / forward


# --------------------------------------------------------------------------- the ways


def _on_fewest_layers(
    config: Config, table: ActivationCheckpoint, fits: Callable[[ActivationCheckpoint], bool]
) -> ActivationCheckpoint:
    """`table`, which fits on all layers, for the first layers of each stage, as few as fit."""
    stages = layers_of_stages(config)
    most = max(map(len, stages))

    def first(n: int) -> ActivationCheckpoint:
        ranges = (f"{stage[0]}-{stage[min(n, len(stage)) - 1]}" for stage in stages)
        return table.model_copy(update={"layers": ",".join(ranges)})

    n = bisect_left(range(1, most), True, key=lambda n: fits(first(n))) + 1  # memory falls with each layer
    return first(n) if n < most else table


def _ways(config: Config) -> Iterator[ActivationCheckpoint]:
    """The ways, each of which keeps less than the one before."""
    plan = skeleton(config.model).plan
    selective = ActivationCheckpoint(mode="selective")
    yield selective
    if not plan.experts:  # experts are not among the matrices that are counted
        yield selective.model_copy(update={"save_every_nth_matmul": 2})
    few = [op for op in plan.save_ops if not op.startswith(_PRODUCTS)]
    yield selective.model_copy(update={"save_ops": few})
    yield ActivationCheckpoint(mode="full")


_PRODUCTS = ("aten.mm", "aten._scaled_mm", "keel.grouped_mm", "_c10d_functional.reduce_scatter_tensor")
"""The matrix products among the ops that a plan names, and the tensor-parallel sum of the terms that they compute."""
