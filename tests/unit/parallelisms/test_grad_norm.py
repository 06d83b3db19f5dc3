"""The gradient norm on a CPU is as exact as its type, however large a tensor is, and so does not show its shards."""

import pytest
import torch
from torch import Tensor, nn

from parallelisms.grad_norm import grad_norm, norms_of

HEAD = (4096, 192)


def with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


@pytest.fixture(scope="module")
def gradient() -> Tensor:
    """Like a head's: few tokens' rows are large."""
    return torch.randn(HEAD, generator=torch.Generator().manual_seed(0)).pow(5)


def test_of_a_large_tensor(gradient):
    norm = grad_norm([with_gradient(gradient)])
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(gradient.double().norm().item(), rel=1e-7)


def test_of_its_shards(gradient):
    shards = [with_gradient(shard) for shard in gradient.chunk(2)]
    assert grad_norm(shards).item() == pytest.approx(grad_norm([with_gradient(gradient)]).item(), rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_of_each_tensor(dtype):
    tensors = [torch.full((5,), 3.0, dtype=dtype), torch.full((2, 2), -2.0, dtype=dtype)]
    torch.testing.assert_close(norms_of(tensors), torch.tensor([45.0, 16.0]).double().sqrt())
    assert norms_of(tensors, torch.inf).tolist() == [3.0, 2.0]
