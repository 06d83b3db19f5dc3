"""muP at the base's width: the same bits as without, in training."""

import pytest
import torch

from tests.distributed.test_owner_training import learner_of, settings, train, weights

MUON = ("--optimizer.name", "muon", "--optimizer.split_heads", "true")
BASE = ("--model.mup_base_dim", "64")
FLOAT32 = ("--training.dtype", "float32", "--training.compute_dtype", "float32", "--training.reduce_dtype", "float32")
STEPS = 3


def trained(words):
    """The losses and the weights of a run."""
    learner = learner_of(settings(words, FLOAT32))
    return train(learner, 0, STEPS), weights(learner)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [(), MUON], ids=["adamw", "muon"])
def test_the_base_trains_as_without(ranks, optimizer):
    words = (*optimizer, "--model.tie_embeddings", "true", "--training.micro_batch_size", "4")
    (losses, plain), (same_losses, same) = (ranks(2, trained, (*words, *more))[0] for more in ((), BASE))
    assert same_losses == losses
    assert all(torch.equal(same[name], value) for name, value in plain.items())
    other_losses, _ = ranks(2, trained, (*words, "--model.mup_base_dim", "32"))[0]
    assert other_losses != losses
