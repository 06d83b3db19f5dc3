"""A teacher's lesson against plain PyTorch on whole logits: softcaps, biases, several chunks, z-loss."""

import pytest
import torch
import torch.nn.functional as F

from configs.schema import Distillation
from trainer import loss
from trainer.distillation import Divergence, States
from trainer.loss import CrossEntropy


def capped(logits, softcap):
    return softcap * torch.tanh(logits / softcap)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("z_loss_weight", [0.0, 0.01])
def test_gradients_in_chunks_are_those_of_whole_logits(monkeypatch, weight, z_loss_weight):
    monkeypatch.setattr(loss, "_CPU_CHUNK_BYTES", 1)
    monkeypatch.setattr(loss, "_MIN_CHUNK_ROWS", 3)
    generator = torch.Generator().manual_seed(1)
    sizes = [(1, 7, 4), (10, 4), (10,), (7, 3), (10, 3), (10,)]
    made = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    hidden, head, bias = (leaf.requires_grad_() for leaf in made[:3])
    taught, teachers_head, beside = made[3:]
    targets = torch.tensor([[1, 9, -100, 4, 5, 0, 7]])
    table = Distillation(teacher="x", weight=weight, temperature=1.5)
    seen = []
    lesson = Divergence(States(taught, teachers_head, beside, 3.0, None), table, seen.append)
    found = CrossEntropy(z_loss_weight)(hidden, head, targets, None, bias, 2.0, lesson)
    found.backward()
    ours = [leaf.grad.clone() for leaf in made[:3]]
    for leaf in made[:3]:
        leaf.grad = None
    logits = capped(hidden.flatten(0, 1) @ head.T + bias, 2.0)
    teachers = capped(taught @ teachers_head.T + beside, 3.0)
    valid = targets.flatten() >= 0
    text = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    cool, theirs = ((each / 1.5).log_softmax(-1)[valid] for each in (logits, teachers))
    divergence = F.kl_div(cool, theirs, reduction="sum", log_target=True)
    z_loss = logits.logsumexp(-1)[valid].square().sum()
    ((1 - weight) * text + weight * 1.5**2 * divergence + z_loss_weight * z_loss).backward()
    assert found.item() == pytest.approx(text.item(), rel=1e-12)
    assert seen[0].tolist() == pytest.approx([divergence.item(), 6], rel=1e-12)
    for mine, leaf in zip(ours, made[:3], strict=True):
        torch.testing.assert_close(mine, leaf.grad, rtol=1e-10, atol=1e-12)
