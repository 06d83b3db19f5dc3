"""Parameters that rest: against plain torch, and exactly on from checkpoints before and after they begin to train."""

from unittest.mock import patch

import pytest
import torch

from scripts.parity_compare import whole
from scripts.parity_rows import FROZEN, FROZEN_ENDS, freeze_rows, groups_of
from tests.distributed.test_owner_training import (
    CUT,
    MUON,
    ROUNDED,
    TWO_AT_ONCE,
    learner_of,
    manager_of,
    owners,
    settings,
    train,
)
from tests.distributed.test_parity import assert_parity
from trainer.step import Learner

ROWS = {row.name: row for row in freeze_rows()}
CHOSEN = [
    "frozen, FSDP 2 x TP 2, AdamW, eager",
    "frozen, PP 4, AdamW, eager",
    "frozen, HSDP 2x2, ZeRO 1, AdamW, compiled",
    "frozen, owner 2 x TP 2, Muon, eager",
    "frozen, tied, experts, EP 2 x TP 2, eager",
]
MIXED = ("--training.dtype", "float32", "--training.compute_dtype", "bfloat16", "--training.reduce_dtype", "float32")
RESTING = ("--optimizer.groups", groups_of(FROZEN))
TIED = ("--model.tie_embeddings", "true", "--optimizer.groups", groups_of({"embed*": FROZEN_ENDS["embed_tokens.*"]}))
STEPS = 6


@pytest.mark.long
@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_rows_in_float64(ranks, name):
    assert_parity(ranks, [ROWS[name]])


def run(words, first, last, folder, saves=()):
    """Losses of a launch from step `first` to before `last`, and this rank's final state."""
    learner = learner_of(settings((*TWO_AT_ONCE, *words), MIXED))
    manager = manager_of(folder)
    resumed = manager.resume(learner.state())
    assert (resumed is not None) == (first > 0)
    learner.was_loaded()
    manager.begin_lineage()

    def between_steps(step: int) -> None:
        if step in saves:
            manager.save(step, learner.state(), {"tokens": 1})
        learner.freeze(step)

    losses = train(learner, first, last, between_steps)
    learner.finish_update()
    if last in saves:
        manager.save(last, learner.state(), {"tokens": 1})
    manager.close()
    return losses, {name: tensor.clone() for name, tensor in _whole(learner).items()}


def _whole(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in learner.state().items()}


@pytest.mark.parametrize(
    ("n", "words"),
    [
        pytest.param(2, RESTING, marks=pytest.mark.long),
        pytest.param(2, (*owners(2, *MUON), *RESTING), marks=pytest.mark.slow),
        pytest.param(4, (*owners(2, *CUT, *ROUNDED), *RESTING), marks=pytest.mark.long),
        pytest.param(2, ("--mesh.pp", "2", *RESTING), marks=pytest.mark.slow),
        pytest.param(2, TIED, marks=pytest.mark.long),
    ],
    ids=["FSDP", "Muon", "owner x TP, masters", "PP", "tied"],
)
def test_stops_before_and_after_the_step_leave_no_trace(ranks, tmp_path, n, words):
    """In mixed precision: FSDP must reduce gradients of what begins to train in the type that it would have had."""
    straight = ranks(n, run, words, 0, STEPS, tmp_path / "straight")
    losses = []
    for first, last in ((0, 1), (1, 3), (3, 5), (5, STEPS)):  # 3 is the step itself
        results = ranks(n, run, words, first, last, tmp_path / "stopped", (last,))
        losses += results[0][0]
    assert losses == straight[0][0]
    for (_, found), (_, expected) in zip(results, straight, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def gradients_of_a_step(words):
    """Names of this rank's parameters that have gradients, the norm that is clipped, and that of those gradients."""
    learner = learner_of(settings(words))
    seen = {}

    def look(*_):
        seen.update({name: whole(p.grad) for name, p in learner.parameters.items() if p.grad is not None})

    learner.optimizer.register_step_pre_hook(look)
    norms = []
    with patch.object(Learner, "grad_norm", lambda self: norms.append(grad_norm(self)) or norms[-1]):
        train(learner, 0, 1)
    return sorted(seen), float(norms[0]), float(torch.nn.utils.get_total_norm(list(seen.values())))


grad_norm = Learner.grad_norm


def test_frozen_parameters_have_no_gradients_and_add_nothing_to_the_norm(ranks):
    words = (*RESTING, "--training.max_norm", "inf")
    [(names, found, expected), *_] = ranks(2, gradients_of_a_step, words)
    resting = ("embed_tokens", "layers.0.", "layers.1.", "layers.3.mlp", "norm")
    assert names
    assert not any(name.startswith(resting) for name in names)
    assert found == pytest.approx(expected, rel=1e-12)
