"""The global norm over any mixture of meshes and placements, against the norm of the whole gradients."""

import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from parallelisms.grad_norm import clip_grads_with_norm, grad_norm

NORMS = (1.0, 2.0, 3.0, math.inf)


def mixture() -> list[torch.Tensor]:
    """Whole gradients, the same on all ranks; one much larger than the rest, one empty on some ranks."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 6), (12, 4), (3, 5), (8, 8), (9,), (2, 2)]
    gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    gradients[3][1, 2] = 50.0
    return gradients


def clipped(norm_type: float, max_norm: float) -> tuple[float, list[torch.Tensor]]:
    two, one = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    places = [
        (one, [Shard(0)]),
        (two, [Shard(0), Shard(1)]),
        (two, [Replicate(), Shard(0)]),
        (two, [Replicate(), Replicate()]),
        (None, None),
        (one, [Shard(0)]),  # two rows on four ranks: two of them own nothing
    ]
    parameters = []
    for gradient, (mesh, placements) in zip(mixture(), places, strict=True):
        cut = gradient if mesh is None else distribute_tensor(gradient, mesh, placements, src_data_rank=None)
        parameter = torch.nn.Parameter(torch.zeros_like(cut))
        parameter.grad = cut.clone()
        parameters.append(parameter)
    parameters.append(torch.nn.Parameter(torch.zeros(3)))  # frozen: no gradient
    norm = grad_norm(parameters, norm_type)
    clip_grads_with_norm(parameters, max_norm, norm)
    grads = [p.grad for p in parameters if p.grad is not None]
    return norm.item(), [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("max_norm", [0.5, 1e9, math.inf])
def test_norm_and_clipping_of_a_mixture(ranks, norm_type, max_norm):
    whole = torch.cat([g.flatten() for g in mixture()])
    expected = torch.linalg.vector_norm(whole, norm_type).item()
    scale = min(1.0, max_norm / (expected + 1e-6))
    for norm, gradients in ranks(4, clipped, norm_type, max_norm):
        assert norm == pytest.approx(expected, rel=1e-14)
        torch.testing.assert_close(torch.cat([g.flatten() for g in gradients]), whole * scale, rtol=1e-13, atol=1e-13)
