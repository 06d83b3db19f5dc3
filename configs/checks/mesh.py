"""Rules for the mesh and what is distributed over it: batch, model, sequence, experts, layers."""

from collections.abc import Iterator

from configs.architectures.llama_keys import n_further
from configs.architectures.parts import n_kv_heads
from configs.checks.rule import Problem, Rule
from configs.errors import ConfigError, quotient
from configs.layout import accumulation_steps, mesh_sizes, micro_batch_size, smallest_world_size, tensor_parallel_sizes
from configs.schema import Config, is_described
from configs.stages import check_micro_batches, layers_of_stages


def _mesh(config: Config, world_size: int | None) -> Iterator[Problem]:
    """The mesh, and the global batch on it."""
    mesh = config.mesh
    if mesh.dp_shard == 0:
        yield "mesh.dp_shard", "dp_shard must be 1 or more, or -1 for all ranks that the other sizes leave, got 0"
        return
    try:
        sizes = mesh_sizes(config, world_size or smallest_world_size(config))
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
            batch = config.training.global_batch_size
            micro = micro_batch_size(config.training)
            yield (
                "training.micro_batch_size",
                f"global_batch_size {batch} / (dp {sizes.dp} x micro_batch_size {micro}) = {error}; change one of them",
            )


def _tensor_parallel(config: Config, _: int | None) -> Iterator[Problem]:
    tp = config.mesh.tp
    for key, size in tensor_parallel_sizes(config).items():
        if size % tp:
            yield "mesh.tp", f"tp {tp} does not divide {key} {size} ({quotient(size, tp)}); change one of them"


def _expert_parallel(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Each rank of `ep` must hold the same number of whole experts; `ep` must divide the ranks that share them out."""
    ep = config.mesh.ep
    n_experts = config.model.n_experts
    if config.expert.exchange == "buffers" and (ep == 1 or not is_described(config.model)):
        what = "ep 1 exchanges nothing" if ep == 1 else "experts of this architecture don't say how many rows they sent"
        yield "expert.exchange", f'{what}, and so exchange = "buffers" does nothing; leave it out'
    if ep == 1:
        return
    if is_described(config.model) and not n_experts:  # other models are asked when they are built
        yield "mesh.ep", f"ep {ep} distributes experts, but model.n_experts is not set; leave ep out"
        return
    if n_experts and n_experts % ep:
        yield (
            "mesh.ep",
            f"ep {ep} does not divide model.n_experts {n_experts} ({quotient(n_experts, ep)}), but each rank must hold "
            "the same number of experts; change one of them",
        )
    try:
        sizes = mesh_sizes(config, world_size or smallest_world_size(config))
    except ConfigError:
        return  # reported by the mesh's own rule
    if sizes.by_owner and sizes.dp_shard > 1:
        return  # reported by the partition's own rule
    axis = "dp_replicate" if sizes.by_owner else "dp_shard"
    ranks = sizes.axes[axis] * sizes.cp
    if ranks % ep:
        yield (
            "mesh.ep",
            f"ep {ep} does not divide {axis} {sizes.axes[axis]} x cp {sizes.cp} = {ranks} ({quotient(ranks, ep)}), the "
            f"ranks that it distributes experts over; set ep to a divisor of {ranks}, or change {axis}",
        )


def _context_parallel(config: Config, _: int | None) -> Iterator[Problem]:
    """Each rank must have the same number of tokens, and with all_to_all the same number of heads."""
    cp = config.mesh.cp
    tp = config.mesh.tp
    method = config.context.method
    seq_len = config.training.seq_len
    if cp == 1:
        return
    chunks = 1 if method == "all_to_all" else 2  # an early and a late one: every rank then attends to as many keys
    parts = chunks * cp * tp
    if seq_len % parts and seq_len % tp == 0:
        yield (
            "mesh.cp",
            f"{_times(chunks, cp, tp)} does not divide training.seq_len {seq_len} ({quotient(seq_len, parts)}), but a "
            f"rank takes {'two chunks' if chunks == 2 else 'one chunk'} of every sequence; change one of them",
        )
    for key, heads in {"n_heads": config.model.n_heads, "n_kv_heads": n_kv_heads(config.model)}.items():
        if method == "all_to_all" and heads % (cp * tp) and heads % tp == 0:
            yield (
                "context.method",
                f'"all_to_all" splits the heads over the ranks, but {_times(1, cp, tp)} does not divide {key} {heads} '
                f'({quotient(heads, cp * tp)}); use "gather" or "ring", or change cp',
            )


def _times(chunks: int, cp: int, tp: int) -> str:
    """ "cp 4", or "2 x cp 4 x tp 2 = 16"."""
    factors = [word for word, n in ((str(chunks), chunks), (f"cp {cp}", cp), (f"tp {tp}", tp)) if n > 1]
    return " x ".join(factors) + (f" = {chunks * cp * tp}" if len(factors) > 1 else "")


def _pipeline(config: Config, _: int | None) -> Iterator[Problem]:
    table = config.pipeline
    if config.mesh.pp == 1:
        return
    try:
        layers_of_stages(config)
    except ConfigError as error:
        yield ("mesh.pp" if table.split is None else "pipeline.split"), str(error)
    if is_described(config.model) and config.model.tie_embeddings:
        yield from _tied_ends(config, "model.tie_embeddings", "set model.tie_embeddings = false")
    elif n_further(config.model):
        yield from _tied_ends(config, "model.multi_token", "leave model.multi_token out")
    if table.schedule == "zero_bubble_v":
        yield from _zero_bubble(config)


def _tied_ends(config: Config, key: str, without: str) -> Iterator[Problem]:
    """The first and the last stage hold one matrix, since `key` asks for it, and exchange its gradients once a step."""
    if config.pipeline.schedule == "zero_bubble_v":
        yield (
            "pipeline.schedule",
            '"zero_bubble_v" puts the first and the last stage on one rank, which would hold a tied '
            f'matrix ({key}) twice; use schedule "1f1b" or "interleaved_1f1b"',
        )
    if config.training.reduction == "exact":
        yield (
            "mesh.pp",
            'training.reduction = "exact" rounds the sum over embedding and head of each micro-batch, and with pp '
            f"{config.mesh.pp} both ends add up their gradients of a whole step ({key}); {without}, or pp = 1",
        )


def _zero_bubble(config: Config) -> Iterator[Problem]:
    """Backward computes gradients of a block's inputs and weights separately, so each op must be autograd's own."""
    instead = 'use schedule "1f1b" or "interleaved_1f1b"'
    start = 'schedule "zero_bubble_v" computes gradients of inputs and of weights in two passes'
    if config.compile.enable:
        yield "pipeline.schedule", f"{start}, but a compiled block has only one; {instead}, or compile.enable = false"
    if config.activation_checkpoint.mode == "selective":
        yield (
            "pipeline.schedule",
            f'{start}, but what activation_checkpoint.mode = "selective" keeps lasts for one; {instead}, or mode '
            '"none" or "full"',
        )
    if config.fsdp.reshard_after_forward == "always":
        yield (
            "pipeline.schedule",
            f"{start}, but the second would lack the parameters that FSDP freed; {instead}, or "
            'fsdp.reshard_after_forward = "default"',
        )


RULES: tuple[Rule, ...] = (_mesh, _tensor_parallel, _expert_parallel, _context_parallel, _pipeline)
