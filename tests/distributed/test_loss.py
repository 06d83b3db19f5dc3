"""The loss over a vocabulary that is cut over ranks, against one process that holds all of it."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives

from trainer import loss as loss_module
from trainer.data.loader import IGNORED
from trainer.loss import CrossEntropy

VOCAB = 48
Z_LOSS_WEIGHT = 0.1


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 12, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, 6, generator=generator, dtype=torch.float64)
    weight[::2] *= 30  # logits far apart, so that a rank's own maximum is not the group's
    targets = torch.randint(VOCAB, (2, 12), generator=generator)
    targets[0, :5] = IGNORED
    return hidden, weight, targets


def _all_ranks() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()].clone()


def _whole() -> tuple[torch.Tensor, ...]:
    hidden, weight, targets = _inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    loss = CrossEntropy(Z_LOSS_WEIGHT)(hidden, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss / 11, (hidden, weight))


def _sharded(compiled: bool) -> tuple[torch.Tensor, ...]:
    """Loss, the sum over ranks of the hidden states' gradients, and the gradient of this rank's rows."""
    hidden, weight, targets = _inputs()
    rows = _own_part(weight).requires_grad_()
    hidden.requires_grad_()
    cross_entropy = partial(CrossEntropy(Z_LOSS_WEIGHT, compile=compiled), targets=targets, group=_all_ranks())
    with pytest.MonkeyPatch.context() as monkeypatch:  # chunks of at most 5 tokens: 24 in five parts, one shorter
        monkeypatch.setattr(loss_module, "_MIN_CHUNK_ROWS", 1)
        monkeypatch.setattr(loss_module, "_CPU_CHUNK_BYTES", 5 * 8 * len(rows))
        loss = cross_entropy(hidden, rows)
        with torch.no_grad():
            assert cross_entropy(hidden, rows) == loss
    grad_hidden, grad_rows = torch.autograd.grad(loss / 11, (hidden, rows))
    dist.all_reduce(grad_hidden)
    return loss.detach(), grad_hidden, grad_rows


def _from_a_collective_under_way() -> torch.Tensor:
    """Gradient of this rank's rows for hidden states that are still being gathered."""
    hidden, weight, targets = _inputs()
    gathered = functional_collectives.all_gather_tensor(_own_part(hidden), 0, _all_ranks())
    assert isinstance(gathered, functional_collectives.AsyncCollectiveTensor)
    rows = _own_part(weight).requires_grad_()
    loss = CrossEntropy(Z_LOSS_WEIGHT, compile=True)(gathered, rows, targets, group=_all_ranks())
    return torch.autograd.grad(loss / 11, rows)[0]


@pytest.mark.parametrize(("n", "compiled"), [(2, False), (4, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_sharded_vocabulary_equals_the_whole(ranks, n: int, compiled: bool):
    loss, grad_hidden, grad_weight = _whole()
    results = ranks(n, _sharded, compiled)
    for rank, (rank_loss, rank_grad_hidden, grad_rows) in enumerate(results):
        assert torch.equal(rank_loss, results[0][0])
        torch.testing.assert_close(rank_loss, loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rank_grad_hidden, grad_hidden, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad_rows, grad_weight.chunk(n)[rank], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_hidden_states_still_being_gathered(ranks):
    grad_weight = _whole()[2]
    for rank, grad_rows in enumerate(ranks(2, _from_a_collective_under_way)):
        torch.testing.assert_close(grad_rows, grad_weight.chunk(2)[rank], rtol=1e-12, atol=1e-12)
