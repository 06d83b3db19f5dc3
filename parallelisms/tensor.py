"""Tensor parallelism with sequence parallelism (Shoeybi et al. 2019, Megatron-LM; Korthikanti et al. 2022).

Between the matrices each rank holds a slice of the sequence, (batch, seq / tp, dim); inside attention and
feed-forward it holds all of the sequence and a slice of the heads or of the inner width. The vocabulary is cut as
well: embedding and head hold rows of it, and the loss is computed on each rank's rows, so full logits never exist.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

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

from parallelisms.plan import plan_of
from parallelisms.ties import ties_kept

SEQUENCE = Shard(1)


class _Gather(PrepareModuleInput):
    """Gather the sequence of a module's first input; the others (angles, mask) are whole on every rank already."""

    def __init__(self) -> None:
        super().__init__(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),))

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> tuple:
        first, *others = inputs
        return (*super()._prepare_input_fn((first,), device_mesh), *others)


class _Embedding(RowwiseParallel):
    """Rows of the vocabulary; the output is a shard of the sequence."""

    def __init__(self) -> None:
        super().__init__(input_layouts=Replicate(), output_layouts=SEQUENCE)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        # The output is a collective still under way. Entering a compiled block like that, its gradient is lost
        # without an error (torch 2.13: the embedding's is zero, the loss right); using it here waits for it.
        module.register_forward_hook(lambda _module, _inputs, output: output.clone())
        return module


class _Head(ParallelStyle):
    """Rows of the vocabulary, and the loss on them: it is called with this rank's rows and the group to reduce over."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.weight = nn.Parameter(distribute_tensor(module.get_parameter("weight"), device_mesh, [Shard(0)]))
        module.register_forward_pre_hook(lambda _module, inputs: self._prepare(device_mesh, *inputs))
        return module

    def _prepare(self, mesh: DeviceMesh, hidden: Tensor, loss: Callable | None = None) -> tuple[Tensor, Callable]:
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, [SEQUENCE], run_check=False)
        # Each rank's rows contribute a part of the gradient of the hidden states: backward reduce-scatters them.
        hidden = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        def on_local_rows(hidden: Tensor, weight: DTensor) -> Tensor:
            if loss is None:
                logits = F.linear(hidden, weight.to_local())
                return DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False).full_tensor()
            return loss(hidden, weight.to_local(), group=mesh.get_group())

        return hidden, on_local_rows


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "embedding": _Embedding,
    "norm": SequenceParallel,
    "gather": _Gather,
    "column": ColwiseParallel,
    "row": lambda: RowwiseParallel(output_layouts=SEQUENCE),
    "head": _Head,
}


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the modules that the plan names over `mesh`'s one axis.

    Raises:
        ValueError: a pattern of the plan matches no module.
    """
    names = [name for name, _ in model.named_modules()]
    with ties_kept(model):
        for pattern, role in plan_of(model).tensor_parallel.items():
            matches = [name for name in names if fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")]
            if not matches:
                raise ValueError(f"the tensor-parallel plan names {pattern!r}, which matches no module")
            for name in matches:
                parallelize_module(model.get_submodule(name), mesh, _STYLES[role]())
