"""The techniques, in the one order in which they compose.

Tensor parallelism changes what the modules hold, so it comes first. Activation checkpointing wraps a block's forward
pass, and compilation wraps that, so that the compiler sees what is recomputed. FSDP comes last: its gathers and
reductions run around the compiled blocks. No technique knows the model: each follows the model's plan. Parameter
names never change, so a checkpoint fits any combination.
"""

from torch import nn

from configs.schema import Config
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile
from parallelisms.fsdp import apply_fsdp
from parallelisms.mesh import Mesh
from parallelisms.tensor import apply_tensor_parallel


def parallelize(model: nn.Module, mesh: Mesh, config: Config) -> nn.Module:
    """Apply what the config asks for to a model, or a pipeline stage of it, on the meta device, in place.

    No parameter has memory yet.
    """
    if mesh.sizes.tp > 1:
        apply_tensor_parallel(model, mesh.tp)
    apply_activation_checkpoint(model, config.activation_checkpoint)
    if config.compile.enable:
        apply_compile(model)
    apply_fsdp(model, mesh.fsdp, config.fsdp, config.training, is_stage=mesh.sizes.pp > 1)
    return model
