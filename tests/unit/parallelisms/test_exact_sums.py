"""The sums behind `training.reduction = "exact"`: the tree, the norm, and an update, however they are cut up."""

import math
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from configs.schema import Optimizer
from parallelisms.sums.exact import ExactSums
from parallelisms.sums.fast import Sums
from parallelisms.sums.tree import PartialSums, TreeReduction, _add_pairs
from trainer.optimizers.build import build_optimizer


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
    found, cut = (ExactSums().grad_norm(with_gradients(tensors), norm_type) for tensors in (whole, parts[::-1]))
    assert found.equal(cut)
    flat = torch.cat([each.flatten() for each in whole]).double()
    assert found.item() == pytest.approx(torch.linalg.vector_norm(flat, norm_type).item(), rel=1e-6)


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_of_small_and_large_gradients(dtype, size):
    gradient = (values(300, 70) * size).to(dtype)
    found = ExactSums().grad_norm(with_gradients([gradient, torch.zeros(3, dtype=dtype)]))
    bound = 1e-9 if dtype == torch.float64 else 1e-6
    assert found.item() == pytest.approx(gradient.double().norm().item(), rel=bound)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_of_nothing_and_of_what_is_not_finite(norm_type):
    assert ExactSums().grad_norm(with_gradients([torch.zeros(3, 2), torch.zeros(0, 2)]), norm_type).item() == 0
    assert ExactSums().grad_norm([torch.nn.Parameter(torch.ones(2))], norm_type).item() == 0
    assert (
        ExactSums().grad_norm(with_gradients([torch.tensor([[1.0, -math.inf]]), torch.ones(2)]), norm_type).isposinf()
    )
    assert ExactSums().grad_norm(with_gradients([torch.tensor([math.nan, math.inf])]), norm_type).isnan()


def with_gradients(tensors: list[Tensor]) -> list[torch.nn.Parameter]:
    """Parameters whose gradients these are."""
    parameters = []
    for tensor in tensors:
        parameter = torch.nn.Parameter(torch.empty_like(tensor))
        parameter.grad = tensor
        parameters.append(parameter)
    return parameters


TYPES = torch.bfloat16, torch.float32, torch.float64


def assert_no_cut_changes_a_bit(dtype: torch.dtype, bounds: list[int], divisor: float | None, seed: int = 0) -> None:
    """Neither of weights nor of moments, after AdamW has updated the whole and the parts."""
    n, steps = bounds[-1], 4
    weights = values(n, seed=seed).to(dtype)
    gradients = [values(n, seed=seed + step + 1).to(dtype) for step in range(steps)]
    whole, cut = (updated(weights, gradients, each, divisor) for each in ([0, n], bounds))
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True)), (dtype, bounds, divisor)
    assert whole[2].any()


def updated(weights: Tensor, gradients: list[Tensor], bounds: list[int], divisor: float | None) -> list[Tensor]:
    """Weights and moments after AdamW has updated each part separately, each in its own memory; it skips some."""
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    named = [(f"{part}", torch.nn.Parameter(weights[part].clone()[None])) for part in parts]
    optimizer = build_optimizer(Optimizer(lr=1e-2), named, sums=ExactSums())
    for step, gradient in enumerate(gradients):
        for (_, parameter), part in zip(named, parts, strict=True):
            parameter.grad = gradient[part].clone()[None]
        skip = torch.tensor(1.0 if step % 3 == 1 else 0.0)
        optimizer.step(skip=skip, divisor=None if divisor is None else torch.tensor(divisor))
    states = [optimizer.state[parameter] for _, parameter in named]
    assert {int(state["step"]) for state in states} <= {len(gradients) - len(gradients) // 3}
    columns = [[parameter.detach() for _, parameter in named]]
    columns += [[state[key] for state in states] for key in ("exp_avg", "exp_avg_sq")]
    return [torch.cat([part[0] for part in column]) for column in columns]


@given(
    st.sampled_from(TYPES),
    st.integers(1, 300),
    st.lists(st.integers(0, 300), max_size=5),
    st.sampled_from([None, 1.0, 1.7]),
    st.integers(0, 9),
)
def test_an_exact_adamw_has_the_same_bits_wherever_a_shard_begins(dtype, n, cuts, divisor, seed):
    """torch's fused kernel computes the last elements of a tensor one by one, and rounds them differently."""
    assert_no_cut_changes_a_bit(dtype, [0, *sorted(cut % n for cut in cuts), n], divisor, seed)


ON_THIS_PROCESSOR = """
import random, sys, torch
from tests.unit.parallelisms.test_exact_sums import TYPES, assert_no_cut_changes_a_bit
assert torch.backends.cpu.get_cpu_capability() == sys.argv[1], torch.backends.cpu.get_cpu_capability()
dice = random.Random(0)
for case in range(36):
    torch.set_num_threads(1 + case % 4)
    n = dice.choice([dice.randrange(1, 100), dice.randrange(100, 5_000), dice.randrange(5_000, 70_000)])
    bounds = [0, *sorted(dice.randrange(n + 1) for _ in range(dice.randrange(6))), n]
    assert_no_cut_changes_a_bit(TYPES[case % 3], bounds, dice.choice([None, 1.7]), case)
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_an_exact_adamw_has_the_same_bits_in_vectors_of_any_size_on_any_number_of_threads(capability):
    """Brute force, as if on other processors."""
    if capability not in capabilities():
        pytest.skip(f"this processor has no {capability}")
    command = [sys.executable, "-c", ON_THIS_PROCESSOR, capability.upper()]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


def capabilities() -> list[str]:
    """Those of this processor, at most."""
    all_of_them = ["default", "avx2", "avx512"]
    here = torch.backends.cpu.get_cpu_capability().lower()
    return all_of_them[: all_of_them.index(here) + 1] if here in all_of_them else []


def test_the_exact_adamw_follows_the_fused_kernel_where_that_is_vectorized():
    """A tensor of whole vectors has the bits that torch's kernel gives it; so have the gradients, which it divides."""
    start, gradient = values(64), values(64, seed=1)
    found = []
    for sums in (ExactSums(), Sums()):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = build_optimizer(Optimizer(lr=1e-2), [("w", parameter)], sums=sums)
        parameter.grad = gradient.clone()
        optimizer.step(divisor=torch.tensor(1.7))
        found.append((parameter.detach(), parameter.grad, optimizer.state[parameter]["exp_avg_sq"]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    short = torch.nn.Parameter(start[:5].clone())
    optimizer = build_optimizer(Optimizer(lr=1e-2), [("w", short)], sums=ExactSums())
    short.grad = gradient[:5].clone()
    optimizer.step(divisor=torch.tensor(1.7))
    assert torch.equal(short.detach(), found[0][0][:5])
    assert torch.equal(short.grad, found[0][1][:5])


@given(st.integers(1, 9), st.integers(0, 3))
def test_a_rank_without_fsdp_adds_its_micro_batches_in_the_tree(n, seed):
    """Of a tied parameter, too; and one that is frozen has no gradient."""
    first, frozen = torch.nn.Linear(5, 3, bias=False), torch.nn.Linear(3, 5, bias=False)
    model = torch.nn.Sequential(first, frozen, first)
    reduction = TreeReduction(model)
    frozen.weight.requires_grad_(False)
    inputs = values(2, n, 4, 5, seed=seed)
    for of_step in inputs:
        leaves = []
        for i, x in enumerate(of_step):
            leaves.append(torch.autograd.grad(model(x).sum(), first.weight)[0])
            with reduction.of_micro_batch(is_last=i == n - 1):
                model(x).sum().backward()
            assert (first.weight.grad is None) == (i < n - 1)
        assert first.weight.grad.equal(tree(leaves))
        assert frozen.weight.grad is None
        first.weight.grad = None
