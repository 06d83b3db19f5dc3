"""Memory that a rank will need, estimated before anything is built: the answer to "will it fit?".

The states (parameters, gradients, optimizer) are exact: FSDP cuts each parameter by rows, so the largest share is
ceil(rows / (dp_shard x cp)) of them, after tensor parallelism has taken its part. Experts are cut by expert over `ep`
first, and then over the ranks that hold the same ones. Owners (fsdp.partition) hold the optimizer's part of whole
parameters. The rest is a count of what is alive at the worst moment, the start of the backward pass, with experts of
equal load, and good to a few tens of percent: the allocator's fragmentation, kernels' workspaces and the CUDA context
(about 1 GiB) come on top, and torch.compile often keeps less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

from configs.layout import (
    MeshSizes,
    accumulation_steps,
    cut_dim,
    expert_dim,
    head_dim,
    is_mixture,
    layer_numbers,
    n_kv_heads,
    reduces_once,
    reshard_after_forward,
)
from configs.schema import ActivationCheckpoint, Config, Model
from configs.stages import layers_of_stages, stages_of_rank, stages_per_rank
from parallelisms.zero import assign_owners
from trainer.flops import Shape, parameter_shapes
from trainer.loss import chunk_rows

_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the rank that holds most."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Parameters of the groups that FSDP has gathered, and the gradients of the one that it is reducing."""
    activations: int
    """Kept by the forward pass of a micro-batch, and what backward recomputes of one block."""
    loss: int
    """A chunk of logits, and the gradients that the loss computes ahead."""
    offloaded: bool
    """Whether parameters, gradients and optimizer state are in the host's memory (fsdp.cpu_offload)."""

    @property
    def states(self) -> int:
        """What lives from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def device(self) -> int:
        """All that the device must hold."""
        transient = self.gathered + self.activations + self.loss
        return transient if self.offloaded else transient + self.states


def estimate_memory(config: Config, sizes: MeshSizes, device_type: str) -> MemoryEstimate:
    """Estimate the memory of one rank of a mesh of `sizes`, on "cpu" or "cuda"."""
    estimates = [_estimate(config, sizes, device_type, _share(config, sizes, rank)) for rank in range(config.mesh.pp)]
    return max(estimates, key=lambda estimate: estimate.device)


def _estimate(config: Config, sizes: MeshSizes, device_type: str, share: "_Share") -> MemoryEstimate:
    every_shape = parameter_shapes(config.model).items()
    shapes = {name: _own_shape(name, shape, sizes) for name, shape in every_shape if share.holds(name)}
    training = config.training
    state_bytes = _BYTES[training.dtype]
    shards = {name: _sharded(shape, sizes) for name, shape in shapes.items()}
    owned = sum(shards.values())
    gradients = owned * state_bytes
    if (reduces_once(config.fsdp) or config.mesh.pp > 1) and accumulation_steps(config, sizes) > 1:
        gradients += sum(map(prod, shapes.values())) * _BYTES[training.reduce_dtype]
    return MemoryEstimate(
        parameters=owned * state_bytes,
        gradients=gradients,
        optimizer=max(optimizer_bytes(config, sizes, shards)),
        gathered=_gathered(config, shapes),
        activations=_activations(config, sizes, share) + _fetched(config, sizes),
        loss=_loss(config, sizes, device_type, share),
        offloaded=config.fsdp.cpu_offload,
    )


# --------------------------------------------------------------------------- pipeline


@dataclass(frozen=True)
class _Share:
    """What a pipeline rank holds; without a pipeline, everything."""

    layers: frozenset[int]
    has_embedding: bool
    has_head: bool
    in_flight: float
    """Micro-batches whose activations of these layers it keeps at the worst moment."""
    losses: int
    """Micro-batches whose loss is computed and waits for its backward pass."""

    def holds(self, name: str) -> bool:
        """Whether the parameter `name` is among its own."""
        if name.startswith("layers."):
            return int(name.split(".")[1]) in self.layers
        return self.has_embedding if name.startswith("embed") else self.has_head


def _share(config: Config, sizes: MeshSizes, rank: int) -> _Share:
    stages, layers = stages_of_rank(config, rank), layers_of_stages(config)
    micro_batches = accumulation_steps(config, sizes) if sizes.pp > 1 else 1
    return _Share(
        layers=frozenset(layer for stage in stages for layer in layers[stage]),
        has_embedding=0 in stages,
        has_head=len(layers) - 1 in stages,
        in_flight=_stages_in_flight(config, rank, micro_batches) / len(stages),
        losses=micro_batches if config.pipeline.schedule == "gpipe" else 1,
    )


def _stages_in_flight(config: Config, rank: int, micro_batches: int) -> int:
    """Passes of a micro-batch through one stage whose activations a pipeline rank keeps at the worst moment."""
    ranks, stages = config.mesh.pp, stages_per_rank(config)
    most = {
        "gpipe": micro_batches,
        "1f1b": ranks - rank,
        "interleaved_1f1b": (stages - 1) * ranks + 2 * (ranks - 1 - rank) + 1,
        "zero_bubble_v": 2 * ranks,
    }
    return min(most[config.pipeline.schedule], stages * micro_batches)


# --------------------------------------------------------------------------- states


def optimizer_bytes(config: Config, sizes: MeshSizes, elements: Mapping[str, int]) -> list[int]:
    """Bytes of optimizer state on each rank that holds another part of it, of parameters of so many `elements` each.

    AdamW keeps two moments and a float32 step count, Muon one momentum; an owner that sends rounded parameters keeps
    them in full, too. Muon's are of whole matrices, also where tensor parallelism cuts the parameters. The buffers of
    the broadcasts are not counted: they are freed before there are activations.
    """
    state_bytes = _BYTES[config.training.dtype]
    masters = config.fsdp.owner_broadcast_dtype is not None
    total = [0] * (sizes.replicas if sizes.by_owner else 1)
    owners = assign_owners(elements, total)
    for name, size in elements.items():
        by_muon = config.optimizer.name == "muon" and name.startswith("layers.") and "norm" not in name
        tensors = (masters + 1) * sizes.tp if by_muon else masters + 2
        total[owners[name]] += tensors * size * state_bytes + (0 if by_muon else 4)
    return total


def _tp_shape(name: str, shape: Shape, tp: int) -> Shape:
    """A tensor-parallel rank's part: norms and routers whole, o_proj and down_proj cut by columns, the rest by rows."""
    if len(shape) == 1 or "router" in name:
        return shape
    *stacked, rows, columns = shape
    by_columns = name.removesuffix(".weight").endswith(("o_proj", "down_proj"))
    return (*stacked, rows, ceil(columns / tp)) if by_columns else (*stacked, ceil(rows / tp), columns)


def _own_shape(name: str, shape: Shape, sizes: MeshSizes) -> Shape:
    """What FSDP gathers: a tensor-parallel rank's part, of the experts that an expert-parallel rank holds."""
    shape = _tp_shape(name, shape, sizes.tp)
    return (shape[0] // sizes.ep, *shape[1:]) if _is_of_experts(shape) else shape


def _sharded(shape: Shape, sizes: MeshSizes) -> int:
    """Elements of the largest FSDP shard."""
    n_shards = sizes.expert_shard if _is_of_experts(shape) else sizes.fsdp_shard
    cut = cut_dim(shape, n_shards)
    return ceil(shape[cut] / n_shards) * prod(shape) // shape[cut]


def _is_of_experts(shape: Shape) -> bool:
    """Their matrices are stacked."""
    return len(shape) == 3


# --------------------------------------------------------------------------- gathered groups


def _gathered(config: Config, shapes: dict[str, Shape]) -> int:
    """Bytes of the groups gathered at the worst moment, plus the gradients of the largest group on their way."""
    groups = _group_sizes(config.model, shapes)
    training = config.training
    in_reduction = _BYTES[training.compute_dtype] + _BYTES[training.reduce_dtype]
    return _most_alive(groups, config) * _BYTES[training.compute_dtype] + max(groups.values()) * in_reduction


def _group_sizes(model: Model, shapes: dict[str, Shape]) -> dict[str, int]:
    """Elements of each FSDP group in forward order; the ends of a tied model are the root's, gathered throughout."""
    groups: dict[str, int] = {}
    for name, shape in shapes.items():
        is_block = name.startswith("layers.")
        end = "root" if model.tie_embeddings else "embedding" if name.startswith("embed") else "head"
        group = ".".join(name.split(".")[:2]) if is_block else end
        groups[group] = groups.get(group, 0) + prod(shape)
    return groups


def _most_alive(groups: dict[str, int], config: Config) -> int:
    """Elements of the groups that are gathered at once."""
    sizes = [size for name, size in groups.items() if name != "root"]
    reshard = reshard_after_forward(config.fsdp)
    if reshard == "never" or (config.mesh.pp > 1 and reshard == "default"):
        return sum(groups.values())
    window = 1 + max(config.comm.prefetch_forward, config.comm.prefetch_backward)
    kept = sizes.pop() if reshard == "default" else 0
    moving = max((sum(sizes[i : i + window]) for i in range(len(sizes))), default=0)
    return groups.get("root", 0) + kept + moving


# --------------------------------------------------------------------------- activations


@dataclass(frozen=True)
class _Block:
    """Widths of a block's tensors, in elements a token of one tensor-parallel rank."""

    stream: float
    """The residual stream: a slice of the sequence under tensor parallelism."""
    normed: float
    """Input of the column-parallel matrices: the whole sequence on each rank."""
    query: float
    kv: float
    ffn: float
    """Inside of the feed-forward, or of all experts that a token meets."""
    routed: float = 0.0
    """A row for each expert that the token is sent to."""

    @property
    def everything(self) -> float:
        """Kept without checkpointing: both norms' inputs and outputs, q, k, v and the attention's output, gate, up,
        silu(gate) and its product with up; the experts' inputs, and their outputs as they come and by token."""
        return 2 * self.stream + 2 * self.normed + 2 * self.query + 2 * self.kv + 4 * self.ffn + 3 * self.routed

    @property
    def matmul_outputs(self) -> float:
        """Of q, k, v, o, gate, up and down."""
        return self.query + 2 * self.kv + 2 * self.stream + 2 * self.ffn + self.routed


def _block(model: Model, layer: int, tp: int) -> _Block:
    mixture = is_mixture(model, layer)
    experts = model.experts_per_token + model.n_shared_experts
    return _Block(
        stream=model.dim / tp,
        normed=model.dim,
        query=model.n_heads * head_dim(model) / tp,
        kv=n_kv_heads(model) * head_dim(model) / tp,
        ffn=(experts * expert_dim(model) if mixture else model.ffn_dim) / tp,
        routed=model.experts_per_token * model.dim if mixture else 0,
    )


def _tokens(config: Config, sizes: MeshSizes) -> int:
    """Tokens of a micro-batch on one rank: with context parallelism a part of every sequence."""
    return config.training.micro_batch_size * config.training.seq_len // sizes.cp


def _activations(config: Config, sizes: MeshSizes, share: _Share) -> int:
    """Bytes kept of the micro-batches in flight, one block's recomputation, and the gradients on their way back."""
    model, checkpointing = config.model, config.activation_checkpoint
    blocks = {layer: _block(model, layer, sizes.tp) for layer in share.layers}
    recomputed = share.layers.intersection(_checkpointed_layers(checkpointing, model.n_layers))
    kept = [_kept(checkpointing, b) if layer in recomputed else b.everything for layer, b in blocks.items()]
    elements = sum(kept) * share.in_flight
    elements += max((blocks[layer].everything for layer in recomputed), default=0)
    widest = max(blocks.values(), key=lambda block: block.ffn)
    if share.has_head:
        elements += widest.stream + widest.normed  # the final norm's input and output
    elements += widest.stream + 2 * widest.ffn  # gradients of the stream and of a feed-forward's inside
    return ceil(_tokens(config, sizes) * elements * _BYTES[config.training.compute_dtype])


def _fetched(config: Config, sizes: MeshSizes) -> int:
    """Bytes of the other ranks' keys and values that attention holds in backward, and of the gradients by them.

    gather: all of them, with their gradients once as they are made and once as they are sent; ring: those at hand and
    the next, with the gradients at hand, arriving and leaving.
    """
    if sizes.cp == 1 or config.context.method == "all_to_all":
        return 0
    compute = _BYTES[config.training.compute_dtype]
    shares, of_gradients = (sizes.cp, 2 * sizes.cp) if config.context.method == "gather" else (2, 3)
    elements = 2 * n_kv_heads(config.model) * head_dim(config.model) * _tokens(config, sizes) // sizes.tp
    return elements * (shares * compute + of_gradients * max(compute, 4))


def _kept(config: ActivationCheckpoint, block: _Block) -> float:
    """Elements a token that a checkpointed block keeps: its input, and in selective mode the saved ops' outputs."""
    if config.mode == "budget":
        return block.stream + config.memory_budget * (block.everything - block.stream)
    if config.mode == "full":
        return block.stream
    saves_attention = not config.save_ops or any("attention" in op for op in config.save_ops)
    saves_matmuls = not config.save_ops or any("mm" in op for op in config.save_ops)
    matmuls = block.matmul_outputs / config.save_every_nth_matmul
    return block.stream + saves_attention * block.query + saves_matmuls * matmuls


def _checkpointed_layers(config: ActivationCheckpoint, n_layers: int) -> Sequence[int]:
    """The layers that the mode applies to."""
    if config.mode == "none":
        return ()
    if config.mode == "budget":
        return range(n_layers)
    layers = layer_numbers(config.layers, n_layers) if config.layers else range(n_layers)
    return layers[config.every_nth_layer - 1 :: config.every_nth_layer]


def _loss(config: Config, sizes: MeshSizes, device_type: str, share: _Share) -> int:
    """Bytes of a chunk of logits, in compute_dtype and once more for the softmax, and of the gradients made ahead."""
    if not share.has_head:
        return 0
    model, training = config.model, config.training
    tokens, vocabulary = _tokens(config, sizes), ceil(model.vocab_size / sizes.tp)
    compute = _BYTES[training.compute_dtype]
    softmax = max(compute, 4)
    chunk = chunk_rows(tokens, vocabulary * softmax, device_type) * vocabulary
    ahead = vocabulary * model.dim * softmax + tokens * model.dim * compute
    return chunk * (compute + softmax) + share.losses * ahead
