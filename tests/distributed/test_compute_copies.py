"""A single rank that computes with copies of its parameters, against FSDP at degree 1: the same bits."""

from contextlib import closing

import pytest
import torch

from parallelisms.torch_internals import fsdp_modules
from scripts.parity import dtype_overrides
from scripts.parity_rows import FROZEN, MOE_BIAS, groups_of, words
from tests.distributed.test_moving_run import go_on
from tests.distributed.test_owner_training import MUON, OWNER, learner_of, settings
from tests.distributed.test_parity import ROWS, assert_parity
from trainer.data.loader import build_loader
from trainer.details import Details
from trainer.guards.trace_nonfinite import trace_nonfinite
from trainer.step import Learner, Terms

MIXED = (*dtype_overrides("bfloat16"), "--training.micro_batch_size", "4")
FSDP = ("--fsdp.reshard_after_forward", "always")
STEPS = 4
SPIKE = 2
JOBS = {
    "every detail": ("--metrics.details_interval", "1", "--metrics.fingerprint", "true"),
    "tied": ("--model.tie_embeddings", "true"),
    "one micro-batch": ("--training.micro_batch_size", "8"),
    "experts": words(MOE_BIAS),
    "frozen at first": ("--optimizer.groups", groups_of(FROZEN)),
    "selective checkpointing": ("--activation_checkpoint.mode", "selective"),
    "documents": ("--data.document_mask", "true"),
    "Muon": (*OWNER, *MUON),
    "compiled": ("--compile.enable", "true", "--activation_checkpoint.mode", "full"),
    "experts, compiled": ("--compile.enable", "true", *words(MOE_BIAS)),
}


def build(overrides: tuple[str, ...]) -> Learner:
    learner = learner_of(settings(overrides, MIXED))
    copied = not {FSDP[0], "--fsdp.owner_broadcast_dtype"} & set(overrides)
    assert (learner.compute_copies is not None) == copied == (not fsdp_modules(learner.stages[0]))
    return learner


def run(overrides):
    """What some steps and validations gave, one of them a spike that is skipped, and the state after them."""
    learner, seen = build(overrides), []
    details = Details(learner.config, learner)
    with closing(build_loader(learner.config, 0, 1, start_sample=0)) as loader:
        for step, micro_batches in zip(range(STEPS), loader, strict=False):
            learner.freeze(step)
            terms = Terms(loss_limit=0.0 if step == SPIKE else float("inf"), step=step)
            with details.watching(step + 1, micro_batches):
                verdict = learner.step(micro_batches, 1e-2, lambda terms=terms: terms, details.look_at_gradients)
            result, measured = verdict.result(), details.take()
            assert result.skipped == (step == SPIKE)
            sums = None if result.gradient_sums is None else result.gradient_sums.tolist()
            seen += [result.loss, result.grad_norm, sums, measured.read() if measured else None]
            seen += learner.evaluate(micro_batches, None).tolist()
    return seen, {name: getattr(tensor, "_local_tensor", tensor).clone() for name, tensor in learner.state().items()}


@pytest.mark.parametrize("name", JOBS)
def test_the_bits_are_those_of_fsdp_at_degree_1(ranks, name):
    ways = ((), ("--fsdp.owner_broadcast_dtype", "bfloat16")) if name == "Muon" else ((), FSDP)
    [(seen, state)], [(expected, expected_state)] = (ranks(1, run, (*JOBS[name], *way)) for way in ways)
    assert seen == expected
    assert state.keys() == expected_state.keys()
    for key, tensor in state.items():
        assert tensor.dtype == expected_state[key].dtype
        assert torch.equal(tensor, expected_state[key]), key


def test_a_run_moves_to_two_ranks_and_back(ranks, tmp_path):
    """Between launches with and without copies nothing differs: the checkpoints have the same tensors."""
    losses = {}
    for name, way in (("copies", ()), ("FSDP", FSDP)):
        folder, keys = str(tmp_path / name), (*MIXED, *way, "--fault.compare_interval", "1")
        losses[name] = [
            ranks(1, go_on, folder, 2, keys),
            ranks(2, go_on, folder, 3, (*keys, "--mesh.dp_shard", "2")),
            ranks(1, go_on, folder, 5, keys),
        ]
    assert losses["copies"] == losses["FSDP"]


def trace(overrides):
    """What is said of a weight that is too large, and of one whose products are."""
    learner, said = build(overrides), []
    with closing(build_loader(learner.config, 0, 1, start_sample=0)) as loader:
        micro_batches = next(loader)
    for value in (3e38, float("nan")):
        weight = learner.parameters["layers.1.mlp.up_proj.weight"]
        with torch.no_grad():
            getattr(weight, "_local_tensor", weight).fill_(value)
        learner.was_loaded()
        assert learner.step(micro_batches, 1e-3).result().skipped
        said.append(trace_nonfinite(learner, micro_batches))
        assert all(p.grad is None for p in learner.parameters.values())
    return said


def test_a_value_that_is_not_finite_is_named_alike(ranks):
    said, expected = (ranks(1, trace, way) for way in ((), FSDP))
    assert said == expected
    assert "is in the weight layers.1.mlp.up_proj.weight" in said[0][1]
    assert "layers.1.mlp" in said[0][0]


def test_rows_of_one_process_in_bfloat16(ranks):
    names = ("1 process, none, eager, accumulation 1", "1 process, selective, eager, accumulation 2")
    assert_parity(ranks, [ROWS[name] for name in names], "bfloat16")
