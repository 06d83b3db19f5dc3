"""The least recomputation that fits a limit of memory: what `activation_checkpoint.memory_limit_gib` asks for.

There are a few ways to checkpoint a block, each of which keeps less and repeats more than the one before: recompute
the norms, the rotary positions and SwiGLU; also every second matrix product; all but attention; everything. The first
way that fits is taken, on as few of the first layers of every pipeline stage as fit. The memory is `estimate_memory`'s,
so that the choice is the same on every rank, and known before anything is built.

A single rank that keeps copies of its parameters in compute_dtype (`parallelisms/compute_copies.py`) frees them where
the first of these ways is not enough. Then parameters are cast for each pass of a group of layers. That costs about as
much as the first way and less than the others: for each parameter and micro-batch, 12 bytes are moved.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from configs.checks import check
from configs.errors import ConfigError
from configs.layout import MeshSizes, mesh_sizes, reshard_after_forward
from configs.reading.toml_text import value_text
from configs.schema import ActivationCheckpoint, Config
from configs.stages import layers_of_stages
from configs.table import with_keys
from parallelisms.compute_copies import keeps_copies
from parallelisms.mesh import Mesh
from parallelisms.ranks import gather
from trainer.planning.memory import estimate_memory
from trainer.planning.skeleton import skeleton
from trainer.report.units import size

SHARE_OF_A_CARD = 0.9
"""The part of a GPU's memory that memory_limit_gib = "device" fills with tensors, by estimate. CUDA takes up
to 1 GiB of the rest, NCCL half a GiB a communicator, the allocator's unused pieces and the estimate's error some."""
_FREED = 'fsdp.reshard_after_forward = "always"'


@dataclass(frozen=True)
class Choice:
    """The way of checkpointing that was chosen."""

    job: Config
    """The job as if it had set it."""
    frees_copies: bool
    """Whether a single rank is to free its copies in compute_dtype, by `fsdp.reshard_after_forward`."""
    asked: float | str
    """`memory_limit_gib`; 0: only the copies were in question."""
    limit: int
    """Bytes that a rank's tensors may take."""
    needed: int
    """Bytes that they take by estimate."""

    def __str__(self) -> str:
        changed = self.job.activation_checkpoint.model_dump(exclude_defaults=True) or {"mode": "none"}
        keys = ", ".join(f"{key} = {value_text(value)}" for key, value in changed.items())
        needed = f"about {size(self.needed)} of {size(self.limit)}"
        if not self.asked:
            return f"{_FREED}, since copies of the parameters in compute_dtype do not fit: {needed}"
        also = f", {_FREED}" if self.frees_copies else ""
        return f"activation_checkpoint.memory_limit_gib = {value_text(self.asked)} chooses {keys}{also}: {needed}"


def least_recomputation(config: Config, mesh: Mesh) -> Choice | None:
    """The choice for a run on this mesh, the same on all its ranks, which all must call it; None: the job as it is.

    Raises:
        ConfigError: the job does not fit, or asks for a GPU's memory on a CPU.
    """
    is_by_card = config.activation_checkpoint.memory_limit_gib == "device"
    on_gpu = mesh.device.type == "cuda"
    if is_by_card and not on_gpu:
        raise ConfigError(
            'activation_checkpoint.memory_limit_gib = "device" is about a GPU\'s memory, and this run is on a CPU; set '
            "a number of GiB, or 0 to choose activation_checkpoint.mode yourself"
        )
    card_bytes = torch.cuda.mem_get_info(mesh.device)[1] if on_gpu else None
    if is_by_card:
        card_bytes = min(gather(card_bytes))  # ranks may have different GPUs
    return _choice(config, mesh.sizes, mesh.device.type, card_bytes, mesh)


def planned_choice(config: Config, ranks: int, card_bytes: int | None) -> Choice | None:
    """The choice for a run on other machines; None: the job as it is.

    Args:
        config, ranks: the job, and the number of its ranks.
        card_bytes: a GPU's memory; None if unknown.

    Raises:
        ConfigError: the job does not fit, or its limit is an unknown GPU's.
    """
    if config.activation_checkpoint.memory_limit_gib == "device" and card_bytes is None:
        raise ConfigError(
            'activation_checkpoint.memory_limit_gib = "device" chooses by the memory of a GPU; say with --memory-gib '
            "how much one has"
        )
    return _choice(config, mesh_sizes(config, ranks), "cpu" if config.job.device == "cpu" else "cuda", card_bytes)


def chosen(config: Config, choice: Choice | None) -> Config:
    """The job with the choice in place of the limit; `config` may be another stage of the run that it was made for."""
    if choice is None:
        return config
    tables = {"activation_checkpoint": choice.job.activation_checkpoint, "fsdp": choice.job.fsdp}
    return config.model_copy(update=tables)


def freeing_copies(config: Config, sizes: MeshSizes) -> Config:
    """The job with its copies freed; the job itself if it has none, or asks for them by name."""
    has_copies = keeps_copies(sizes.world_size, config)
    if not has_copies or reshard_after_forward(config.fsdp) != "default":
        return config
    return with_keys(config, fsdp={"reshard_after_forward": "always"})


def _choice(
    config: Config, sizes: MeshSizes, device_type: str, card_bytes: int | None, mesh: Mesh | None = None
) -> Choice | None:
    """The choice by the job's own limit or, where it asks for none and a GPU's memory is known, whether copies fit."""
    asked = config.activation_checkpoint.memory_limit_gib
    share = SHARE_OF_A_CARD * (card_bytes or 0)
    if asked:
        return choose(config, sizes, device_type, share if asked == "device" else asked * 2**30, mesh)
    freeing = freeing_copies(config, sizes)
    if not card_bytes or freeing == config or estimate_memory(config, sizes, "cuda").device <= share:
        return None
    return Choice(freeing, True, 0, int(share), estimate_memory(freeing, sizes, "cuda").device)


def choose(config: Config, sizes: MeshSizes, device_type: str, limit: float, mesh: Mesh | None = None) -> Choice:
    """The first way of checkpointing that fits `limit` bytes.

    Args:
        config, sizes, device_type: the job, its mesh, and "cpu" or "cuda".
        limit: bytes that a rank's tensors may take.
        mesh: as for `measure_blocks`.

    Raises:
        ConfigError: even full recomputation does not fit.
    """
    asked = config.activation_checkpoint.memory_limit_gib

    def estimated(job: Config) -> Choice:
        needed = estimate_memory(job, sizes, device_type, mesh).device
        return Choice(job, job.fsdp != config.fsdp, asked, int(limit), needed)

    freeing = freeing_copies(config, sizes)
    choices = list(ways(config))
    with_copies = [_with(config, way) for way in choices[:2]] if freeing != config else []
    for job in with_copies + [_with(freeing, way) for way in choices]:
        choice = estimated(job)
        is_allowed = not check(job, sizes.world_size)  # a zero-bubble pipeline can't keep single ops
        if choice.needed <= limit and is_allowed:
            return _on_fewest_layers(choice, estimated)
    raise ConfigError(
        f"activation_checkpoint.memory_limit_gib = {value_text(asked)} allows {size(limit)} for a rank's tensors, "
        f"and even with full recomputation they take about {size(choice.needed)}; raise it, lower "
        f"training.micro_batch_size (now {config.training.micro_batch_size}), or use more ranks"
    )


def _with(config: Config, table: ActivationCheckpoint) -> Config:
    return config.model_copy(update={"activation_checkpoint": table})


def _on_fewest_layers(choice: Choice, estimated: Callable[[Config], Choice]) -> Choice:
    """A choice that fits on all layers, for the first layers of each pipeline stage, as few as fit."""
    table = choice.job.activation_checkpoint
    if table.mode == "none":
        return choice
    stages = layers_of_stages(choice.job)

    def first(n: int) -> Choice:
        ranges = (f"{stage[0]}-{stage[min(n, len(stage)) - 1]}" for stage in stages)
        return estimated(_with(choice.job, table.model_copy(update={"layers": ",".join(ranges)})))

    most = max(map(len, stages))
    # Memory falls with each layer.
    n = bisect_left(range(1, most), True, key=lambda n: first(n).needed <= choice.limit) + 1
    return first(n) if n < most else choice


def ways(config: Config) -> Iterator[ActivationCheckpoint]:
    """The ways, each of which keeps less than the one before."""
    yield ActivationCheckpoint()
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
