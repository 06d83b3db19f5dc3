"""What must hold between the keys that say how a job is laid out over ranks; the rules are as those of `checks.py`."""

from collections.abc import Callable, Iterator

from configs.errors import ConfigError
from configs.layout import (
    FSDP_DIMENSIONS,
    accumulation_steps,
    layer_numbers,
    mesh_sizes,
    n_kv_heads,
    smallest_world_size,
    tensor_parallel_sizes,
)
from configs.reading.keys import schema_keys
from configs.schema import Config
from configs.stages import check_micro_batches, layers_of_stages

Problem = tuple[str, str]
"""Dotted key, message."""
Rule = Callable[[Config, int | None], Iterator[Problem]]
"""Of a config, and the world size where it is known."""


def _mesh(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The mesh, and the global batch on it."""
    mesh = config.mesh
    if mesh.dp_shard == 0:
        yield "mesh.dp_shard", "dp_shard must be 1 or more, or -1 for what the other sizes leave, got 0"
        return
    try:
        sizes = mesh_sizes(config, world_size or smallest_world_size(mesh))
    except ConfigError as error:
        axes = ("dp_shard", "tp", "pp", "cp", "dp_replicate")
        key = next((key for key in axes if key in mesh.model_fields_set), "dp_shard")
        yield f"mesh.{key}", str(error)
        return
    try:
        micro_batches = accumulation_steps(config, sizes)
    except ConfigError as error:
        yield "training.global_batch_size", str(error)
        return
    if mesh.pp > 1:
        try:
            check_micro_batches(config, micro_batches)
        except ConfigError as error:
            batch, micro = config.training.global_batch_size, config.training.micro_batch_size
            yield (
                "training.micro_batch_size",
                f"global_batch_size {batch} / (dp {sizes.dp} x micro_batch_size {micro}) = {error}; change one of them",
            )


def _pipeline(config: Config, _: int | None) -> Iterator[Problem]:
    table = config.pipeline
    if table.stages_per_rank is not None and table.schedule != "interleaved_1f1b":
        yield (
            "pipeline.stages_per_rank",
            f'stages_per_rank does nothing with schedule "{table.schedule}", only with "interleaved_1f1b"',
        )
    if config.mesh.pp == 1:
        return
    try:
        layers_of_stages(config)
    except ConfigError as error:
        yield ("mesh.pp" if table.split is None else "pipeline.split"), str(error)
    if config.model.tie_embeddings:
        yield (
            "mesh.pp",
            f"pp {config.mesh.pp} puts the embedding on the first stage and the head on the last, so they cannot be "
            "one matrix: set model.tie_embeddings = false, or pp = 1",
        )
    if table.schedule == "zero_bubble_v":
        yield from _zero_bubble(config)


def _zero_bubble(config: Config) -> Iterator[Problem]:
    """Its backward takes the gradients of a block's inputs and weights apart, so each op must be one of autograd's."""
    instead = 'use schedule "1f1b" or "interleaved_1f1b"'
    start = 'schedule "zero_bubble_v" takes the gradients of inputs and of weights in two passes'
    if config.compile.enable:
        yield "pipeline.schedule", f"{start}, and a compiled block has only one; {instead}, or compile.enable = false"
    if config.activation_checkpoint.mode == "selective":
        yield (
            "pipeline.schedule",
            f'{start}, and what activation checkpointing of mode "selective" keeps lasts for one; {instead}, or mode '
            '"none" or "full"',
        )
    if config.fsdp.reshard_after_forward == "always":
        yield (
            "pipeline.schedule",
            f"{start}, and parameters that FSDP freed would be missing in the second; {instead}, or "
            'fsdp.reshard_after_forward = "default"',
        )


def _tensor_parallel(config: Config, _: int | None) -> Iterator[Problem]:
    tp = config.mesh.tp
    for key, size in tensor_parallel_sizes(config).items():
        if size % tp:
            yield "mesh.tp", f"tp {tp} does not divide {key} {size} ({size} / {tp} = {size / tp:.2f})"


def _expert_parallel(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Every rank of `ep` holds as many whole experts as any other, and `ep` is a part of the ranks of dp_shard x cp."""
    ep, n_experts = config.mesh.ep, config.model.n_experts
    if ep == 1:
        return
    if not n_experts:
        yield "mesh.ep", f"ep {ep} shares experts out, but model.n_experts is not set; leave ep out"
        return
    if config.fsdp.partition == "owner":
        yield (
            "mesh.ep",
            f'ep {ep} shares experts out to the ranks of dp_shard x cp, and fsdp.partition "owner" keeps parameters '
            'whole there; set ep = 1, or partition "rows"',
        )
        return
    if n_experts % ep:
        yield (
            "mesh.ep",
            f"ep {ep} does not divide model.n_experts {n_experts} ({n_experts} / {ep} = {n_experts / ep:.2f}): every "
            "rank holds as many experts",
        )
    try:
        sizes = mesh_sizes(config, world_size or smallest_world_size(config.mesh))
    except ConfigError:
        return  # the mesh's own problem
    if sizes.fsdp_shard % ep:
        shards = sizes.fsdp_shard
        yield (
            "mesh.ep",
            f"ep {ep} does not divide dp_shard {sizes.dp_shard} x cp {sizes.cp} = {shards} ({shards} / {ep} = "
            f"{shards / ep:.2f}): it shares the experts out to those ranks; set ep to a divisor of {shards}, or change "
            "dp_shard",
        )


def _owner_partition(config: Config, world_size: int | None) -> Iterator[Problem]:
    fsdp = config.fsdp
    if fsdp.partition == "rows":
        if fsdp.owner_broadcast_dtype is not None:
            yield "fsdp.owner_broadcast_dtype", 'owner_broadcast_dtype does nothing with partition "rows", only "owner"'
        return
    if config.training.dtype == fsdp.owner_broadcast_dtype:
        yield (
            "fsdp.owner_broadcast_dtype",
            f'owner_broadcast_dtype does nothing: training.dtype is "{fsdp.owner_broadcast_dtype}" too',
        )
    if fsdp.zero_stage != 3:
        yield "fsdp.zero_stage", 'zero_stage does nothing with partition "owner", which cuts no rows; leave it out'
    try:
        sizes = mesh_sizes(config, world_size or smallest_world_size(config.mesh))
    except ConfigError:
        return  # the mesh's own problem
    if sizes.dp_shard > 1:
        yield (
            "fsdp.partition",
            f'partition "owner" needs whole parameters, and dp_shard {sizes.dp_shard} cuts them (on {sizes.world_size} '
            f"ranks, dp_replicate {sizes.dp_replicate}); set mesh.dp_replicate = {sizes.dp} and mesh.dp_shard = 1",
        )


def _muon(config: Config, _: int | None) -> Iterator[Problem]:
    optimizer = config.optimizer
    if optimizer.name == "muon" and config.fsdp.partition == "rows":
        yield (
            "optimizer.name",
            'Muon makes whole matrices orthogonal, and partition "rows" cuts them; set fsdp.partition = "owner" and '
            "mesh.dp_shard = 1, with dp_replicate for the ranks",
        )
    if optimizer.name == "muon" and config.model.n_experts is not None:
        yield (
            "optimizer.name",
            f"Muon makes single matrices orthogonal, and the weights of {config.model.n_experts} experts are stacked "
            'in one tensor; set name = "adamw"',
        )
    for name in ("momentum", "newton_schulz_steps", "muon_lr_adjustment"):
        key = f"optimizer.{name}"
        if optimizer.name != "muon" and getattr(optimizer, name) != schema_keys()[key].default:
            yield key, f'{name} does nothing with name "{optimizer.name}", only with "muon"; leave it out'


def _context_parallel(config: Config, _: int | None) -> Iterator[Problem]:
    """Every rank needs as many tokens, and with all_to_all as many heads, as any other."""
    cp, tp, method, seq_len = config.mesh.cp, config.mesh.tp, config.context.method, config.training.seq_len
    if cp == 1:
        return
    chunks = 1 if method == "all_to_all" else 2  # an early and a late one, so that all see as much of the past
    parts = chunks * cp * tp
    if seq_len % parts and seq_len % tp == 0:
        yield (
            "mesh.cp",
            f"{_times(chunks, cp, tp)} does not divide training.seq_len {seq_len} ({seq_len} / {parts} = "
            f"{seq_len / parts:.2f}): a rank takes {'two chunks' if chunks == 2 else 'one chunk'} of every sequence",
        )
    for key, heads in {"n_heads": config.model.n_heads, "n_kv_heads": n_kv_heads(config.model)}.items():
        if method == "all_to_all" and heads % (cp * tp) and heads % tp == 0:
            yield (
                "context.method",
                f'"all_to_all" splits the heads over the ranks, but {_times(1, cp, tp)} does not divide {key} {heads} '
                f'({heads} / {cp * tp} = {heads / (cp * tp):.2f}); use "gather" or "ring", or another cp',
            )


def _times(chunks: int, cp: int, tp: int) -> str:
    """ "cp 4", or "2 x cp 4 x tp 2 = 16"."""
    factors = [word for word, n in ((str(chunks), chunks), (f"cp {cp}", cp), (f"tp {tp}", tp)) if n > 1]
    return " x ".join(factors) + (f" = {chunks * cp * tp}" if len(factors) > 1 else "")


def _zero_stage(config: Config, _: int | None) -> Iterator[Problem]:
    """Stages 1 and 2 say themselves what two other keys say of stage 3."""
    fsdp, stage = config.fsdp, config.fsdp.zero_stage
    if stage < 3 and fsdp.reshard_after_forward == "always":
        yield (
            "fsdp.reshard_after_forward",
            f'zero_stage {stage} keeps parameters gathered from forward to backward, "always" frees them between: '
            "leave one of the two out",
        )
    if stage == 2 and fsdp.accumulate == "reduce_last":
        yield "fsdp.accumulate", 'zero_stage 2 reduces every micro-batch; for "reduce_last" set zero_stage 1 or 3'
    if stage == 1 and "accumulate" in fsdp.model_fields_set and fsdp.accumulate == "reduce_every":
        yield "fsdp.accumulate", 'zero_stage 1 reduces once a step; for "reduce_every" set zero_stage 2'


def _comm(config: Config, _: int | None) -> Iterator[Problem]:
    names = [group.shards_over for group in config.comm.simulate.groups]
    for index, name in enumerate(names):
        key = f"comm.simulate.groups.{index}.shards_over"
        if name not in FSDP_DIMENSIONS:
            there = ", ".join(f'"{dimension}"' for dimension in FSDP_DIMENSIONS)
            yield key, f'no FSDP group is sharded over "{name}", only over {there}'
        elif name in names[:index]:
            yield key, f'delays for "{name}" stand above already; the first count'


def _activation_checkpoint(config: Config, _: int | None) -> Iterator[Problem]:
    table = config.activation_checkpoint
    modes = {
        "save_ops": ("selective",),
        "save_every_nth_matmul": ("selective",),
        "every_nth_layer": ("full", "selective"),
        "layers": ("full", "selective"),
        "memory_budget": ("budget",),
    }
    for name, useful in modes.items():
        key = f"activation_checkpoint.{name}"
        if getattr(table, name) != schema_keys()[key].default and table.mode not in useful:
            choices = " or ".join(f'"{mode}"' for mode in useful)
            yield key, f'{name} does nothing in mode "{table.mode}", only in {choices}; leave it out or change the mode'
    if table.mode == "budget" and not config.compile.enable:
        yield "activation_checkpoint.mode", 'mode "budget" is the work of torch.compile: it needs compile.enable = true'


def _checkpointed_layers(config: Config, _: int | None) -> Iterator[Problem]:
    table, n_layers = config.activation_checkpoint, config.model.n_layers
    if table.mode not in ("full", "selective"):
        return
    try:
        layers = layer_numbers(table.layers, n_layers) if table.layers is not None else range(n_layers)
    except ConfigError as error:
        yield "activation_checkpoint.layers", str(error)
        return
    if table.every_nth_layer > len(layers):
        yield (
            "activation_checkpoint.every_nth_layer",
            f"every_nth_layer {table.every_nth_layer} selects none of {len(layers)} layers",
        )


def _device(config: Config, _: int | None) -> Iterator[Problem]:
    if config.job.device == "cpu" and config.fsdp.cpu_offload:
        yield (
            "fsdp.cpu_offload",
            'cpu_offload does nothing with job.device = "cpu": the state is in CPU memory as it is',
        )


LAYOUT_RULES: tuple[Rule, ...] = (
    _mesh,
    _tensor_parallel,
    _expert_parallel,
    _owner_partition,
    _muon,
    _context_parallel,
    _zero_stage,
    _comm,
    _pipeline,
    _device,
    _activation_checkpoint,
    _checkpointed_layers,
)
