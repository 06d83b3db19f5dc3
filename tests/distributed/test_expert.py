"""Experts on their own mesh: the exchange of rows against the same experts on one rank, and who holds what."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from parallelisms.expert import apply_expert_parallel

N_EXPERTS, DIM, ROWS = 8, 4, 6  # rows of each rank


class Experts(nn.Module):
    """Each expert a matrix of its own, applied by a loop."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(N_EXPERTS, DIM, DIM, generator=generator, dtype=torch.float64))

    def forward(self, rows, counts):
        parts = rows.split(counts.tolist())
        weights = self.local(self.weight)
        assert len(parts) == len(weights)
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)]).tanh()


class Model(nn.Module):
    class plan:
        experts = ("experts",)

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.experts.local = lambda parameter: parameter


def rows_of(rank: int) -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.float64)


def counts_of(choices: list[list[int]], rank: int) -> torch.Tensor:
    return torch.tensor(choices[rank]).bincount(minlength=N_EXPERTS)


def exchanged(choices: list[list[int]]):
    """This rank's results, gradient of its rows, and of its experts."""
    rank = dist.get_rank()
    model = Model()
    apply_expert_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    rows = rows_of(rank).requires_grad_()
    out = model.experts(rows, counts_of(choices, rank))
    out.pow(2).sum().backward()
    weight = model.experts.weight
    assert isinstance(weight, DTensor) and weight.placements == (Shard(0),) and weight.shape[0] == N_EXPERTS
    return out.detach(), rows.grad, weight.grad.full_tensor()


CHOICES = {  # experts of each rank's rows, ascending
    "some experts get nothing": [[0, 0, 1, 3, 6, 6], [0, 1, 1, 1, 3, 7], [1, 1, 3, 3, 3, 3], [0, 0, 6, 6, 6, 7]],
    "one rank gets everything": [[2, 2, 2, 2, 2, 2]] * 4,
    "only the last expert, and each its own": [[7] * 6, [0] * 6, [2] * 6, [7] * 6],
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_rows_come_back_from_their_experts(ranks, name, n_ranks):
    choices = CHOICES[name]
    model = Model()
    whole = [rows_of(rank).requires_grad_() for rank in range(n_ranks)]
    expected = [model.experts(rows, counts_of(choices, rank)) for rank, rows in enumerate(whole)]
    torch.stack(expected).pow(2).sum().backward()
    for rank, (out, by_rows, by_weight) in enumerate(ranks(n_ranks, exchanged, choices)):
        torch.testing.assert_close(out, expected[rank].detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(by_rows, whole[rank].grad, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(by_weight, model.experts.weight.grad, rtol=1e-13, atol=1e-13)
