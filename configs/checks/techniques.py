"""Rules for how a run computes: FSDP, recomputation, the compiler, the kernel of attention, float8 matmuls.

What only the GPU, torch and torchao decide is checked when the run starts.
"""

from collections.abc import Iterator

from configs.checks.rule import Problem, Rule
from configs.delta import reasons_against_kernels
from configs.errors import ConfigError
from configs.float8 import MULTIPLE
from configs.layout import layer_numbers, mesh_sizes, micro_batch_size, smallest_world_size
from configs.schema import Config, further_run_keys, is_described

_GPU_ONLY = ("cudnn", "flash3", "flex")


def _owner_partition(config: Config, world_size: int | None) -> Iterator[Problem]:
    fsdp = config.fsdp
    if fsdp.partition == "rows":
        return
    try:
        sizes = mesh_sizes(config, world_size or smallest_world_size(config))
    except ConfigError:
        return  # reported by the mesh's own rule
    if sizes.dp_shard > 1:
        yield (
            "fsdp.partition",
            f'partition "owner" needs whole parameters, but dp_shard {sizes.dp_shard} cuts them (on {sizes.world_size} '
            f"ranks, dp_replicate {sizes.dp_replicate}); set mesh.dp_replicate = {sizes.dp} and mesh.dp_shard = 1",
        )
    # The groups of these axes have NCCL alone, and a DTensor of CPU memory would be a copy on the mesh's device.
    if fsdp.cpu_offload and max(sizes.tp, sizes.pp, sizes.ep) > 1:
        yield (
            "fsdp.cpu_offload",
            'partition "owner" sends parameters from where they are, and beside tp, pp and ep ranks send only what is '
            'on a GPU; leave cpu_offload out, or set fsdp.partition = "rows"',
        )


def _activation_checkpoint(config: Config, _: int | None) -> Iterator[Problem]:
    table = config.activation_checkpoint
    if table.mode == "budget" and not config.compile.enable:
        yield "activation_checkpoint.mode", 'mode "budget" is done by torch.compile; set compile.enable = true'


def _checkpointed_layers(config: Config, _: int | None) -> Iterator[Problem]:
    table = config.activation_checkpoint
    n_layers = config.model.n_layers
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
            f"every_nth_layer {table.every_nth_layer} selects none of {len(layers)} layers; set it lower",
        )


def _cuda_graphs(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A graph is recorded for fixed addresses, but FSDP gathers parameters into new memory each time."""
    n_ranks = world_size or smallest_world_size(config)
    records = config.compile.mode in ("reduce-overhead", "max-autotune")
    if records and (n_ranks > 1 or config.fsdp.reshard_after_forward == "always"):
        where = f"on {n_ranks} ranks" if n_ranks > 1 else 'with fsdp.reshard_after_forward "always"'
        yield (
            "compile.mode",
            f"CUDA graphs need parameters that stay where they are in memory, but {where} they are freed and gathered "
            'again; set compile.mode = "max-autotune-no-cudagraphs" or "default"',
        )


def _autotuning(config: Config, _: int | None) -> Iterator[Problem]:
    training = config.training
    if config.compile.mode.startswith("max-autotune") and (training.deterministic or training.reduction == "exact"):
        cause = "training.deterministic" if training.deterministic else 'training.reduction "exact"'
        yield (
            "compile.mode",
            f"autotuning takes the kernels that were fastest when they were timed, each with another order of sums, "
            f'but {cause} fixes the order; set compile.mode = "default" or "reduce-overhead"',
        )


def _attention(config: Config, _: int | None) -> Iterator[Problem]:
    backend = config.attention.backend
    for reason in _why_no_attention(config, backend):
        yield "attention.backend", f'backend "{backend}" {reason}'
    has_delta = is_described(config.model) and "delta" in config.model.layers
    if config.attention.delta_backend != "auto" and not has_delta:
        what = f'delta_backend "{config.attention.delta_backend}" does nothing'
        yield "attention.delta_backend", f"{what}: the model has no layers of kind delta (model.layers); leave it out"
    elif config.attention.delta_backend == "fla":
        for reason in reasons_against_kernels(config, config.job.device != "cpu"):
            yield "attention.delta_backend", f'delta_backend "fla" {reason}; set "auto" or "torch"'


def _why_no_attention(config: Config, backend: str) -> Iterator[str]:
    if backend in _GPU_ONLY and config.job.device == "cpu":
        yield 'runs on GPUs only, and job.device is "cpu"; set "auto" or "flash2"'
    if backend in ("cudnn", "flex") and config.data.document_mask:
        yield 'does not take packed documents (data.document_mask); set "auto", "flash2" or "flash3"'
    if backend == "cudnn" and config.training.deterministic:
        yield 'adds up gradients in any order, which training.deterministic forbids; set "auto" or "flash2"'
    if backend == "flex" and not config.compile.enable:
        yield "holds all scores unless it is compiled; set compile.enable = true"
    if backend == "flex" and config.mesh.cp > 1 and config.context.method != "all_to_all":
        yield f'has no form for context.method = "{config.context.method}"; set context.method = "all_to_all"'


def _by_memory(config: Config, _: int | None) -> Iterator[Problem]:
    """What is chosen by memory needs a limit, and must not decide what is learned."""
    chosen = {"training.micro_batch_size": config.training.micro_batch_size, "fsdp.zero_stage": config.fsdp.zero_stage}
    for key, value in chosen.items():
        if value == "auto" and not config.activation_checkpoint.memory_limit_gib:
            yield (
                key,
                f'{key} = "auto" is chosen within a limit of memory, and there is none; set '
                'activation_checkpoint.memory_limit_gib = "device" or a number of GiB, or set a number here',
            )
    if config.training.micro_batch_size == "auto":
        further = further_run_keys({"training": config.training.model_dump(), "float8": config.float8.model_dump()})
        if "training.micro_batch_size" in further:
            is_exact = config.training.reduction == "exact"
            why = 'training.reduction = "exact"' if is_exact else f'float8.recipe = "{config.float8.recipe}"'
            yield (
                "training.micro_batch_size",
                f'micro_batch_size = "auto" would let a GPU\'s memory decide what is learned: with {why}, it is a run '
                "key; set a number",
            )


def _float8(config: Config, _: int | None) -> Iterator[Problem]:
    float8 = config.float8
    training = config.training
    if float8.recipe == "none" or float8.emulate:
        return
    if config.job.device == "cpu":
        yield (
            "float8.recipe",
            'a CPU has no float8 matmuls (job.device is "cpu"); set float8.emulate = true, or leave recipe out',
        )
    if training.compute_dtype == "float64":
        yield (
            "float8.recipe",
            "float8 matmuls have no float64 sums; set float8.emulate = true, or another compute_dtype",
        )
    micro_batch = micro_batch_size(training)
    tokens = micro_batch * training.seq_len
    if float8.recipe != "rowwise_with_gw_hp" and tokens % config.mesh.cp == 0 and tokens // config.mesh.cp % MULTIPLE:
        yield (
            "training.micro_batch_size",
            f"the gradients of weights are float8 matmuls over the micro-batch's {micro_batch} x "
            f"{training.seq_len} / cp {config.mesh.cp} = {tokens // config.mesh.cp} tokens, which must be a multiple "
            f"of {MULTIPLE}",
        )


def _float8_experts(config: Config, _: int | None) -> Iterator[Problem]:
    if not config.float8.experts:
        return
    if is_described(config.model) and not config.model.n_experts:
        yield "float8.experts", "the model has no experts (model.n_experts); leave float8.experts out"
    if not config.float8.emulate and config.training.compute_dtype == "float32":
        yield (
            "float8.experts",
            'experts multiply in float8 only for compute_dtype "bfloat16"; set it, or float8.emulate = true',
        )


def _float8_gather(config: Config, _: int | None) -> Iterator[Problem]:
    if not config.float8.fsdp_all_gather:
        return
    if config.fsdp.partition == "owner":
        yield "float8.fsdp_all_gather", 'partition "owner" gathers nothing; leave fsdp_all_gather out'
    if config.fsdp.cpu_offload:
        yield (
            "float8.fsdp_all_gather",
            "with fsdp.cpu_offload shards are sent to the GPU before they are rounded; leave one of them out",
        )


RULES: tuple[Rule, ...] = (
    _by_memory,
    _owner_partition,
    _activation_checkpoint,
    _checkpointed_layers,
    _cuda_graphs,
    _autotuning,
    _attention,
    _float8,
    _float8_experts,
    _float8_gather,
)
