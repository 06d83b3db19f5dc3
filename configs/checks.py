"""What must hold between keys, each check a function that yields the key to blame and the message.

Sizes are shown with their arithmetic. An option that would do nothing is an error, since whoever set it expects
something of it; but an option may stay set when the mesh or the devices at hand leave it idle, so that one file runs
on any number of ranks.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import PurePath

from configs.errors import ConfigError
from configs.keys import schema_keys
from configs.layout import (
    FSDP_DIMENSIONS,
    accumulation_steps,
    decay_steps,
    expert_dim,
    head_dim,
    layer_numbers,
    mesh_sizes,
    n_kv_heads,
    smallest_world_size,
    tensor_parallel_sizes,
)
from configs.schema import Config, Source
from configs.stages import check_micro_batches, layers_of_stages

Problem = tuple[str, str]
"""Dotted key, message."""


def check(config: Config, world_size: int | None, complete: bool = True) -> list[Problem]:
    """All that is wrong between the keys.

    Args:
        world_size: None if it is not known yet; then the fewest ranks that the mesh allows are checked.
        complete: False if `config` lacks the keys with errors of their own; what needs one of them is not checked.
    """
    problems: list[Problem] = []
    for rule in _RULES:
        try:
            problems.extend(rule(config, world_size))
        except AttributeError:
            if complete:
                raise
    return problems


def _head_width(config: Config, _: int | None) -> Iterator[Problem]:
    model = config.model
    if model.head_dim is None and model.dim % model.n_heads:
        yield (
            "model.dim",
            f"dim {model.dim} is not divisible by n_heads {model.n_heads} ({model.dim} / {model.n_heads} = "
            f"{model.dim / model.n_heads:.2f}); change one of them, or set head_dim",
        )
    elif head_dim(model) % 2:
        width = "" if model.head_dim else f" = dim {model.dim} / n_heads {model.n_heads}"
        key = "model.head_dim" if model.head_dim else "model.dim"
        yield (
            key,
            f"head_dim {head_dim(model)}{width} is odd; rotary positions turn pairs of features, so it must be even",
        )


def _kv_heads(config: Config, _: int | None) -> Iterator[Problem]:
    model = config.model
    if model.n_heads % n_kv_heads(model):
        yield (
            "model.n_kv_heads",
            f"n_heads {model.n_heads} is not divisible by n_kv_heads {model.n_kv_heads} ({model.n_heads} / "
            f"{model.n_kv_heads} = {model.n_heads / n_kv_heads(model):.2f}): every key head serves as many query heads",
        )


def _experts(config: Config, _: int | None) -> Iterator[Problem]:
    model = config.model
    if model.n_experts is None:
        for name in ("experts_per_token", "n_shared_experts", "expert_dim", "n_dense_layers", "router"):
            if getattr(model, name) != type(model).model_fields[name].default:
                yield f"model.{name}", f"{name} does nothing without experts: set model.n_experts, or leave it out"
        return
    if model.experts_per_token > model.n_experts:
        yield (
            "model.experts_per_token",
            f"experts_per_token {model.experts_per_token} is above n_experts {model.n_experts}: each is chosen once",
        )
    if model.n_dense_layers >= model.n_layers:
        yield (
            "model.n_dense_layers",
            f"n_dense_layers {model.n_dense_layers} of n_layers {model.n_layers} leaves no layer for the experts",
        )
    if model.n_dense_layers == 0 and expert_dim(model) != model.ffn_dim:
        yield (
            "model.expert_dim",
            f"with n_dense_layers = 0 no layer has the dense feed-forward of ffn_dim {model.ffn_dim}: set ffn_dim = "
            f"{model.expert_dim} and leave expert_dim out, or set n_dense_layers",
        )


def _router(config: Config, _: int | None) -> Iterator[Problem]:
    model, router = config.model, config.model.router
    if model.n_experts is None:
        return
    if model.experts_per_token == 1 and router.renormalize:
        yield (
            "model.router.renormalize",
            "with experts_per_token = 1 renormalize makes every weight 1, from which the router learns nothing: set "
            "renormalize = false",
        )
    for name, rule in {"auxiliary_loss_weight": "auxiliary_loss", "bias_update_rate": "bias"}.items():
        if getattr(router, name) != type(router).model_fields[name].default and router.load_balance != rule:
            yield (
                f"model.router.{name}",
                f'{name} does nothing with load_balance "{router.load_balance}", only with "{rule}"; leave it out',
            )


def _rope_scaling(config: Config, _: int | None) -> Iterator[Problem]:
    scaling = config.model.rope_scaling
    if scaling and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield (
            "model.rope_scaling.high_freq_factor",
            f"high_freq_factor {scaling.high_freq_factor} must be above low_freq_factor {scaling.low_freq_factor}",
        )


def _dtypes(config: Config, _: int | None) -> Iterator[Problem]:
    """A float64 run is there to prove something exact; one narrower stage would bring the round-off back unseen."""
    dtypes = {key: getattr(config.training, key) for key in ("dtype", "compute_dtype", "reduce_dtype")}
    wide = [key for key, dtype in dtypes.items() if dtype == "float64"]
    if 0 < len(wide) < len(dtypes):
        narrow = " and ".join(f'{key} is "{dtype}"' for key, dtype in dtypes.items() if key not in wide)
        yield (
            f"training.{wide[0]}",
            f"float64 is for proofs, so {', '.join(dtypes)} are all float64 or none, but {narrow}",
        )


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
    for axis, ranks in (("tp", config.mesh.tp), ("cp", config.mesh.cp)):
        if ranks > 1:  # over cp the parameters are sharded as over dp_shard
            yield (
                "fsdp.partition",
                f'partition "owner" needs whole parameters, and {axis} {ranks} cuts them; set mesh.{axis} = 1, or '
                'partition "rows"',
            )
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
    chunks, of_tp = (1 if method == "all_to_all" else 2), f" x tp {tp}" if tp > 1 else ""
    parts = chunks * cp * tp
    if seq_len % parts and seq_len % tp == 0:
        two = "2 x " if chunks == 2 else ""  # an early and a late chunk each, so that all see as much of the past
        yield (
            "mesh.cp",
            f"{two}cp {cp}{of_tp} = {parts} does not divide training.seq_len {seq_len} ({seq_len} / {parts} = "
            f"{seq_len / parts:.2f}): a rank takes {'two chunks' if two else 'one chunk'} of every sequence",
        )
    for key, heads in {"n_heads": config.model.n_heads, "n_kv_heads": n_kv_heads(config.model)}.items():
        if method == "all_to_all" and heads % (cp * tp) and heads % tp == 0:
            yield (
                "context.method",
                f'"all_to_all" splits the heads over the ranks, but cp {cp}{of_tp} = {cp * tp} does not divide {key} '
                f'{heads} ({heads} / {cp * tp} = {heads / (cp * tp):.2f}); use "gather" or "ring", or another cp',
            )


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


def _tokenizer(config: Config, _: int | None) -> Iterator[Problem]:
    path, train_on = config.tokenizer.path, config.tokenizer.train_on
    if train_on and path is None:
        yield "tokenizer.train_on", "train_on needs path: where the trained tokenizer is to be kept"
    if train_on and path is not None and path.endswith(".json"):
        yield "tokenizer.train_on", f'train_on makes a SentencePiece model: path "{path}" should end in .model'
    readers = [f'source "{source.name}"' for source in config.data.sources if source.kind != "synthetic"]
    if config.data.prepare:
        readers.append("[data.prepare]")
    if readers and path is None and not train_on:
        yield "tokenizer.path", f"a tokenizer is needed for {', '.join(readers)}: set tokenizer.path"


def _sources(config: Config, _: int | None) -> Iterator[Problem]:
    for table, sources in (("data", config.data.sources), ("validation", config.validation.sources)):
        names = Counter(source.name for source in sources)
        for index, source in enumerate(sources):
            key = f"{table}.sources.{index}"
            yield from _source(key, source)
            if names[source.name] > 1 and source.name in [other.name for other in sources[:index]]:
                yield f"{key}.name", f'a source named "{source.name}" stands above already; names must differ'


def _source(key: str, source: Source) -> Iterator[Problem]:
    if source.kind == "synthetic" and source.path is not None:
        yield f"{key}.path", f'source "{source.name}": synthetic tokens are read from nowhere; leave path out'
    if source.kind != "synthetic" and not source.path:
        what = "the folder of its token files" if source.kind == "tokens" else "a file, a folder, or hub:NAME"
        yield f"{key}.path", f'source "{source.name}" of kind "{source.kind}" needs path: {what}'
    for name, kind in {"text_key": "text", "virtual_shards": "text", "document_length": "synthetic"}.items():
        if source.kind != kind and getattr(source, name) != schema_keys()[f"data.sources.N.{name}"].default:
            yield (
                f"{key}.{name}",
                f'source "{source.name}": {name} does nothing with kind "{source.kind}", only with "{kind}"',
            )


def _prepare(config: Config, _: int | None) -> Iterator[Problem]:
    prepare = config.data.prepare
    if prepare is None:
        return
    if not prepare.input:
        yield "data.prepare.input", "input names no text; give files, folders, hub:NAME or python_stdlib"
    if prepare.validation_fraction == 1:
        yield "data.prepare.validation_fraction", "validation_fraction 1 leaves nothing to train on"
    held_out = PurePath(prepare.output) / "validation"
    for index, source in enumerate(config.validation.sources):
        if prepare.validation_fraction == 0 and source.path and PurePath(source.path) == held_out:
            yield (
                f"validation.sources.{index}.path",
                f"nothing will be in {held_out}: data.prepare.validation_fraction is 0; set it, 0.02 for example",
            )


def _validation(config: Config, _: int | None) -> Iterator[Problem]:
    if config.validation.interval and not config.validation.sources:
        yield (
            "validation.interval",
            f"interval {config.validation.interval} needs [[validation.sources]]; 0: no validation",
        )


def _lr_schedule(config: Config, _: int | None) -> Iterator[Problem]:
    schedule = config.lr_schedule
    warmup, total, stable_decay = schedule.warmup_steps, schedule.total_steps, schedule.name == "warmup_stable_decay"
    if warmup > total:
        yield "lr_schedule.warmup_steps", f"warmup_steps {warmup} is above total_steps {total}"
    elif stable_decay and warmup + decay_steps(schedule) > total:
        decay = decay_steps(schedule)
        yield (
            "lr_schedule.decay_steps",
            f"warmup_steps {warmup} + decay_steps {decay} = {warmup + decay} is above total_steps {total}",
        )
    if schedule.decay_steps is not None and not stable_decay:
        yield (
            "lr_schedule.decay_steps",
            f'decay_steps does nothing with name "{schedule.name}", only with "warmup_stable_decay"; leave it out',
        )


def _optimizer_groups(config: Config, _: int | None) -> Iterator[Problem]:
    patterns = [group.pattern for group in config.optimizer.groups]
    for index, pattern in enumerate(patterns):
        if pattern in patterns[:index]:
            yield f"optimizer.groups.{index}.pattern", f'the pattern "{pattern}" stands above already; the first counts'


def _profile(config: Config, _: int | None) -> Iterator[Problem]:
    profile, steps = config.profile, config.training.steps
    last = profile.start_step + profile.steps - 1
    if profile.memory_snapshot and not profile.start_step:
        yield "profile.memory_snapshot", "memory_snapshot needs start_step above 0: it covers the steps of the trace"
    if profile.memory_snapshot and config.job.device == "cpu":
        yield "profile.memory_snapshot", 'memory_snapshot records CUDA memory: it does nothing with job.device = "cpu"'
    if profile.start_step and last > steps:
        yield "profile.start_step", f"the trace would end at step {last}, after training.steps {steps}"


def _job(config: Config, _: int | None) -> Iterator[Problem]:
    name = config.job.name
    if config.job.output_dir is None and (name in ("", ".", "..") or "/" in name or "\0" in name):
        yield (
            "job.name",
            f'the run folder is runs/<name>, so name "{name}" must be a plain folder name; or set output_dir',
        )


def _checkpoint(config: Config, _: int | None) -> Iterator[Problem]:
    table, load, validated = config.checkpoint, config.checkpoint.load, config.validation.interval
    if isinstance(load, int) and load < 0:
        yield "checkpoint.load", f"there is no step {load}"
    if table.init_from is not None and load not in ("latest", "none"):
        yield "checkpoint.init_from", f"init_from is for a run that starts anew, but load is {load}; leave one out"
    for name in ("keep_every", "keep_best"):
        if getattr(table, name) and not table.keep_last:
            yield f"checkpoint.{name}", f"{name} does nothing with keep_last = 0, which keeps all; set keep_last"
    if table.keep_best and (not validated or not table.interval or table.interval % validated):
        yield (
            "checkpoint.keep_best",
            f"keep_best needs a validation at every checkpoint, but validation.interval {validated} does not divide "
            f"checkpoint.interval {table.interval}",
        )
    if table.export_every and (not table.interval or table.export_every % table.interval):
        yield (
            "checkpoint.export_every",
            f"an export is made of a checkpoint, but export_every {table.export_every} is no multiple of interval "
            f"{table.interval}",
        )
    if table.optimizer_dtype == config.training.dtype:
        yield "checkpoint.optimizer_dtype", 'optimizer_dtype does nothing here: training.dtype is "bfloat16", too'


_RULES: tuple[Callable[[Config, int | None], Iterator[Problem]], ...] = (
    _job,
    _checkpoint,
    _head_width,
    _kv_heads,
    _experts,
    _router,
    _rope_scaling,
    _tokenizer,
    _sources,
    _prepare,
    _dtypes,
    _optimizer_groups,
    _lr_schedule,
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
    _validation,
    _profile,
)
