"""A single rank that computes with copies of its parameters, against FSDP at degree 1: the same bits."""

from contextlib import closing

import pytest
import torch

from parallelisms.torch_internals import fsdp_modules
from scripts.parity import dtype_overrides
from scripts.parity_rows import FROZEN, MOE_BIAS, groups_of, words
from tests.distributed.test_owner_training import learner_of, settings
from trainer.data.loader import build_loader
from trainer.details import Details
from trainer.step import Learner, Terms

MIXED = dtype_overrides("bfloat16")
FSDP = ("--fsdp.reshard_after_forward", "always")
STEPS = 5
DETAILS = ("--metrics.details_interval", "1", "--metrics.fingerprint", "true")
JOBS = {
    "two ends, every detail": DETAILS,
    "tied": ("--model.tie_embeddings", "true"),
    "one micro-batch": ("--training.micro_batch_size", "8"),
    "experts": words(MOE_BIAS),
    "frozen at first": ("--optimizer.groups", groups_of(FROZEN)),
    "selective checkpointing": ("--activation_checkpoint.mode", "selective"),
    "documents": ("--data.document_mask", "true"),
    "compiled": ("--compile.enable", "true", "--activation_checkpoint.mode", "full"),
    "experts, compiled": ("--compile.enable", "true", *words(MOE_BIAS)),
}


def build(overrides: tuple[str, ...]) -> Learner:
    learner = learner_of(settings(overrides, MIXED))
    copied = FSDP[0] not in overrides
    assert (learner.compute_copies is not None) == copied == (not fsdp_modules(learner.stages[0]))
    return learner


def run(overrides):
    """What some steps and validations gave, the fourth step a spike that is skipped, and the state after them."""
    learner = build(overrides)
    details, seen = Details(learner.config, learner), []
    with closing(build_loader(learner.config, 0, 1, start_sample=0)) as loader:
        for step, micro_batches in zip(range(STEPS), loader, strict=False):
            learner.freeze(step)
            limit = 0.0 if step == 3 else float("inf")
            with details.watching(step + 1, micro_batches):
                verdict = learner.step(micro_batches, 1e-2, lambda: Terms(limit, step=step), details.look_at_gradients)  # noqa: B023
            result, measured = verdict.result(), details.take()
            assert result.skipped == (step == 3)
            seen += [result.loss, result.grad_norm, measured.read() if measured else None]
            seen += learner.evaluate(micro_batches, None).tolist()
    return seen, {name: tensor.detach().clone() for name, tensor in whole_state(learner).items()}


def whole_state(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in learner.state().items()}


@pytest.mark.parametrize("name", JOBS)
def test_the_bits_are_those_of_fsdp_at_degree_1(ranks, name):
    [(seen, state)], [(expected, expected_state)] = (ranks(1, run, (*JOBS[name], *how)) for how in ((), FSDP))
    assert seen == expected
    assert state.keys() == expected_state.keys()
    for key, tensor in state.items():
        assert tensor.dtype == expected_state[key].dtype
        assert torch.equal(tensor, expected_state[key]), key
