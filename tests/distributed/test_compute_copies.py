"""A single rank that computes with copies of its parameters, kept or transient: the bits of FSDP at degree 1."""

from contextlib import AbstractContextManager, closing, nullcontext

import pytest
import torch
from torch._dynamo.utils import counters

from parallelisms.torch_internals import fsdp_modules
from scripts.parity import dtype_overrides
from scripts.parity_rows import FROZEN, MOE_BIAS, groups_of, words
from tests.distributed.test_moving_run import go_on
from tests.distributed.test_owner_training import MUON, OWNER, learner_of, settings
from tests.distributed.test_parity import ROWS, assert_parity
from tests.fsdp_at_degree_1 import fsdp_at_degree_1
from tests.marked import marked
from trainer.data.loader import build_loader
from trainer.details import Details
from trainer.guards.trace_nonfinite import trace_nonfinite
from trainer.step import Learner

MIXED = (*dtype_overrides("bfloat16"), "--training.micro_batch_size", "4")
WAYS = {
    # what converts: keys
    "kept": (),
    "transient": ("--fsdp.reshard_after_forward", "always"),
    "FSDP": ("--fsdp.reshard_after_forward", "always"),
}
STEPS = 4
SPIKE = 2
ALWAYS_FROZEN = dict.fromkeys(("embed_tokens.*", "layers.0.*", "layers.2.mlp.*"), "freeze = true")
JOBS = {
    "every detail": ("--metrics.details_interval", "1", "--metrics.fingerprint", "true"),
    "tied": ("--model.tie_embeddings", "true"),
    "one micro-batch": ("--training.micro_batch_size", "8"),
    "four micro-batches, z-loss": ("--training.micro_batch_size", "2", "--training.z_loss_weight", "1e-3"),
    "experts": words(MOE_BIAS),
    "frozen at first": ("--optimizer.groups", groups_of(FROZEN)),
    "selective checkpointing": ("--activation_checkpoint.mode", "selective"),
    "full checkpointing": ("--activation_checkpoint.mode", "full"),
    "checkpointing of every second block": (
        *("--activation_checkpoint.mode", "full", "--activation_checkpoint.every_nth_layer", "2"),
    ),
    "documents": ("--data.document_mask", "true"),
    "Muon": (*OWNER, *MUON),
    "compiled": ("--compile.enable", "true", "--activation_checkpoint.mode", "full"),
    "experts, compiled": ("--compile.enable", "true", *words(MOE_BIAS)),
    "nothing repeated, compiled": ("--compile.enable", "true"),
    "tied, selective, compiled": (
        *("--compile.enable", "true", "--activation_checkpoint.mode", "selective"),
        *("--model.tie_embeddings", "true"),
    ),
    "frozen, compiled": ("--compile.enable", "true", "--optimizer.groups", groups_of(ALWAYS_FROZEN)),
}


def converting(by: str) -> AbstractContextManager:
    return fsdp_at_degree_1() if by == "FSDP" else nullcontext()


def build(by: str, overrides: tuple[str, ...]) -> Learner:
    """A learner whose parameters are converted by one of `WAYS`."""
    with converting(by):
        learner = learner_of(settings((*overrides, *WAYS[by]), MIXED))
    copies = learner.optimizer.copies
    assert by == ("FSDP" if copies is None else "kept" if copies.kept else "transient")
    assert bool(fsdp_modules(learner.stages[0])) == (by == "FSDP")
    return learner


def assert_freed(by: str, learner: Learner) -> None:
    """Between steps no transient copy has memory, unless it is frozen; all kept ones have."""
    if by != "FSDP":
        copies = [copy for stage in learner.stages.values() for copy in stage.parameters() if copy.requires_grad]
        assert {bool(copy.untyped_storage().size()) for copy in copies} == {by == "kept"}


def run(by, overrides):
    """What some steps and validations gave, one of them a spike that is skipped, and the state after them."""
    learner, seen = build(by, overrides), []
    details = Details(learner.config, learner)
    with closing(build_loader(learner.config, 0, 1, start_sample=0)) as loader:
        for step, micro_batches in zip(range(STEPS), loader, strict=False):
            learner.freeze(step)
            limit = 0.0 if step == SPIKE else float("inf")
            with details.watching(step + 1, micro_batches):
                gradients = learner.gradients(micro_batches)
            queued = learner.judge(micro_batches, gradients, limit, number=step, details=details.numbers())
            learner.update(queued, 1e-2)
            assert_freed(by, learner)
            result = queued.result()
            assert result.skipped == (step == SPIKE)
            sums = None if result.gradient_sums is None else result.gradient_sums.tolist()
            seen += [
                result.loss,
                result.grad_norm,
                sums,
                None if result.details is None else details.read(result.details),
            ]
            seen += learner.evaluate(micro_batches, None).tolist()
            assert_freed(by, learner)
    return seen, {name: getattr(tensor, "_local_tensor", tensor).clone() for name, tensor in learner.state().items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    marked(
        JOBS,
        slow=[
            "every detail",
            "tied",
            "one micro-batch",
            "four micro-batches, z-loss",
            "selective checkpointing",
            "full checkpointing",
            "checkpointing of every second block",
            "documents",
        ],
        long=[
            "nothing repeated, compiled",
            "experts",
            "compiled",
            "experts, compiled",
            "tied, selective, compiled",
            "frozen, compiled",
        ],
    ),
)
def test_the_bits_are_those_of_fsdp_at_degree_1(ranks, name):
    [[(expected, expected_state)], *found] = (ranks(1, run, by, JOBS[name]) for by in ("FSDP", "kept", "transient"))
    for [(seen, state)] in found:
        assert seen == expected
        assert state.keys() == expected_state.keys()
        for key, tensor in state.items():
            assert tensor.dtype == expected_state[key].dtype
            assert torch.equal(tensor, expected_state[key]), key


def graphs(by):
    """How many graphs were compiled when one step was done, and when three were."""
    learner, found = build(by, ("--compile.enable", "true")), []
    counters.clear()
    with closing(build_loader(learner.config, 0, 1, start_sample=0)) as loader:
        for _, micro_batches in zip(range(3), loader, strict=False):
            learner.step(micro_batches, 1e-3)
            found.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    return found


@pytest.mark.slow
def test_nothing_is_compiled_again_when_memory_comes_and_goes(ranks):
    [kept], [transient] = (ranks(1, graphs, by) for by in ("kept", "transient"))
    assert kept == transient
    assert kept[0] == kept[2] > 0


def go_on_by(by, *arguments):
    with converting(by):
        return go_on(*arguments)


@pytest.mark.long
def test_a_run_moves_to_two_ranks_and_back(ranks, tmp_path):
    """Between launches with and without copies nothing differs: the checkpoints have the same tensors."""
    losses = {}
    for by, way in WAYS.items():
        folder, keys = str(tmp_path / by), (*MIXED, *way, "--fault.compare_interval", "1")
        losses[by] = [
            ranks(1, go_on_by, by, folder, 2, keys),
            ranks(2, go_on, folder, 3, (*keys, "--mesh.dp_shard", "2")),
            ranks(1, go_on_by, by, folder, 5, keys),
        ]
    assert losses["kept"] == losses["transient"] == losses["FSDP"]


def trace(by):
    """What is said of a weight that is too large, and of one whose products are."""
    learner, said = build(by, ()), []
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
    kept, transient, said = (ranks(1, trace, by) for by in WAYS)
    assert kept == transient == said
    assert "is in the weight layers.1.mlp.up_proj.weight" in said[0][1]
    assert "layers.1.mlp" in said[0][0]


def test_rows_of_one_process_in_bfloat16(ranks):
    names = ("1 process, none, eager, accumulation 1", "1 process, selective, eager, accumulation 2")
    assert_parity(ranks, [ROWS[name] for name in names], "bfloat16")
