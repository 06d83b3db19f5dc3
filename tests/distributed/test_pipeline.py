"""A pipeline against one process, in what the parity table does not hold: documents, validation, skips, memory."""

import logging
import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from configs.layout import accumulation_steps, mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from parallelisms.torch_internals import has_zero_bubble
from tests.marked import marked
from trainer.data.loader import IGNORED, MicroBatch
from trainer.guards.verdict import StepResult
from trainer.planning.memory import stages_in_flight
from trainer.step import Learner, build_learner

STEPS, BATCH, SEQ_LEN = 3, 8, 32
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", *(["zero_bubble_v"] if has_zero_bubble() else []))


def build(*overrides: str) -> Learner:
    config = load("parity.toml", overrides, dist.get_world_size()).config
    return build_learner(config, build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu")))


def micro_batches(step: int) -> list[MicroBatch]:
    """Windows of several documents, in which some targets do not count: of some micro-batches none."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(512, (BATCH, SEQ_LEN + 1), generator=generator)
    starts = torch.rand(BATCH, SEQ_LEN, generator=generator) < 0.1
    targets = tokens[:, 1:].masked_fill(torch.rand(BATCH, SEQ_LEN, generator=generator) < 0.3, IGNORED)
    targets[step] = IGNORED
    index = torch.arange(SEQ_LEN)
    positions = index - torch.where(starts, index, 0).cummax(1).values
    rows = (tokens[:, :-1], targets, positions, starts.cumsum(1))
    return [MicroBatch(*(tensor[i : i + 1] for tensor in rows), samples=[i]) for i in range(BATCH)]


def documents(*overrides: str) -> tuple[list[StepResult], torch.Tensor]:
    """What the steps found, and the (loss sum, tokens, bytes) of a validation between them."""
    learner = build(*overrides)
    results = [learner.step(micro_batches(0), 1e-3).result()]
    evaluated = learner.evaluate(micro_batches(STEPS)[:3], None)
    results += [learner.step(micro_batches(step), 1e-3).result() for step in range(1, STEPS)]
    return results, evaluated


@pytest.mark.parametrize("schedule", marked(SCHEDULES, slow=["gpipe", "1f1b"]))
def test_documents_and_validation(ranks, schedule):
    [(expected, evaluated)] = ranks(1, documents)
    assert all(not result.skipped for result in expected)
    tp = () if schedule != "1f1b" else ("--mesh.tp", "2")
    found = ranks(4 if tp else 2, documents, "--mesh.pp", "2", "--pipeline.schedule", schedule, *tp)
    assert all(result == found[0][0] for result, _ in found)
    for mine, theirs in zip(found[0][0], expected, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-12)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-12)
    for _, (loss_sum, tokens, _) in found:
        assert loss_sum.item() == pytest.approx(evaluated[0].item(), rel=1e-12)
        assert tokens == evaluated[1]


def objects_and_advice() -> tuple[int, list[str]]:
    """How many objects a rank exchanges in its first step, and what torch advises of a backend named NCCL."""
    advice: list[str] = []
    log = logging.Handler(logging.WARNING)
    log.emit = lambda record: advice.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch.distributed.pipelining._p2p")  # torch's logs do not reach the root
    logger.addHandler(log)
    with patch.object(dist, "get_backend", lambda *_: "nccl"):
        learner = build("--mesh.pp", "2")
    with patch.object(dist, "send_object_list") as sent, patch.object(dist, "recv_object_list") as received:
        learner.step(micro_batches(0), 1e-3).result()
    logger.removeHandler(log)
    return sent.call_count + received.call_count, advice


def test_stages_know_what_they_exchange(ranks):
    """On a GPU the host would wait for objects. Torch 2.15 says of every NCCL what holds for its new one."""
    assert ranks(2, objects_and_advice) == [(0, [])] * 2


def tied(*overrides: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """This rank's part of the tied matrix and of its moments after some steps, and the norms of the gradients."""
    learner = build("--model.tie_embeddings", "true", *overrides)
    norms = [learner.step(micro_batches(step), 1e-2).result().grad_norm for step in range(STEPS)]
    learner.finish_update()
    return {name: tensor for name, tensor in local_state(learner).items() if "embed_tokens" in name}, norms


@pytest.mark.parametrize(
    "more", [(), pytest.param(("--mesh.tp", "2"), marks=pytest.mark.slow), ("--fsdp.partition", "owner")], ids=str
)
def test_both_ends_hold_the_same_bits_of_a_tied_matrix(ranks, more):
    n = 4 if "--mesh.tp" in more else 2
    ends = ranks(n, tied, "--mesh.pp", "2", *more)
    first, last = ends[: n // 2], ends[n // 2 :]
    [(_, expected)] = ranks(1, tied)
    for (mine, norms), (theirs, _) in zip(first, last, strict=True):
        assert mine.keys() == theirs.keys() >= {"model.embed_tokens.weight", "optimizer.embed_tokens.weight.exp_avg"}
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert norms == pytest.approx(expected, rel=1e-12)


def poisoned(stage: int) -> tuple[bool, bool, bool]:
    """A step with one weight of one stage not a number: whether it was skipped, changed nothing, and knew the norm."""
    learner = build("--mesh.pp", "2")
    if learner.mesh.pp.get_local_rank() == stage:
        weight = next(iter(learner.parameters.values())).to_local()
        weight.detach().view(-1)[0] = math.nan
    before = local_state(learner)
    result = learner.step(micro_batches(0), 1e-3).result()
    after = local_state(learner)
    same = all(torch.equal(before[name], after[name]) for name in before)
    return result.skipped, same, math.isnan(result.grad_norm)


def local_state(learner: Learner) -> dict[str, torch.Tensor]:
    state = {name: getattr(tensor, "to_local", lambda t=tensor: t)() for name, tensor in learner.state().items()}
    return {name: tensor.detach().nan_to_num(1e9) for name, tensor in state.items()}


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_that_is_not_finite_on_one_stage_is_skipped_on_all(ranks, stage):
    assert ranks(2, poisoned, stage) == [(True, True, True)] * 2


def parameter_names(*overrides: str) -> list[str]:
    return list(build(*overrides).parameters)


def test_stages_share_out_the_parameters(ranks):
    [whole] = ranks(1, parameter_names)
    for schedule in SCHEDULES:
        first, second = ranks(2, parameter_names, "--mesh.pp", "2", "--pipeline.schedule", schedule)
        assert not set(first) & set(second)
        assert set(first) | set(second) == set(whole)
        assert "embed_tokens.weight" in first
        assert ("lm_head.weight" in first) == (schedule == "zero_bubble_v")


def optimizer_groups(pattern: str) -> list[int]:
    settings = f"[{{pattern = '{pattern}', lr_scale = 0.5}}]"
    learner = build("--mesh.pp", "2", "--optimizer.groups", settings)
    return [len(group["params"]) for group in learner.optimizer.param_groups if group["lr_scale"] == 0.5]


def test_an_optimizer_group_may_lie_on_one_stage(ranks):
    assert ranks(2, optimizer_groups, "lm_head.weight") == [[], [1]]


def in_flight(schedule: str, micro_batch: int) -> tuple[int, int]:
    """The most passes through a stage that wait for their backward pass on this rank: counted, and estimated."""
    settings = ("--mesh.pp", str(dist.get_world_size()), "--training.micro_batch_size", str(micro_batch))
    learner = build(*settings, "--model.n_layers", "8", "--pipeline.schedule", schedule)
    rank, waiting, most = learner.mesh.pp.get_local_rank(), 0, 0
    for action in learner.passes._schedule.pipeline_order[rank]:
        kind = action.computation_type.value if action else ""
        waiting += {"F": 1, "B": -1, "I": -1}.get(kind, 0)
        most = max(most, waiting)
    sizes = learner.mesh.sizes
    return most, stages_in_flight(learner.config, rank, accumulation_steps(learner.config, sizes))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("n", "micro_batch"), [(2, 1), (2, 4), (4, 1), (4, 2)])
def test_the_estimate_knows_how_many_micro_batches_are_in_flight(ranks, schedule, n, micro_batch):
    fills = schedule != "zero_bubble_v" or BATCH // micro_batch >= 2 * n  # else the estimate is an upper bound
    for counted, estimated in ranks(n, in_flight, schedule, micro_batch):
        assert counted == estimated if fills else counted <= estimated
