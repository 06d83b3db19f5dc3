"""When each rank of a pipeline passes each micro-batch: the passes in the schedule's order, and as long as its layers.

A pass begins when its rank is free and what it reads has come from the next or the previous stage. Sends take the time
of their bytes. FSDP's collectives and the update are not in it, so it is the part of a step between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from configs.layout import accumulation_steps, mesh_sizes
from configs.schema import Config
from configs.stages import layers_of_stages, n_stages, rank_of_stage, stages_per_rank
from trainer.planning.devices import Device
from trainer.planning.step_time import rank_of

FORWARD = "forward"
BACKWARD = "backward"
INPUTS = "backward, for inputs"
WEIGHTS = "backward, for weights"
_KINDS = {"FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD, "BACKWARD_INPUT": INPUTS, "BACKWARD_WEIGHT": WEIGHTS}
"""Kinds of work, by torch's names."""
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


def timeline(config: Config, ranks: int, device: Device, gpus_per_host: int = 8) -> list[list[Pass]]:
    """The passes of a step on each rank of the pipeline, in the order in which it makes them."""
    sizes = mesh_sizes(config, ranks)
    micro_batches = accumulation_steps(config, sizes)
    send = rank_of(config, ranks, device, gpus_per_host).send_seconds
    stages = range(n_stages(config))
    seconds = [_seconds_of_stage(config, ranks, device, gpus_per_host, stage) for stage in stages]
    return arranged(orders(config, micro_batches), seconds, send, [rank_of_stage(config, stage) for stage in stages])


def orders(config: Config, micro_batches: int) -> list[list[Work]]:
    """What each rank does in a step, in the order of the schedule that runs."""
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
    orders: Sequence[Sequence[Work]], seconds: Sequence[dict[str, float]], send: float, owners: Sequence[int]
) -> list[list[Pass]]:
    """Let every rank work in its order, each piece as soon as possible.

    Args:
        orders: of each rank.
        seconds: of each stage, by kind of work.
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
                needed = _needed(each, len(seconds))
                if needed and not any(one in done for one in needed):
                    break
                start = found[rank][-1].end if found[rank] else 0.0
                for one in needed:
                    if one in done:
                        start = max(start, done[one].end + send * (owners[one.stage] != rank))
                done[each] = Pass(each, start, seconds[each.stage][each.kind])
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


def _seconds_of_stage(config: Config, ranks: int, device: Device, gpus_per_host: int, stage: int) -> dict[str, float]:
    """Seconds of a stage's passes of a micro-batch, by kind of work.

    Of a backward pass, half of the products are for the weights, in which a zero-bubble schedule splits it.
    """
    rank = rank_of(config, ranks, device, gpus_per_host, rank_of_stage(config, stage))
    passes = [rank.pass_of(layer) for layer in layers_of_stages(config)[stage]]
    head = sum(rank.head().values()) if stage == n_stages(config) - 1 else 0.0
    backward = sum(sum(each.values()) for _, each in passes)
    weights = sum(each.get("products", 0.0) for _, each in passes) / 2
    forward = sum(sum(each.values()) for each, _ in passes) + head
    return {FORWARD: forward, BACKWARD: backward, INPUTS: backward - weights, WEIGHTS: weights}
