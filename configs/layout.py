"""The arithmetic of a job: how the ranks form the mesh, the global batch its micro-batches, and the model its size.

Plain integers, without torch: the checks of a job file, `--validate` and the planning scripts need them before there
is a device, and the trainer uses the same functions, so that what was checked is what runs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from configs.errors import ConfigError
from configs.schema import Config, Fsdp, LrSchedule, Mesh, Model

FSDP_DIMENSIONS = ("shard",)
"""Dimensions of the mesh over which FSDP shards parameters, and so gathers them."""


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each dimension of the mesh."""

    dp_replicate: int
    dp_shard: int
    tp: int
    cp: int = 1
    pp: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel ranks: those that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp_shard(self) -> int:
        """Ranks over which FSDP shards: a context-parallel rank holds different tokens, as a data-parallel one does."""
        return self.dp_shard * self.cp

    @property
    def token_ranks(self) -> int:
        """Ranks that hold different tokens of a global batch, and over which FSDP averages their gradients."""
        return self.dp * self.cp

    @property
    def world_size(self) -> int:
        return self.token_ranks * self.tp * self.pp

    def __str__(self) -> str:
        return product_of_axes(self)


def product_of_axes(sizes: MeshSizes | Mesh) -> str:
    """The mesh as an arithmetic expression, without what is left open (-1) and without the rarer axes of size 1."""
    left_out = {"dp_replicate": (), "dp_shard": (-1,), "cp": (1,), "tp": (), "pp": (1,)}
    return " x ".join(f"{name} {n}" for name, out in left_out.items() if (n := getattr(sizes, name)) not in out)


def smallest_world_size(mesh: Mesh) -> int:
    """The fewest ranks that the mesh can be built of; with `dp_shard = -1` any multiple of it will do, too."""
    return mesh.dp_replicate * max(mesh.dp_shard, 1) * mesh.cp * mesh.tp * mesh.pp


def mesh_sizes(config: Config, world_size: int) -> MeshSizes:
    """The mesh for a number of ranks, with `dp_shard = -1` replaced by what the other sizes leave.

    Raises:
        ConfigError: the sizes do not multiply to the world size.
    """
    mesh = config.mesh
    smallest = smallest_world_size(mesh)
    if mesh.dp_shard == -1 and world_size % smallest == 0:
        return MeshSizes(mesh.dp_replicate, world_size // smallest, mesh.tp, cp=mesh.cp, pp=mesh.pp)
    if world_size == smallest and mesh.dp_shard != -1:
        return MeshSizes(mesh.dp_replicate, mesh.dp_shard, mesh.tp, cp=mesh.cp, pp=mesh.pp)
    ranks = f"{world_size} rank{'s' * (world_size != 1)}"
    start = f"{smallest} ranks (torchrun --nproc-per-node {smallest})"
    if mesh.dp_shard == -1:
        raise ConfigError(
            f"{ranks} cannot form the mesh: {product_of_axes(mesh)} = {smallest} does not divide {world_size}; "
            f"start {start} or a multiple, or change [mesh]"
        )
    raise ConfigError(
        f"{ranks} cannot form the mesh: {product_of_axes(mesh)} = {smallest}, not {world_size}; start {start}, or "
        "change [mesh]"
    )


def accumulation_steps(config: Config, sizes: MeshSizes) -> int:
    """Micro-batches of one optimizer step on every rank: global_batch_size / (dp x micro_batch_size).

    Raises:
        ConfigError: it does not divide; the global batch is never rounded.
    """
    batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    at_once = sizes.dp * micro
    if batch % at_once == 0:
        return batch // at_once
    below = batch - batch % at_once
    near = f"{below} or {below + at_once}" if below else str(at_once)
    raise ConfigError(
        f"a global batch of {batch} sequences cannot be cut into micro-batches: dp_replicate {sizes.dp_replicate} x "
        f"dp_shard {sizes.dp_shard} x micro_batch_size {micro} = {at_once} does not divide {batch}; a global batch of "
        f"{near} would do, or another micro_batch_size or mesh"
    )


def reshard_after_forward(fsdp: Fsdp) -> Literal["default", "always", "never"]:
    """What becomes of gathered parameters after forward: ZeRO stages 1 and 2 keep them."""
    return fsdp.reshard_after_forward if fsdp.zero_stage == 3 else "never"


def reduces_once(fsdp: Fsdp) -> bool:
    """Whether gradients are reduced with a step's last micro-batch only."""
    return fsdp.zero_stage == 1 or fsdp.accumulate == "reduce_last"


def head_dim(model: Model) -> int:
    """Width of one attention head."""
    return model.head_dim or model.dim // model.n_heads


def n_kv_heads(model: Model) -> int:
    """Number of key and value heads."""
    return model.n_kv_heads or model.n_heads


def decay_steps(schedule: LrSchedule) -> int:
    """Length of the final decay of `warmup_stable_decay`, in steps."""
    return schedule.decay_steps or max(1, schedule.total_steps // 10)


def parameter_count(model: Model) -> int:
    """Number of parameters of a Llama; a tied matrix counts once."""
    norms = 2 * model.dim
    matrices_of_vocabulary = 1 if model.tie_embeddings else 2
    vocabulary = matrices_of_vocabulary * model.vocab_size * model.dim
    return vocabulary + model.n_layers * (layer_matrices(model) + norms) + model.dim


def layer_matrices(model: Model) -> int:
    """Elements of one layer's matrices."""
    attention = 2 * model.dim * head_dim(model) * (model.n_heads + n_kv_heads(model))  # q and o, k and v
    feed_forward = 3 * model.dim * model.ffn_dim  # gate, up, down
    return attention + feed_forward


def layer_numbers(ranges: str, n_layers: int) -> list[int]:
    """The layers that `activation_checkpoint.layers` names: `"0-2,5"` -> `[0, 1, 2, 5]`.

    Raises:
        ConfigError: not a list of ascending ranges, or beyond the model's layers.
    """
    layers: list[int] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part, re.ASCII)
        if match is None:
            raise ConfigError(f'{part.strip()!r} is no layer or range of layers; write for example "0-3,8-11"')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or (layers and first <= layers[-1]):
            raise ConfigError(f'the layers in "{ranges}" must ascend, {part.strip()} does not')
        if last >= n_layers:
            raise ConfigError(f"there is no layer {last}: with n_layers = {n_layers} they are 0 to {n_layers - 1}")
        layers.extend(range(first, last + 1))
    return layers


def tensor_parallel_sizes(config: Config) -> Mapping[str, int]:
    """What tensor parallelism cuts, by key: each must be a multiple of mesh.tp."""
    kv_heads = {} if config.model.n_kv_heads is None else {"model.n_kv_heads": config.model.n_kv_heads}
    return {
        "model.n_heads": config.model.n_heads,
        **kv_heads,
        "model.ffn_dim": config.model.ffn_dim,
        "model.vocab_size": config.model.vocab_size,
        "training.seq_len": config.training.seq_len,  # sequence parallelism between the matrices
    }
