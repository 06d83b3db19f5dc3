"""Tensor parallelism with sequence parallelism (Shoeybi et al. 2019, Megatron-LM; Korthikanti et al. 2022).

Between the matrices each rank holds a slice of the sequence, (batch, seq / tp, dim); inside attention and
feed-forward it holds the whole sequence and a slice of the heads or of the inner width. The vocabulary is sharded, too:
embedding and head hold rows of it, and the loss is computed on each rank's rows, so full logits never exist.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from configs.plan import PARAMETER_ROLES, TENSOR_PARALLEL_DIM, plan_of
from parallelisms.tensor_whole import STYLES, cut_vector, sum_of_parts
from parallelisms.ties import ties_kept

SEQUENCE = Shard(1)


class _Gather(PrepareModuleInput):
    """Gathers the sequence of a module's first input; the others (angles, mask) are already whole on every rank."""

    def __init__(self) -> None:
        super().__init__(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),))

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> tuple:
        first, *others = inputs
        return (*super()._prepare_input_fn((first,), device_mesh), *others)


class _Embedding(RowwiseParallel):
    """Shards the rows of the vocabulary; the output is sharded by sequence."""

    def __init__(self) -> None:
        super().__init__(input_layouts=Replicate(), output_layouts=SEQUENCE)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        # The output is a collective still in flight. If it enters a compiled block as such, its gradient is lost
        # without an error (torch 2.13: the embedding's gradient is zero, the loss right). Using it here waits for it.
        module.register_forward_hook(lambda _module, _inputs, output: output.clone())
        return module


def _whole_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather the slices of the sequence into a plain tensor, from which each rank computes one term of a sum.

    Each rank therefore also computes one term of the gradient: backward reduce-scatters the terms.
    """
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [SEQUENCE], run_check=False)
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class _Head(ParallelStyle):
    """Shards the rows of the vocabulary; the loss is called with this rank's rows and the group to reduce over."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.weight = nn.Parameter(distribute_tensor(module.get_parameter("weight"), device_mesh, [Shard(0)]))
        module.register_forward_pre_hook(lambda _module, inputs: self._prepare(device_mesh, *inputs))
        return module

    def _prepare(self, mesh: DeviceMesh, hidden: Tensor, loss: Callable | None = None) -> tuple[Tensor, Callable]:
        hidden = _whole_sequence(hidden, mesh)

        def on_local_rows(hidden: Tensor, weight: DTensor) -> Tensor:
            if loss is None:
                logits = F.linear(hidden, weight.to_local())
                return DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False).full_tensor()
            return loss(hidden, weight.to_local(), group=mesh.get_group())

        return hidden, on_local_rows


class _Parts(ParallelStyle):
    """Gives a module the whole sequence as a plain tensor; the first thing it returns is one term of a sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward = module.forward

        def on_parts(x: Tensor) -> tuple:
            part, *others = forward(_whole_sequence(x, device_mesh))
            whole = DTensor.from_local(part, device_mesh, [Partial()], run_check=False)
            return whole.redistribute(placements=[SEQUENCE]).to_local(), *others

        module.forward = on_parts
        return module


class _GatherParts(ParallelStyle):
    """Gives a module the whole sequence as a plain tensor; a rank's gradient is one term of a sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _module, inputs: _whole_sequence(inputs[0], device_mesh))
        return module


class _NormOfParts(ParallelStyle):
    """Norms features of which each rank has a part: the sum of their squares is over all ranks, the weight is split."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.RMSNorm)
        assert module.eps is not None
        eps = module.eps
        features = module.weight.numel()
        module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(0)]))

        def forward(x: Tensor) -> Tensor:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))  # as torch's own norm
            squares = sum_of_parts(wide.square().sum(-1, keepdim=True), device_mesh)
            normed = wide * (squares / features + eps).rsqrt()
            return (normed * cast(DTensor, module.weight).to_local()).to(x.dtype)

        module.forward = forward  # type: ignore[method-assign]
        return module


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "embedding": _Embedding,
    "norm": lambda: SequenceParallel(use_local_output=True),
    "norm_of_parts": _NormOfParts,
    "gather": _Gather,
    "column": ColwiseParallel,
    "gather_column": lambda: ColwiseParallel(input_layouts=SEQUENCE),
    "gather_parts": _GatherParts,
    "row": lambda: RowwiseParallel(output_layouts=SEQUENCE),
    "head": _Head,
    "parts": _Parts,
}


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the modules that the plan names over the single axis of `mesh`.

    Raises:
        AttributeError: the plan names a module or parameter that the model does not have.
    """
    with ties_kept(model):
        for name, role in plan_of(model).tensor_parallel.items():
            if role in STYLES:
                STYLES[role](model.get_submodule(name), mesh)
            elif role == "whole_vector":
                owner, _, attribute = name.rpartition(".")
                cut_vector(model.get_submodule(owner), attribute, mesh)
            elif role in PARAMETER_ROLES:
                _cut_parameter(model, name, mesh, TENSOR_PARALLEL_DIM.get(role))
            else:
                parallelize_module(model.get_submodule(name), mesh, _STYLES[role]())


def _cut_parameter(model: nn.Module, name: str, mesh: DeviceMesh, dim: int | None) -> None:
    """Replace a parameter by this rank's shard (dim None: a replica), and let its module compute with the plain tensor.

    A replica's gradient is a sum over ranks: each has the term that flows back through its shards of other matrices.
    """
    owner_name, _, attribute = name.rpartition(".")
    owner: Any = model.get_submodule(owner_name)
    whole = owner.get_parameter(attribute)
    placement = Replicate() if dim is None else Shard(dim % whole.ndim)
    setattr(owner, attribute, nn.Parameter(distribute_tensor(whole, mesh, [placement])))
    grad_placements = None if dim is not None else [Partial()]

    def local(parameter: Any) -> Tensor:
        # A module may have others that are not cut.
        return parameter.to_local(grad_placements=grad_placements) if isinstance(parameter, DTensor) else parameter

    kind = type(model.get_submodule(owner_name))
    if issubclass(kind, nn.Linear):
        owner.forward = lambda x: F.linear(x, local(owner.weight))
    elif issubclass(kind, nn.RMSNorm):
        owner.forward = lambda x: F.rms_norm(x, owner.normalized_shape, local(owner.weight), owner.eps)
    else:
        owner.local = local
