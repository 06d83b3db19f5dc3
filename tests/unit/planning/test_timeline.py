"""Micro-batches pass the stages in the schedules' order, and take as long as the formulas of their papers say."""

from itertools import pairwise

import pytest

from configs.stages import n_stages, rank_of_stage
from tests.unit.planning.test_step_time import H100, job
from trainer.planning.timeline import BACKWARD, FORWARD, INPUTS, WEIGHTS, arranged, orders, timeline

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
    return arranged(orders(config, micro_batches), [ONE] * total, 0.0, owners), total


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


def test_a_jobs_passes_are_its_layers_time():
    config = pipeline("1f1b")
    passes = timeline(config, 4, H100)
    assert len(passes) == 4
    durations = {each.seconds for each in passes[1] if each.work.kind == FORWARD}
    assert len(durations) == 1
    head = [next(each for each in of_rank if each.work.kind == FORWARD).seconds for of_rank in passes]
    assert head[3] > head[1]  # the loss
    assert passes[1][0].start > passes[0][0].end  # a message takes time
