"""Micro-batches pass the stages in the schedules' order, and take as long as the formulas of their papers say."""

from itertools import pairwise

import pytest

from configs.stages import n_stages, rank_of_stage
from tests.unit.planning.test_step_time import H100, job
from trainer.planning.pipeline_order import (
    BACKWARD,
    FORWARD,
    INPUTS,
    WEIGHTS,
    arranged,
    orders,
    zero_bubble_wait,
)
from trainer.planning.step_time import estimate_step, rank_of
from trainer.planning.timeline import GATHERS, REDUCES, UPDATE, timeline

ONE = {FORWARD: 1.0, BACKWARD: 2.0, INPUTS: 1.0, WEIGHTS: 1.0}
SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("zero_bubble_v", 2),
]


def pipeline(schedule, stages=1, pp=4):
    words = f"--mesh.pp {pp} --pipeline.schedule {schedule} --activation_checkpoint.mode full --compile.enable false"
    if schedule.startswith("interleaved"):
        words += f" --pipeline.stages_per_rank {stages}"
    return job("llama_8b.toml", pp, words)


def simulated(schedule, stages, micro_batches, pp=4):
    config = pipeline(schedule, stages, pp)
    total = n_stages(config)
    owners = [rank_of_stage(config, stage) for stage in range(total)]
    return arranged(orders(config, micro_batches), lambda work: ONE[work.kind], 0.0, owners), total


@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
def test_every_stage_passes_every_micro_batch_once_and_in_order(schedule, stages):
    passes, total = simulated(schedule, stages, micro_batches=8)
    ends = {}
    for of_rank in passes:
        for before, after in pairwise(of_rank):
            assert after.start >= before.end
        for each in of_rank:
            kind, stage, micro_batch = each.work
            assert (kind, stage, micro_batch) not in ends
            ends[kind, stage, micro_batch] = each
    for stage in range(total):
        for n in range(8):
            whole = ends.get((BACKWARD, stage, n))
            backward = whole or ends[INPUTS, stage, n]
            assert (whole is None) == ((WEIGHTS, stage, n) in ends)
            assert backward.start >= ends[FORWARD, stage, n].end
            if stage:
                assert ends[FORWARD, stage, n].start >= ends[FORWARD, stage - 1, n].end
                earlier = ends.get((BACKWARD, stage - 1, n)) or ends[INPUTS, stage - 1, n]
                assert earlier.start >= backward.end
            if whole is None:
                assert ends[WEIGHTS, stage, n].start >= backward.end


@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
def test_it_lasts_as_long_as_the_bubbles_formula_says(schedule, stages):
    """(m + (p - 1) / v) passes of all of a rank's stages; a zero bubble's rank waits for the first forwards alone."""
    passes, _ = simulated(schedule, stages, micro_batches=16)
    last = max(of_rank[-1].end for of_rank in passes)
    busy = 16 * 3 * stages
    if schedule == "zero_bubble_v":
        assert busy < last < busy + 3 * 3 / 2
    else:
        assert last == busy + 3 * 3


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 3), (4, 16), (8, 20), (16, 40)])
def test_a_zero_bubbles_wait_is_that_of_the_whole_schedule(pp, micro_batches):
    """Of stages whose passes take equally long; of more than 8 ranks it is scaled."""
    passes, stages = simulated("zero_bubble_v", 2, micro_batches, pp)
    assert stages == 2 * pp
    waits = max(of_rank[-1].end for of_rank in passes) / (2 * 3) - micro_batches
    assert zero_bubble_wait(pp, micro_batches, 1 / 3, 1 / 3) == pytest.approx(waits)


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("llama_1b.toml", 1, ""),
        ("llama_8b.toml", 8, ""),
        ("llama_8b.toml", 16, "--mesh.dp_replicate 2 --mesh.tp 2 --fsdp.zero_stage 2 --fsdp.accumulate reduce_last"),
        ("llama_8b.toml", 16, "--mesh.pp 4"),
        ("llama_8b.toml", 8, "--mesh.pp 4 --pipeline.schedule gpipe"),
        ("llama_8b.toml", 8, "--mesh.pp 4 --pipeline.schedule interleaved_1f1b"),
        (
            *("llama_8b.toml", 8),
            "--mesh.pp 4 --pipeline.schedule zero_bubble_v --compile.enable false --activation_checkpoint.mode full",
        ),
        ("deepseek_v3.toml", 1024, ""),
    ],
)
def test_the_step_lasts_as_long_as_its_estimate(name, ranks, words):
    """The bubble's formula takes all ranks to be like the slowest, so that pipelines end a little apart.

    In gpipe, all forward passes wait for the rank with the head, and all backward passes for another.
    """
    config = job(name, ranks, words)
    estimated = estimate_step(config, ranks, H100)
    tolerance = 1e-9 if config.mesh.pp == 1 else 0.1 if config.pipeline.schedule == "gpipe" else 0.01
    lasts = max(line.passes[-1].end for line in timeline(config, ranks, H100))
    assert lasts == pytest.approx(estimated.seconds, rel=tolerance)


def test_fsdp_works_beside_passes_and_the_update_comes_when_all_ranks_are_done():
    """A pipeline gathers in the first micro-batch, and reduces in each; its gradients wait for the last."""
    config = job("llama_8b.toml", 16, "--mesh.pp 4")
    lines = timeline(config, 16, H100)
    done = max(line.passes[-2].end for line in lines)
    for place, line in enumerate(lines):
        rank = rank_of(config, 16, H100, 8, place)
        update = line.passes[-1]
        assert (update.work.kind, update.start, update.seconds) == (UPDATE, done, rank.optimizer_seconds)
        by_kind = {
            kind: [each for each in line.fsdp if each.work.kind == kind and each.seconds > 0]
            for kind in (GATHERS, REDUCES)
        }
        for kind, of_kind in by_kind.items():
            asked = sum(getattr(each, kind.split()[1]) for of_micro in rank.schedule() for each in rank.fsdp(*of_micro))
            assert sum(each.seconds for each in of_kind) == pytest.approx(asked)
        passes = {(each.work.kind, each.work.micro_batch): each for each in line.passes}
        for each in by_kind[GATHERS]:
            beside = passes[FORWARD, each.work.micro_batch]
            assert each.work.micro_batch == 0
            assert (each.start, each.end <= beside.end + 1e-9) == (beside.start, True)
        for each in by_kind[REDUCES]:
            beside = passes[BACKWARD, each.work.micro_batch]
            assert beside.start <= each.start
            assert each.end <= beside.end + 1e-9


def test_a_jobs_passes_are_its_layers_time():
    config = pipeline("1f1b")
    lines = timeline(config, 4, H100)
    assert len(lines) == 4
    first, *durations = [each.seconds for each in lines[1].passes if each.work.kind == FORWARD]
    assert len({*durations}) == 1
    assert first > durations[0]  # it copies parameters to the compute type
    head = [next(each for each in line.passes if each.work.kind == FORWARD).seconds for line in lines]
    assert head[3] > head[1]  # the loss
    assert lines[1].passes[0].start > lines[0].passes[0].end  # a message takes time
