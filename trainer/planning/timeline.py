"""When each rank of a pipeline passes each micro-batch, gathers and reduces by FSDP, and updates: a picture of a step.

A job without a pipeline is one rank. Passes come in the schedule's order, and are as long as their layers and what FSDP
adds to them: what it does not hide, its copies, and slower products beside it. Then the ranks agree on the gradient's
norm, so all of them update when the last is done. Waits for the host and for data are not in it.
"""

from dataclasses import dataclass
from functools import cached_property

from configs.layout import accumulation_steps, mesh_sizes
from configs.schema import Config
from configs.stages import layers_of_stages, n_stages, rank_of_stage, stages_of_rank
from trainer.planning.devices import Device
from trainer.planning.pipeline_order import BACKWARD, FORWARD, INPUTS, WEIGHTS, Pass, Work, arranged, orders
from trainer.planning.step_time import BesidePass, Rank, rank_of, weights_seconds

GATHERS = "FSDP gathers"
REDUCES = "FSDP reduces"
UPDATE = "update"


@dataclass(frozen=True)
class RankLine:
    """A step of one rank of the pipeline."""

    passes: list[Pass]
    """Its passes in their order, and the update."""
    fsdp: list[Pass]
    """FSDP's collectives, which begin with the pass that they run beside; empty without FSDP."""


@dataclass(frozen=True)
class _Stage:
    """A stage's passes of a micro-batch, in seconds, without FSDP."""

    forward: float
    backward: float
    weights: float
    """The part of the backward pass that is for the weights' gradients."""


def timeline(config: Config, ranks: int, device: Device, gpus_per_host: int = 8) -> list[RankLine]:
    """The step on each rank of the pipeline."""
    sizes = mesh_sizes(config, ranks)
    places = [_Place(config, rank_of(config, ranks, device, gpus_per_host, place)) for place in range(sizes.pp)]
    owners = [rank_of_stage(config, stage) for stage in range(n_stages(config))]
    work = orders(config, accumulation_steps(config, sizes))
    send = places[0].rank.send_seconds
    passes = arranged(work, lambda each: places[owners[each.stage]].seconds(each), send, owners)
    end = max(of_rank[-1].end for of_rank in passes)
    return [place.line(of_rank, end) for place, of_rank in zip(places, passes, strict=True)]


@dataclass(frozen=True)
class _Place:
    """A rank of the pipeline."""

    config: Config
    rank: Rank

    def line(self, passes: list[Pass], end: float) -> RankLine:
        """The rank's step, which updates at `end`."""
        update = Pass(Work(UPDATE, 0, 0), end, self.rank.optimizer_seconds)
        fsdp = [each for one in passes for each in self._beside(one)]
        return RankLine([*passes, update], fsdp)

    def seconds(self, work: Work) -> float:
        """Seconds of a pass, with what FSDP adds to it."""
        stage = self._stages[work.stage]
        alone = {
            FORWARD: stage.forward,
            BACKWARD: stage.backward,
            INPUTS: stage.backward - stage.weights,
            WEIGHTS: stage.weights,
        }
        return alone[work.kind] * self._stretch(work)

    def _stretch(self, work: Work) -> float:
        """How much longer a pass takes with FSDP: the rank's stages share what it adds, as their time."""
        is_forward = work.kind == FORWARD
        beside = self._fsdp[work.micro_batch][0 if is_forward else 1]
        added = beside.exposed + beside.copies + beside.hidden * self.rank.device.collective_share
        both = zip(*((sum(ahead.values()), sum(back.values())) for ahead, back in self.rank.passes), strict=True)
        whole = [sum(each) for each in both][0 if is_forward else 1]
        return (whole + added) / self._whole(is_forward)

    def _whole(self, is_forward: bool) -> float:
        return sum(each.forward if is_forward else each.backward for each in self._stages.values())

    def _beside(self, each: Pass) -> list[Pass]:
        """FSDP's collectives beside a pass; gathers come first."""
        work = each.work
        if work.kind == INPUTS:  # the weights' gradients are reduced
            return []
        is_forward = work.kind == FORWARD
        beside = self._fsdp[work.micro_batch][0 if is_forward else 1]
        stage = self._stages[work.stage]
        share = (stage.forward if is_forward else stage.backward) / self._whole(is_forward)
        found = []
        start = each.start
        for kind, seconds in ((GATHERS, beside.gathers), (REDUCES, beside.reduces)):
            if seconds:
                found.append(Pass(Work(kind, work.stage, work.micro_batch), start, share * seconds))
                start = found[-1].end
        return found

    @cached_property
    def _fsdp(self) -> list[tuple[BesidePass, BesidePass]]:
        """FSDP beside the passes of each micro-batch."""
        return [self.rank.fsdp(*each) for each in self.rank.schedule()]

    @cached_property
    def _stages(self) -> dict[int, _Stage]:
        return {stage: self._stage(stage) for stage in stages_of_rank(self.config, self.rank.place)}

    def _stage(self, stage: int) -> _Stage:
        passes = [self.rank.pass_of(layer) for layer in layers_of_stages(self.config)[stage]]
        head = sum(self.rank.head().values()) if stage == n_stages(self.config) - 1 else 0.0
        forward = sum(sum(ahead.values()) for ahead, _ in passes) + head
        backward = sum(sum(back.values()) for _, back in passes)
        return _Stage(forward, backward, sum(weights_seconds(back) for _, back in passes))
