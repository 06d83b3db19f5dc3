"""Keys that memory chooses: what `activation_checkpoint.memory_limit_gib` asks for.

The least recomputation that fits is chosen. There are a few ways to checkpoint a block, each of which keeps less and
repeats more than the one before: recompute the norms, the rotary positions and SwiGLU; also every second matrix
product; all but attention; everything. The first way that fits is taken, on as few of the first layers of every
pipeline stage as fit. The memory is `estimate_memory`'s, so that the choice is the same on every rank, and known before
anything is built.

With `fsdp.zero_stage` or `training.micro_batch_size` "auto", this is done for each stage of ZeRO and each micro-batch
that the global batch can be cut into. Of those that fit, the one is taken whose step takes the shortest on the GPUs of
`_REFERENCE`, by `step_time`: so this choice, too, follows from the job, the mesh and the limit alone.

A single rank that keeps copies of its parameters in compute_dtype (`parallelisms/compute_copies.py`) frees them where
the first of these ways is not enough. Then parameters are cast for each pass of a group of layers. That costs about as
much as the first way and less than the others: for each parameter and micro-batch, 12 bytes are moved.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from configs.checks import check
from configs.errors import ConfigError
from configs.layout import MeshSizes, mesh_sizes, micro_batch_size, reshard_after_forward
from configs.load import LoadedConfig
from configs.reading.keys import flat
from configs.reading.toml_text import value_text
from configs.schema import ActivationCheckpoint, Config
from configs.stages import layers_of_stages
from configs.table import with_keys
from parallelisms.compute_copies import keeps_copies
from parallelisms.mesh import Mesh
from parallelisms.ranks import gather
from trainer.planning.devices import device_named
from trainer.planning.memory import estimate_memory
from trainer.planning.skeleton import skeleton
from trainer.planning.step_time import slowest_rank
from trainer.report.units import size

SHARE_OF_A_CARD = 0.9
"""The part of a GPU's memory that memory_limit_gib = "device" fills with tensors, by estimate. CUDA takes up
to 1 GiB of the rest, NCCL half a GiB a communicator, the allocator's unused pieces and the estimate's error some."""
_REFERENCE = "h100", 8
"""The GPUs on which steps are compared, and how many share a host, whatever the job runs on."""


@dataclass(frozen=True)
class Choice:
    """The keys that were chosen."""

    asked: Config
    """The job that left them open; if it has no limit, only copies in compute_dtype were in question."""
    job: Config
    """The job as if it had set them."""
    sizes: MeshSizes
    """The mesh that they were chosen for."""
    limit: int
    """Bytes that a rank's tensors may take."""
    needed: int
    """Bytes that they take by estimate."""

    @property
    def keys(self) -> dict[str, Any]:
        """The dotted keys with the values that were chosen."""
        table = self.job.activation_checkpoint.model_dump(exclude_defaults=True) or {"mode": "none"}
        was, now = (flat(job.model_dump(include={"fsdp", "training"})) for job in (self.asked, self.job))
        further = {key: value for key, value in now.items() if value != was[key]}
        limit = self.asked.activation_checkpoint.memory_limit_gib
        return (flat({"activation_checkpoint": table}) if limit else {}) | further

    def __str__(self) -> str:
        limit = self.asked.activation_checkpoint.memory_limit_gib
        values = {key.removeprefix("activation_checkpoint."): value for key, value in self.keys.items()}
        keys = ", ".join(f"{key} = {value_text(value)}" for key, value in values.items())
        needed = f"about {size(self.needed)} of {size(self.limit)}"
        if not limit:
            return f"{keys}, since copies of the parameters in compute_dtype do not fit: {needed}"
        return f"activation_checkpoint.memory_limit_gib = {value_text(limit)} chooses {keys}: {needed}"


def choice_by_memory(config: Config, mesh: Mesh, others: Sequence[Config] = ()) -> Choice | None:
    """The choice for a run on this mesh, the same on all its ranks, which all must call it; None: the job as it is.

    Args:
        config, others: the stage of the run with the most tokens in a micro-batch, and its other stages, which must fit
            likewise: one that adds up gradients of several micro-batches may need more.
        mesh: of the run.

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
    return _choice(config, mesh.sizes, mesh.device.type, card_bytes, mesh, others)


def planned_choice(config: Config, ranks: int, card_bytes: int | None, others: Sequence[Config] = ()) -> Choice | None:
    """The choice for a run on other machines; None: the job as it is.

    Args:
        config, others: as for `choice_by_memory`.
        ranks: of the run.
        card_bytes: a GPU's memory; None if unknown.

    Raises:
        ConfigError: the job does not fit, or its limit is an unknown GPU's.
    """
    if config.activation_checkpoint.memory_limit_gib == "device" and card_bytes is None:
        raise ConfigError(
            'activation_checkpoint.memory_limit_gib = "device" chooses by the memory of a GPU; say with --memory-gib '
            "how much one has"
        )
    device_type = "cpu" if config.job.device == "cpu" else "cuda"
    return _choice(config, mesh_sizes(config, ranks), device_type, card_bytes, None, others)


def chosen(config: Config, choice: Choice | None) -> Config:
    """The job with the choice in place of the limit; `config` may be another stage of the run that it was made for."""
    if choice is None:
        return config
    tables = {"activation_checkpoint": choice.job.activation_checkpoint, "fsdp": choice.job.fsdp}
    job = config.model_copy(update=tables)
    most = _tokens_at_once(choice.job)
    *larger, smallest = _settings(job, choice.sizes)
    return next((each for each in larger if _tokens_at_once(each) <= most), smallest)


def with_choice(job: LoadedConfig, choice: Choice | None) -> LoadedConfig:
    """The job, all stages included, with the choice in place of the limit."""
    later = tuple(replace(stage, config=chosen(stage.config, choice)) for stage in job.later_stages)
    return replace(job, config=chosen(job.config, choice), later_stages=later)


def freeing_copies(config: Config, sizes: MeshSizes) -> Config:
    """The job with its copies freed; the job itself if it has none, or asks for them by name."""
    has_copies = keeps_copies(sizes.world_size, config)
    if not has_copies or reshard_after_forward(config.fsdp) != "default":
        return config
    return with_keys(config, fsdp={"reshard_after_forward": "always"})


def _choice(
    config: Config,
    sizes: MeshSizes,
    device_type: str,
    card_bytes: int | None,
    mesh: Mesh | None,
    others: Sequence[Config],
) -> Choice | None:
    """The choice by the job's own limit or, where it asks for none and a GPU's memory is known, whether copies fit."""
    asked = config.activation_checkpoint.memory_limit_gib
    share = SHARE_OF_A_CARD * (card_bytes or 0)
    if asked:
        return choose(config, sizes, device_type, share if asked == "device" else asked * 2**30, mesh, others)
    freeing = freeing_copies(config, sizes)
    if not card_bytes or freeing == config or estimate_memory(config, sizes, "cuda").device <= share:
        return None
    return Choice(config, freeing, sizes, int(share), estimate_memory(freeing, sizes, "cuda").device)


def choose(
    config: Config,
    sizes: MeshSizes,
    device_type: str,
    limit: float,
    mesh: Mesh | None = None,
    others: Sequence[Config] = (),
) -> Choice:
    """The first way of checkpointing that fits `limit` bytes, with the stage of ZeRO and the micro-batch left open.

    Args:
        config, sizes, device_type: the job, its mesh, and "cpu" or "cuda".
        limit: bytes that a rank's tensors may take.
        mesh: as for `measure_blocks`.
        others: other stages of the run, in which the choice must fit, too.

    Raises:
        ConfigError: even full recomputation does not fit.
    """

    def estimated(job: Config) -> Choice:
        choice = Choice(config, job, sizes, int(limit), needed=0)
        jobs = (job, *(chosen(other, choice) for other in others))
        return replace(choice, needed=max(estimate_memory(each, sizes, device_type, mesh).device for each in jobs))

    found = [_least_of(job, sizes, estimated) for job in _settings(config, sizes)]
    fitting = [choice for choice in found if choice.needed <= limit and not check(choice.job, sizes.world_size)]
    if fitting:
        return min(fitting, key=lambda choice: _seconds(choice.job, sizes)) if len(found) > 1 else fitting[0]
    least = min(found, key=lambda choice: choice.needed)
    asked = value_text(config.activation_checkpoint.memory_limit_gib)
    micro_batch = micro_batch_size(least.job.training)
    smaller = f"lower training.micro_batch_size (now {micro_batch}), " if micro_batch > 1 else ""
    raise ConfigError(
        f"activation_checkpoint.memory_limit_gib = {asked} allows {size(limit)} for a rank's tensors, and even with "
        f"full recomputation they take about {size(least.needed)}; raise it, {smaller}or use more ranks"
    )


def _settings(config: Config, sizes: MeshSizes) -> Iterator[Config]:
    """The job with each stage of ZeRO and micro-batch in place of "auto", the largest micro-batches first."""
    stage = config.fsdp.zero_stage
    micro_batch = config.training.micro_batch_size
    if "auto" not in (stage, micro_batch):
        yield config
        return
    # A single rank gathers nothing, and a pipeline keeps what it gathers.
    of_job = [1, 2, 3] if sizes.token_ranks > 1 and sizes.pp == 1 else [3]
    if config.fsdp.accumulate == "reduce_last":
        of_job = [each for each in of_job if each != 2]  # with which that key does nothing
    sequences = config.training.global_batch_size // sizes.dp
    divisors = [n for n in range(sequences, 0, -1) if sequences % n == 0]
    micro_batches = divisors if micro_batch == "auto" else [micro_batch]
    for n, each in product(micro_batches, of_job if stage == "auto" else [stage]):
        job = with_keys(config, fsdp={"zero_stage": each}, training={"micro_batch_size": n})
        if not check(job, sizes.world_size):
            yield job


def _tokens_at_once(config: Config) -> int:
    return micro_batch_size(config.training) * config.training.seq_len


def _seconds(config: Config, sizes: MeshSizes) -> float:
    """A step's estimated time on the GPUs of `_REFERENCE`."""
    name, gpus_per_host = _REFERENCE
    return sum(slowest_rank(config, sizes.world_size, device_named(name), gpus_per_host).step().values())


def _least_of(config: Config, sizes: MeshSizes, estimated: Callable[[Config], Choice]) -> Choice:
    """The first way of checkpointing that fits, with as few layers as fit; if none does, the last."""
    freeing = freeing_copies(config, sizes)
    choices = list(ways(config))
    with_copies = [_with(config, way) for way in choices[:2]] if freeing != config else []
    for job in with_copies + [_with(freeing, way) for way in choices]:
        choice = estimated(job)
        is_allowed = not check(job, sizes.world_size)  # a zero-bubble pipeline can't keep single ops
        if choice.needed <= choice.limit and is_allowed:
            return _on_fewest_layers(choice, estimated)
    return choice


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
