"""All parallelism techniques, applied in the one order in which they compose.

Pipeline stages are split off first; to the other techniques, each stage is a separate model. Float8 swaps modules (same
names and parameters), so it comes before techniques that modify modules. Tensor and expert parallelism change what
modules hold, and context parallelism changes what a block's forward pass calls, which QK-clip then listens to; so these
come before techniques that wrap the forward pass. Activation checkpointing wraps a block's forward pass, and
compilation wraps the result, so that the compiler sees what is recomputed. FSDP comes last: its all-gathers and
reductions run around the compiled blocks. A single rank has no FSDP if it computes with copies of its parameters
(`compute_copies.py`), which it gets once they are in memory. No technique knows the model; each follows the model's
plan. Parameter names never change, so a checkpoint fits any combination.
"""

from torch import nn

from configs.layout import buffer_factor
from configs.schema import Config
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.attention.backend import apply_attention_backend
from parallelisms.attention.context import apply_context_parallel
from parallelisms.attention.delta import apply_delta_backend
from parallelisms.attention.logits import note_logits
from parallelisms.compile import apply_compile, compiler_options
from parallelisms.expert import apply_expert_parallel, keep_shared_experts_between
from parallelisms.float8 import apply_float8, choice_of
from parallelisms.fsdp import apply_fsdp, apply_prefetch, is_needed
from parallelisms.load_balance import apply_load_balance
from parallelisms.mesh import Mesh
from parallelisms.pipeline import own_stages
from parallelisms.symmetric_memory import enable_async_tp
from parallelisms.tensor import apply_tensor_parallel


def parallelize(model: nn.Module, mesh: Mesh, config: Config) -> dict[int, nn.Module]:
    """Apply the configured techniques to a model on the meta device.

    Returns:
        The pipeline stages that this rank holds, by number, still on the meta device; without a pipeline, {0: model}.
    """
    in_8_bits = choice_of(model, config)
    stages = own_stages(model, config, mesh.pp.get_local_rank())
    tp_group = mesh.tp.get_group().group_name if mesh.sizes.tp > 1 else ""
    for stage in stages.values():
        apply_float8(stage, in_8_bits, config.float8, tp_group)
        apply_attention_backend(stage, config, mesh.device)
        apply_delta_backend(stage, config, mesh.device)
        if mesh.sizes.tp > 1:
            apply_tensor_parallel(stage, mesh.tp)
        if mesh.sizes.ep > 1:
            apply_expert_parallel(stage, mesh.ep, buffer_factor(config.expert))
        if mesh.sizes.cp > 1:
            apply_context_parallel(stage, mesh.cp, config.context.method, config.attention.backend)
        if config.optimizer.qk_clip:
            note_logits(stage, mesh, config)
        apply_load_balance(stage, mesh, config)
        apply_activation_checkpoint(stage, config.activation_checkpoint)
        if config.compile.enable:
            options = compiler_options(config.compile) | enable_async_tp(config, mesh)
            apply_compile(stage, options | keep_shared_experts_between(config, mesh))
        if is_needed(mesh.sizes.world_size, config):
            apply_fsdp(stage, mesh, config.fsdp, config.training)
            apply_prefetch(stage, config.comm)
    return stages
