"""The arithmetic of a job: the sizes of the mesh, the micro-batches of a global batch, the size of the model.

It uses plain integers and no torch: the checks of a job file, `--validate` and the planning scripts need no device, and
the trainer uses the same functions, so that what was checked is what runs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, lcm
from typing import Literal

from configs.architectures import description_of, family_of, own_weights
from configs.architectures.llama_keys import is_delta, latent_of
from configs.architectures.parts import head_dim
from configs.errors import ConfigError
from configs.schema import (
    WITH_FINAL_DECAY,
    AnyModel,
    Config,
    Expert,
    Fsdp,
    LrSchedule,
    Mesh,
    Model,
    Source,
    Training,
    is_described,
)

MOST_RANKS = 2**17
"""Ranks that are considered where their number is open."""
_MOST_SEQUENCES = 2**16
"""Largest micro-batch that a message may propose."""


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each dimension of the mesh."""

    dp_replicate: int
    dp_shard: int
    tp: int
    cp: int = 1
    pp: int = 1
    ep: int = 1
    """Subdivides dp_shard x cp for the experts, or by owner dp_replicate x cp; not an additional axis."""
    by_owner: bool = False
    """Whether parameters stay whole where FSDP would shard them (`fsdp.partition`); dp_shard is then 1."""

    @property
    def axes(self) -> dict[str, int]:
        """The ranks along each axis of `[mesh]`, by its key."""
        return {key: getattr(self, key) for key in Mesh.model_fields}

    @property
    def dp(self) -> int:
        """Data-parallel ranks: those that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp_shard(self) -> int:
        """Ranks over which FSDP shards: a context-parallel rank holds different tokens, as a data-parallel one does."""
        return 1 if self.by_owner else self.dp_shard * self.cp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard."""
        return self.token_ranks // self.fsdp_shard

    @property
    def expert_shard(self) -> int:
        """Ranks over which FSDP shards the experts of one expert-parallel rank."""
        return 1 if self.by_owner else self.fsdp_shard // self.ep

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same shard of the same experts."""
        return self.token_ranks // (self.expert_shard * self.ep)

    @property
    def of_experts(self) -> str:
        """How experts are distributed, if not like all else: "ep 2 x shard 4"; by owner, "ep 2 x owners 4"."""
        rest = f"owners {self.expert_replicas}" if self.by_owner else f"shard {self.expert_shard}"
        return f"ep {self.ep} x {rest}" if self.ep > 1 else ""

    @property
    def token_ranks(self) -> int:
        """Ranks that hold different tokens of a global batch, and over which FSDP adds up their gradients."""
        return self.dp * self.cp

    @property
    def stage_ranks(self) -> int:
        """Ranks that hold parts of the same pipeline stage."""
        return self.token_ranks * self.tp

    @property
    def world_size(self) -> int:
        return self.stage_ranks * self.pp

    def __str__(self) -> str:
        return named_axes(self.axes) + (f"; experts: {self.of_experts}" if self.of_experts else "")


def named_axes(axes: Mapping[str, int]) -> str:
    """The axes of a mesh that have more than one rank: "dp_shard 2 x tp 2"; "one rank" if none has."""
    return " x ".join(f"{name} {ranks}" for name, ranks in axes.items() if ranks > 1 and name != "ep") or "one rank"


def product_of_axes(sizes: MeshSizes | Mesh) -> str:
    """Write the mesh as an arithmetic expression, without an open size (-1) and without cp and pp of size 1."""
    left_out = {"dp_replicate": (), "dp_shard": (-1,), "cp": (1,), "tp": (), "pp": (1,)}
    return " x ".join(f"{name} {n}" for name, out in left_out.items() if (n := getattr(sizes, name)) not in out)


def smallest_world_size(config: Config) -> int:
    """The fewest ranks that can form the mesh; with `dp_shard = -1`, any multiple of it can, too."""
    mesh = config.mesh
    is_open = mesh.dp_shard == -1 and config.fsdp.partition == "rows"
    fewest_shards = lcm(mesh.ep, mesh.cp) // mesh.cp if is_open else 1  # ep divides dp_shard x cp
    return _product(mesh) * fewest_shards


def _product(mesh: Mesh) -> int:
    """The product of the sizes, without an open `dp_shard`."""
    return mesh.dp_replicate * max(mesh.dp_shard, 1) * mesh.cp * mesh.tp * mesh.pp


def rank_counts(config: Config, most: int = MOST_RANKS) -> list[int]:
    """The numbers of ranks up to `most` that form a mesh with `dp_shard = -1` and divide the global batch.

    Raises:
        ConfigError: not even the smallest mesh divides it.
    """
    smallest = smallest_world_size(config)
    steps = accumulation_steps(config, mesh_sizes(config, smallest))  # n times as many ranks take an nth of them
    most_times = min(steps, min(most, MOST_RANKS) // smallest)
    return [smallest * n for n in range(1, most_times + 1) if steps % n == 0]


def mesh_sizes(config: Config, world_size: int) -> MeshSizes:
    """The mesh for a number of ranks; `dp_shard = -1` becomes the ranks that the other sizes leave.

    Raises:
        ConfigError: the sizes do not multiply to the world size.
    """
    mesh = config.mesh
    product = _product(config.mesh)
    left_open = mesh.dp_shard == -1
    if world_size % product or (not left_open and world_size != product):
        ranks = f"{world_size} rank{'s' * (world_size != 1)}"
        smallest = smallest_world_size(config)
        start = f"{smallest} ranks (keel train JOB --ranks {smallest}, or torchrun --nproc-per-node {smallest})"
        problem = f"does not divide {world_size}" if left_open else f"not {world_size}"
        raise ConfigError(
            f"{ranks} cannot form the mesh: {product_of_axes(mesh)} = {product}{'' if left_open else ','} {problem}; "
            f"start {start}{' or a multiple' if left_open else ''}, or change [mesh]"
        )
    dp_shard = world_size // product if left_open else mesh.dp_shard
    by_owner = config.fsdp.partition == "owner"
    return MeshSizes(mesh.dp_replicate, dp_shard, mesh.tp, cp=mesh.cp, pp=mesh.pp, ep=mesh.ep, by_owner=by_owner)


def tokens_per_step(config: Config) -> int:
    """Tokens of a global batch."""
    return config.training.global_batch_size * config.training.seq_len


def used_sources(config: Config) -> list[tuple[str, Source]]:
    """The sources that a run reads, each with its key: "data.sources.0"; those of validation only if there is any."""
    found = [(f"data.sources.{index}", source) for index, source in enumerate(config.data.sources)]
    if config.validation.interval:
        found += [(f"validation.sources.{index}", source) for index, source in enumerate(config.validation.sources)]
    return found


def micro_batch_size(training: Training) -> int:
    """Sequences that a data-parallel rank computes at once; 1 while "auto" is not chosen, which suits most meshes."""
    return 1 if training.micro_batch_size == "auto" else training.micro_batch_size


def zero_stage(fsdp: Fsdp) -> int:
    """The stage of ZeRO; 3 while "auto" is not chosen, which takes the least memory."""
    return 3 if fsdp.zero_stage == "auto" else fsdp.zero_stage


def accumulation_steps(config: Config, sizes: MeshSizes) -> int:
    """Number of micro-batches per optimizer step on each rank: global_batch_size / (dp x micro_batch_size).

    Raises:
        ConfigError: the division has a remainder; the global batch is never rounded.
    """
    batch = config.training.global_batch_size
    micro = micro_batch_size(config.training)
    at_once = sizes.dp * micro
    if batch % at_once == 0:
        return batch // at_once
    below = batch - batch % at_once
    largest = min(micro - 1, batch // sizes.dp, _MOST_SEQUENCES)
    smaller = next((size for size in range(largest, 0, -1) if batch % (sizes.dp * size) == 0), None)
    near = f"{below} or {below + at_once}" if below else str(at_once)
    raise ConfigError(
        f"a global batch of {batch} sequences cannot be cut into micro-batches: dp_replicate {sizes.dp_replicate} x "
        f"dp_shard {sizes.dp_shard} x micro_batch_size {micro} = {at_once} does not divide {batch}; a global batch of "
        f"{near} would do, or {f'micro_batch_size {smaller}' if smaller else 'another micro_batch_size or mesh'}"
    )


def reshard_after_forward(fsdp: Fsdp) -> Literal["default", "always", "never"]:
    """Whether to free gathered parameters after forward; ZeRO stages 1 and 2 keep them."""
    return fsdp.reshard_after_forward if zero_stage(fsdp) == 3 else "never"


def reduces_once(config: Config) -> bool:
    """Whether gradients are reduced only with the last micro-batch of a step."""
    if config.training.reduction == "exact":  # a rank's own micro-batches are no neighbors in the tree of sums
        return False
    return zero_stage(config.fsdp) == 1 or config.fsdp.accumulate == "reduce_last" or config.mesh.pp > 1


def adds_up_wider(config: Config) -> bool:
    """Whether the gradients of a step's micro-batches are kept in a wider type than the parameters' while they are
    added; if they are reduced once, or exactly, they are added before FSDP converts them."""
    training = config.training
    is_narrow = (training.dtype, training.reduce_dtype) == ("bfloat16", "float32")
    return is_narrow and training.reduction == "fast" and not reduces_once(config)


def buffer_factor(expert: Expert) -> float | None:
    """Size of the buffers in which rows reach their experts, over that of an even load; None: there are none."""
    return expert.buffer_factor if expert.exchange == "buffers" else None


def cut_dim(shape: Sequence[int], n_shards: int) -> int:
    """The dimension along which FSDP shards a parameter; uneven shards of the first are padded, of others impossible.

    Matrices of experts, (experts, out, in), are sharded by `out` if that divides evenly and the experts do not:
    8 experts on 64 ranks would leave 56 ranks with nothing.
    """
    return int(len(shape) == 3 and shape[0] % n_shards != 0 and shape[1] % n_shards == 0)


@dataclass(frozen=True)
class ScheduleLengths:
    """Lengths of a learning-rate schedule, in its unit: optimizer steps, or tokens."""

    warmup: int
    decay: int | None
    """What the rate decays in, up to `total`; None: it does not."""
    total: int


def schedule_lengths(schedule: LrSchedule) -> ScheduleLengths:
    """The lengths of a schedule, of which exactly one of `total_steps` and `total_tokens` is set."""
    by_tokens = schedule.total_steps is None
    warmup = schedule.warmup_tokens if by_tokens else schedule.warmup_steps
    decay = schedule.decay_tokens if by_tokens else schedule.decay_steps
    total = schedule.total_tokens if by_tokens else schedule.total_steps
    assert total is not None
    if schedule.name == "constant" or decay == 0:
        return ScheduleLengths(warmup, None, total)
    if schedule.name in WITH_FINAL_DECAY:
        return ScheduleLengths(warmup, decay or max(1, total // 10), total)
    return ScheduleLengths(warmup, total - warmup, total)


def scheduled_steps(config: Config) -> int:
    """The step at which the learning rate reaches its minimum, if all steps have as many tokens."""
    total = schedule_lengths(config.lr_schedule).total
    return ceil(total / tokens_per_step(config)) if config.lr_schedule.total_steps is None else total


@cache
def parameter_count(model: Model) -> int:
    """Number of parameters; a tied matrix counts once."""
    return sum(weight.size for weight in own_weights(model))


def active_parameter_count(model: Model) -> int:
    """Number of parameters that one token uses: all except the parameters of experts that it is not routed to."""
    return sum(weight.active for weight in own_weights(model))


def layer_matrices(model: Model, layer: int) -> int:
    """Number of elements in a layer's matrices."""
    return sum(weight.size for weight in description_of(model).block(model, layer) if weight.is_matrix)


def attention_features(model: AnyModel) -> int:
    """Elements that a pair of tokens is multiplied with: of all heads, queries and values, which may be narrower."""
    latent = latent_of(model) if is_described(model) else None
    return model.n_heads * (head_dim(model) + (latent.value_head_dim if latent else head_dim(model)))


def mixed_elements(model: AnyModel, layer: int, seen: float) -> float:
    """Elements that a token is multiplied with to mix it with others, in a layer; a matrix has as many as elements.

    Args:
        model: the model's table.
        layer: the layer's number.
        seen: twice the mean number of tokens that a token attends to.
    """
    if is_delta(model, layer):
        delta = model.delta  # type: ignore[union-attr]
        # The state is read with the key, moved, and read with the query.
        return 3 * delta.value_heads * delta.key_head_dim * delta.value_head_dim
    return attention_features(model) * seen / 2


def active_matrices(model: Model, layer: int) -> int:
    """Number of elements in the matrices of a layer that a token is multiplied with."""
    return sum(weight.active for weight in description_of(model).block(model, layer) if weight.is_matrix)


def layer_numbers(ranges: str, n_layers: int) -> list[int]:
    """The layers that `activation_checkpoint.layers` names: `"0-2,5"` -> `[0, 1, 2, 5]`.

    Raises:
        ConfigError: `ranges` is not a list of ascending ranges, or exceeds the model's layers.
    """
    layers: list[int] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part, re.ASCII)
        if match is None:
            raise ConfigError(f'{part.strip()!r} is no layer or range of layers; write for example "0-3,8-11"')
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first or (layers and first <= layers[-1]):
            raise ConfigError(f'the layers in "{ranges}" must ascend, {part.strip()} does not')
        if last >= n_layers:
            raise ConfigError(f"there is no layer {last}: with n_layers = {n_layers} they are 0 to {n_layers - 1}")
        layers.extend(range(first, last + 1))
    return layers


def tensor_parallel_sizes(config: Config) -> Mapping[str, int]:
    """The sizes that tensor parallelism splits, by key; each must be a multiple of mesh.tp."""
    return family_of(config.model).split_sizes(config.model) | {
        "training.seq_len": config.training.seq_len,  # sequence parallelism between the matrices
    }
