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

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, prod

import torch

from configs.checks import check
from configs.errors import ConfigError
from configs.layout import MeshSizes, layer_numbers, mesh_sizes, reshard_after_forward
from configs.reading.toml_text import value_text
from configs.schema import ActivationCheckpoint, Config, Fsdp
from configs.stages import layers_of_stages
from parallelisms.compute_copies import CAST_BYTES, keeps_copies
from parallelisms.mesh import Mesh
from parallelisms.ranks import gather
from trainer.planning.block import block_widths
from trainer.planning.memory import estimate_memory
from trainer.planning.skeleton import skeleton
from trainer.report.units import size

SHARE_OF_A_CARD = 0.9
"""The part of a GPU's memory that memory_limit_gib = "device" fills with tensors, by estimate. CUDA and NCCL take up to
1 GiB of the rest, the allocator's unused pieces and the estimate's error another few percent."""
_FREED = 'fsdp.reshard_after_forward = "always"'
_FLOPS_PER_BYTE = 200
"""bfloat16 products that an H100 or H200 computes while it moves a byte: 989 TFLOP/s, 3.4 and 4.8 TB/s."""


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
        return choose(config, mesh.sizes, device.type, asked * 2**30)
    if device.type != "cuda":
        raise ConfigError(
            'activation_checkpoint.memory_limit_gib = "device" is about a GPU\'s memory, and this run is on a CPU; set '
            "a number of GiB, or 0 to choose activation_checkpoint.mode yourself"
        )
    return choose(config, mesh.sizes, device.type, min(gather(_share_of(device))))


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


def choose(config: Config, sizes: MeshSizes, device_type: str, limit: float) -> Choice:
    """The way of checkpointing that costs the least and fits `limit` bytes.

    Args:
        config, sizes, device_type: the job, its mesh, and "cpu" or "cuda".
        limit: bytes that a rank's tensors may take.

    Raises:
        ConfigError: even full recomputation does not fit.
    """
    if (freeing := freeing_copies(config, sizes)) == config:
        return _least(config, sizes, device_type, limit)
    freed = replace(_least(freeing, sizes, device_type, limit), frees_copies=True)
    with suppress(ConfigError):  # the copies may take too much
        kept = _least(config, sizes, device_type, limit)
        return kept if kept.repeated <= freed.repeated + _casts(config) else freed
    return freed


def _least(config: Config, sizes: MeshSizes, device_type: str, limit: float) -> Choice:
    """Do what `choose` does, with the copies that `config` asks for."""

    def needed(table: ActivationCheckpoint) -> int:
        changed = config.model_copy(update={"activation_checkpoint": table})
        return estimate_memory(changed, sizes, device_type).device

    asked = config.activation_checkpoint.memory_limit_gib
    plain = ActivationCheckpoint()
    if (all_kept := needed(plain)) <= limit:
        return Choice(plain, False, asked, int(limit), all_kept, 0.0)
    forward = _forward(config)
    found: list[Choice] = []
    for way in _ways(config):
        if check(config.model_copy(update={"activation_checkpoint": way.table}), sizes.world_size):
            continue  # a zero-bubble pipeline can't keep single ops
        at_most = needed(way.table)
        if at_most <= limit:
            table = _on_fewest_layers(config, way.table, needed, limit, all_kept, at_most)
            repeated = sum(way.repeats(_Cost.of(config, layer)) for layer in _layers(config, table))
            found.append(Choice(table, False, asked, int(limit), needed(table), repeated / forward))
    if not found:
        raise ConfigError(
            f"activation_checkpoint.memory_limit_gib = {value_text(asked)} allows {size(limit)} for a rank's tensors, "
            f"and even with full recomputation they take about {size(at_most)}; raise it, lower "
            f"training.micro_batch_size (now {config.training.micro_batch_size}), or use more ranks"
        )
    return min(found, key=lambda choice: choice.repeated)


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


def _casts(config: Config) -> float:
    """A micro-batch's extra cost of transient copies over kept ones, as a fraction of all blocks' forward pass."""
    elements = sum(map(prod, skeleton(config.model).shapes.values()))
    tokens = config.training.micro_batch_size * config.training.seq_len
    return _FLOPS_PER_BYTE * CAST_BYTES * elements / tokens / _forward(config)


# --------------------------------------------------------------------------- how many layers


def _on_fewest_layers(
    config: Config,
    table: ActivationCheckpoint,
    needed: Callable[[ActivationCheckpoint], int],
    limit: float,
    without: int,
    with_all: int,
) -> ActivationCheckpoint:
    """`table` for the first layers of each stage, as few as fit.

    Args:
        without, with_all: bytes needed without checkpointing, and with `table` on all layers.
    """
    stages = layers_of_stages(config)
    most = max(map(len, stages))

    def first(n: int) -> ActivationCheckpoint:
        if n >= most:
            return table
        ranges = (f"{stage[0]}-{stage[min(n, len(stage)) - 1]}" for stage in stages)
        return table.model_copy(update={"layers": ",".join(ranges)})

    # Memory falls nearly evenly with each layer, so this guess is off by one or two.
    n = min(most, max(1, ceil(most * (without - limit) / (without - with_all))))
    while n < most and needed(first(n)) > limit:
        n += 1
    while n > 1 and needed(first(n - 1)) <= limit:
        n -= 1
    return first(n)


def _layers(config: Config, table: ActivationCheckpoint) -> list[int]:
    n_layers = config.model.n_layers
    return list(range(n_layers)) if table.layers is None else layer_numbers(table.layers, n_layers)


# --------------------------------------------------------------------------- the ways, and what they repeat


@dataclass(frozen=True)
class _Cost:
    """The cost of a block's forward pass per token, in FLOPs."""

    elementwise: float
    """Norms, rotary positions, SwiGLU."""
    every_second: float
    """q, v and gate."""
    all_others: float
    """k, o and up; the last product is never repeated, since nothing that backward needs depends on it."""
    last: float
    attention: float

    @classmethod
    def of(cls, config: Config, layer: int) -> "_Cost":
        block = block_widths(config, layer, tp=1)
        moved = 4 * block.stream + 2 * (block.query + block.kv) + 3 * block.ffn
        bytes_per_element = getattr(torch, config.training.compute_dtype).itemsize
        return cls(
            elementwise=_FLOPS_PER_BYTE * bytes_per_element * moved,
            every_second=2 * block.stream * (block.query + block.kv + block.ffn),
            all_others=2 * block.stream * (block.kv + block.query + block.ffn),
            last=2 * block.stream * block.ffn,
            attention=2 * block.query * config.training.seq_len,  # half of the scores
        )

    @property
    def forward(self) -> float:
        return self.elementwise + self.every_second + self.all_others + self.last + self.attention


def _forward(config: Config) -> float:
    """The cost of all blocks' forward pass."""
    return sum(_Cost.of(config, layer).forward for layer in range(config.model.n_layers))


@dataclass(frozen=True)
class _Way:
    """A way to checkpoint a block."""

    table: ActivationCheckpoint
    repeats: Callable[[_Cost], float]
    """FLOPs that backward repeats."""


def _ways(config: Config) -> Iterator[_Way]:
    """The ways, each of which keeps less than the one before."""
    selective = ActivationCheckpoint(mode="selective")
    yield _Way(selective, lambda cost: cost.elementwise)
    if config.model.n_experts is None:  # experts are not among the matrices that are counted
        table = selective.model_copy(update={"save_every_nth_matmul": 2})
        yield _Way(table, lambda cost: cost.elementwise + cost.every_second)
    few = [op for op in skeleton(config.model).plan.save_ops if not op.startswith(_PRODUCTS)]
    without_products = selective.model_copy(update={"save_ops": few})
    yield _Way(without_products, lambda cost: cost.elementwise + cost.every_second + cost.all_others)
    yield _Way(ActivationCheckpoint(mode="full"), lambda cost: cost.forward - cost.last)


_PRODUCTS = ("aten.mm", "aten._scaled_mm", "keel.grouped_mm", "_c10d_functional.reduce_scatter_tensor")
"""The matrix products among the ops that a plan names, and the tensor-parallel sum of the terms that they compute."""
