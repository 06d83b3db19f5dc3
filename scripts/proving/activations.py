"""Finds the block after which the activations of a parallel model are no longer those of one process.

Ranks hold different tokens, or the same ones, in an order that depends on the technique. So each token's activations
become one number, their product with a fixed vector, and the sorted numbers of all tokens of a batch are compared.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs.layout import mesh_sizes
from configs.load import load
from configs.plan import plan_of
from parallelisms.mesh import build_mesh
from parallelisms.ranks import gather
from scripts.parity_compare import attention_that_compiles
from scripts.parity_reference import batches
from trainer.step import build_learner

Activations = dict[str, list[float]]
"""A number for each token, in ascending order, by block."""


def activations(config_name: str, overrides: tuple[str, ...]) -> Activations:
    """Evaluate the first batch of a job on this rank of the mesh; returns the activations of all ranks."""
    config = load(config_name, overrides, world_size=dist.get_world_size()).config
    with attention_that_compiles():
        mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
        learner = build_learner(config, mesh)
        seen: dict[str, list[float]] = {}
        for stage in learner.stages.values():
            for name in plan_of(stage).blocks:
                _listen(stage.get_submodule(name), seen.setdefault(name, []))
        learner.evaluate(next(iter(batches(learner.config, mesh.dp_rank, mesh.sizes.dp))), None)
    merged: Activations = {}
    for of_rank in gather(seen):
        for name, numbers in of_rank.items():
            merged.setdefault(name, []).extend(numbers)
    return {name: sorted(numbers) for name, numbers in merged.items()}


def first_block_apart(found: Activations, expected: Activations, bound: float) -> str:
    """The first block whose activations differ; "" if none does."""
    for name, numbers in expected.items():
        copies = max(1, len(found.get(name, [])) // len(numbers))  # ranks that hold the same tokens
        own = found.get(name, [])[::copies]
        largest = max(map(abs, numbers))
        if len(own) != len(numbers):
            return name
        if not all(abs(a - b) <= bound * largest for a, b in zip(own, numbers, strict=True)):  # nor is a NaN
            return name
    return ""


def _listen(block: nn.Module, numbers: list[float]) -> None:
    """Add a number for each token that the block returns."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        numbers.extend(_projected(hidden))

    block.register_forward_hook(hook)


@torch.compiler.disable
def _projected(hidden: Tensor) -> list[float]:
    """(batch, seq, dim) -> a number for each token."""
    local = hidden.to_local() if isinstance(hidden, DTensor) else hidden
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(local.shape[-1], dtype=torch.float64, generator=generator)
    product = local.detach().double() @ vector
    return product.flatten().tolist()
