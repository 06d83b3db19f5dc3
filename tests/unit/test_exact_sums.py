"""The sums behind `training.reduction = "exact"`: the tree, the norm, and an update, however they are cut up."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from configs.schema import Optimizer
from parallelisms.exact_numbers import exact_grad_norm
from parallelisms.exact_reduction import PartialSums, _add_pairs
from trainer.optimizer import build_optimizer


def tree(leaves: list[Tensor]) -> Tensor:
    """The definition: a full tree over the largest power of two of leaves below all, plus the tree over the rest."""
    if len(leaves) == 1:
        return leaves[0]
    left = 1 << ((len(leaves) - 1).bit_length() - 1)
    return tree(leaves[:left]) + tree(leaves[left:])


def values(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of very different size, so that every other order of addition gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_any_ranks_add_the_same_leaves_in_the_same_tree(times, replicas, shards):
    """The leaves of each time, first those of each replica's shards, then those of all replicas, then all times."""
    n = times * replicas * shards
    leaves = values(n, 33)
    expected = tree(list(leaves))
    sums, most = PartialSums(), 0
    for at_once in leaves.clone().view(times, replicas, shards, -1):
        of_replicas = [_add_pairs(each, level=0) for each in at_once.unbind()]
        nodes, level = _add_pairs(torch.cat([nodes for nodes, _ in of_replicas]), of_replicas[0][1])
        for node in nodes:
            sums.add(node, level)
        most = max(most, len(sums._pending))
    assert sums.take().equal(expected)
    assert most <= n.bit_length()
    assert not sums._pending


def test_another_order_has_other_bits():
    leaves = values(8, 1000)
    assert not leaves.sum(0).equal(tree(list(leaves)))


def test_a_part_of_a_tensor_does_not_keep_the_whole_in_memory():
    sums = PartialSums()
    sums.add(torch.ones(1000)[:2])
    assert sums.take().untyped_storage().nbytes() == 8


@given(st.integers(0, 3), st.lists(st.integers(0, 30), max_size=3), st.sampled_from([1.0, 2.0, 3.0, 5.0, math.inf]))
def test_the_norm_has_the_same_bits_for_any_rows_on_any_rank(seed, cuts, norm_type):
    """Its sums over ranks are sums of integers, so that ranks are tensors here."""
    whole = [values(31, 17, seed=seed), values(31, seed=seed + 10), values(31, 2, 5, seed=seed + 20)]
    bounds = [0, *sorted(cuts), 31]
    parts = [each[a:b] for each in whole for a, b in pairwise(bounds)]
    found, cut = (exact_grad_norm(with_gradients(tensors), norm_type) for tensors in (whole, parts[::-1]))
    assert found.equal(cut)
    flat = torch.cat([each.flatten() for each in whole]).double()
    assert found.item() == pytest.approx(torch.linalg.vector_norm(flat, norm_type).item(), rel=1e-6)


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_of_small_and_large_gradients(dtype, size):
    gradient = (values(300, 70) * size).to(dtype)
    found = exact_grad_norm(with_gradients([gradient, torch.zeros(3, dtype=dtype)]))
    bound = 1e-9 if dtype == torch.float64 else 1e-6
    assert found.item() == pytest.approx(gradient.double().norm().item(), rel=bound)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_of_nothing_and_of_what_is_not_finite(norm_type):
    assert exact_grad_norm(with_gradients([torch.zeros(3, 2), torch.zeros(0, 2)]), norm_type).item() == 0
    assert exact_grad_norm([torch.nn.Parameter(torch.ones(2))], norm_type).item() == 0
    assert exact_grad_norm(with_gradients([torch.tensor([[1.0, -math.inf]]), torch.ones(2)]), norm_type).isposinf()
    assert exact_grad_norm(with_gradients([torch.tensor([math.nan, math.inf])]), norm_type).isnan()


def with_gradients(tensors: list[Tensor]) -> list[torch.nn.Parameter]:
    """Parameters whose gradients these are."""
    parameters = []
    for tensor in tensors:
        parameter = torch.nn.Parameter(torch.empty_like(tensor))
        parameter.grad = tensor
        parameters.append(parameter)
    return parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_an_exact_adamw_has_the_same_bits_wherever_a_shard_begins(dtype):
    """Vectorized kernels compute the last elements of a tensor one by one; fused, they round them differently."""
    n, steps = 4099, 12
    weights = values(n).to(dtype)
    gradients = [values(n, seed=step + 1).to(dtype) for step in range(steps)]
    whole = updated(weights, gradients, [0, n])
    assert not whole.equal(weights)
    for bounds in ([0, 1, 2, 4, 7, 12, 33, 100, 1025, n], [0, 2048, n], [0, 1367, 2734, n]):
        assert updated(weights, gradients, bounds).equal(whole), bounds


def updated(weights: Tensor, gradients: list[Tensor], bounds: list[int]) -> Tensor:
    """The weights after AdamW has updated each part separately, each in its own memory."""
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    named = [(f"{part}", torch.nn.Parameter(weights[part].clone()[None])) for part in parts]
    optimizer = build_optimizer(Optimizer(lr=1e-2), named, exact=True)
    for gradient in gradients:
        for (_, parameter), part in zip(named, parts, strict=True):
            parameter.grad = gradient[part].clone()[None] / 1.7
        optimizer.step()
    return torch.cat([parameter.detach()[0] for _, parameter in named])
