"""The order in which the ranks of a pipeline pass micro-batches, and when, if all work begins as soon as possible.

A pass begins when its rank is free and what it reads has come from the next or the previous stage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any, NamedTuple

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from configs.schema import Config
from configs.stages import stages_per_rank

FORWARD = "forward"
BACKWARD = "backward"
INPUTS = "backward, for inputs"
WEIGHTS = "backward, for weights"
_KINDS = {"FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD, "BACKWARD_INPUT": INPUTS, "BACKWARD_WEIGHT": WEIGHTS}
"""Kinds of work, by torch's names."""
_MOST_SIMULATED = 8
"""Ranks of a schedule that an estimate arranges."""
_TORCH_NAMES = {"interleaved_1f1b": "Interleaved1F1B", "zero_bubble_v": "ZBVZeroBubble"}


class Work(NamedTuple):
    """What a rank does at once."""

    kind: str
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Pass:
    """A piece of work, and when it is done."""

    work: Work
    start: float
    """Seconds since the first pass of the step."""
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


def orders(config: Config, micro_batches: int) -> list[list[Work]]:
    """What each rank does in a step, in the order of the schedule that runs."""
    if config.mesh.pp == 1:
        return [_of_one_stage(0, 1, micro_batches)]
    schedule = config.pipeline.schedule
    ranks = range(config.mesh.pp)
    if name := _TORCH_NAMES.get(schedule):
        return [
            _work(actions) for actions in get_schedule_ops(name, len(ranks), micro_batches, stages_per_rank(config))
        ]
    return [
        _of_one_stage(rank, micro_batches if schedule == "gpipe" else len(ranks) - rank, micro_batches)
        for rank in ranks
    ]


def _work(actions: Sequence[Any]) -> list[Work]:
    """The work among torch's actions."""
    named = [(_KINDS.get(each.computation_type.name), each) for each in actions if each]
    return [Work(kind, each.stage_index, each.microbatch_index) for kind, each in named if kind]


@cache
def zero_bubble_wait(ranks: int, micro_batches: int, forward: float, weights: float) -> float:
    """What a rank of `zero_bubble_v` waits in a step, in times that it works for a micro-batch.

    More than two micro-batches a rank add no wait. It grows as the ranks less one, so that the wait of many ranks is
    taken from that of a few.

    Args:
        ranks, micro_batches: how many.
        forward, weights: shares of forward passes and of those for the weights' gradients in a rank's work.
    """
    few = min(ranks, _MOST_SIMULATED)
    simulated = min(ceil(micro_batches * few / ranks), 2 * few)
    seconds = {FORWARD: forward / 2, INPUTS: (1 - forward - weights) / 2, WEIGHTS: weights / 2}
    seconds[BACKWARD] = seconds[INPUTS] + seconds[WEIGHTS]
    work = _zero_bubble_orders(few, simulated)
    owners = [*range(few), *reversed(range(few))]
    passes = arranged(work, lambda each: seconds[each.kind], 0.0, owners)
    end = max(of_rank[-1].end for of_rank in passes)
    return (end - simulated) * (ranks - 1) / max(few - 1, 1)


@cache
def _zero_bubble_orders(ranks: int, micro_batches: int) -> list[list[Work]]:
    return [_work(actions) for actions in get_schedule_ops(_TORCH_NAMES["zero_bubble_v"], ranks, micro_batches, 2)]


def _of_one_stage(rank: int, most: int, micro_batches: int) -> list[Work]:
    """Up to `most` forward passes, then a backward and a forward pass in turn, and the backward passes that are left.

    This is `ScheduleGPipe` and `Schedule1F1B`, of whose second torch 2.13 describes another order than it runs.
    """
    ahead = min(micro_batches, most)
    work = [Work(FORWARD, rank, n) for n in range(ahead)]
    for n in range(micro_batches):
        work.append(Work(BACKWARD, rank, n))
        work += [Work(FORWARD, rank, ahead + n)] if ahead + n < micro_batches else []
    return work


def arranged(
    orders: Sequence[Sequence[Work]], seconds: Callable[[Work], float], send: float, owners: Sequence[int]
) -> list[list[Pass]]:
    """Let every rank work in its order, each piece as soon as possible.

    Args:
        orders: of each rank.
        seconds: of a piece of work.
        send: seconds of a message between two ranks.
        owners: the rank of each stage.
    """
    done: dict[Work, Pass] = {}
    found: list[list[Pass]] = [[] for _ in orders]
    left = sum(map(len, orders))
    while left:
        for rank, work in enumerate(orders):
            while len(found[rank]) < len(work):
                each = work[len(found[rank])]
                needed = _needed(each, len(owners))
                if needed and not any(one in done for one in needed):
                    break
                start = found[rank][-1].end if found[rank] else 0.0
                for one in needed:
                    if one in done:
                        start = max(start, done[one].end + send * (owners[one.stage] != rank))
                done[each] = Pass(each, start, seconds(each))
                found[rank].append(done[each])
        before, left = left, sum(map(len, orders)) - sum(map(len, found))
        assert left < before, "the ranks wait for each other"
    return found


def _needed(work: Work, stages: int) -> list[Work]:
    """Work of which one piece must be done first: a backward pass is one piece or two."""
    if work.kind == FORWARD:
        return [Work(FORWARD, work.stage - 1, work.micro_batch)] if work.stage else []
    if work.kind == WEIGHTS:
        return [Work(INPUTS, work.stage, work.micro_batch)]
    if work.stage == stages - 1:
        return [Work(FORWARD, work.stage, work.micro_batch)]
    return [Work(kind, work.stage + 1, work.micro_batch) for kind in (BACKWARD, INPUTS)]
