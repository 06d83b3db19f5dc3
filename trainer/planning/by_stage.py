"""What each stage of a run takes, in memory and in time; a run without stages has one.

Stages that take the same, such as those that differ in their learning rate, are estimated once.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from configs.layout import mesh_sizes, scheduled_steps
from configs.load import LoadedConfig
from configs.run_stages import steps_of_stages
from configs.schema import Config
from trainer.planning.by_memory import Choice, with_choice
from trainer.planning.devices import Device
from trainer.planning.memory import MemoryEstimate, estimates_by_kind
from trainer.planning.step_time import StepTime, estimate_step

_Estimate = TypeVar("_Estimate")


@dataclass(frozen=True)
class StagePlan:
    """A stage and its estimates."""

    number: int
    """Counted from 1."""
    first_step: int
    steps: int
    """Steps of the run that are its."""
    config: Config
    by_kind: Mapping[int, MemoryEstimate]
    """The memory of each kind of rank, by a rank of the pipeline."""
    step: StepTime | None
    """None if no device was named."""

    @property
    def memory(self) -> MemoryEstimate:
        """The memory of the rank that holds the most."""
        return max(self.by_kind.values(), key=lambda each: each.device)


@dataclass(frozen=True)
class RunTime:
    """The estimate of a run."""

    steps: int
    tokens: int
    seconds: float
    gpu_hours: float


def plan_stages(
    job: LoadedConfig, choice: Choice | None, ranks: int, device: Device | None, gpus_per_host: int
) -> list[StagePlan]:
    """Estimate the stages that the run reaches.

    Args:
        job: the job.
        choice: what `activation_checkpoint.memory_limit_gib` chooses for all of them.
        ranks: how many the job shall run on.
        device: the kind of GPU, or a CPU; None: no time is estimated, and memory of a GPU.
        gpus_per_host: as for `estimate_step`.
    """
    device_type = device.type if device else "cuda"
    memory_of = _once(lambda config: estimates_by_kind(config, mesh_sizes(config, ranks), device_type))

    def estimated(config: Config) -> StepTime | None:
        return estimate_step(config, ranks, device, gpus_per_host) if device else None

    step_of = _once(estimated)
    found = []
    for number, (stage, steps) in enumerate(zip(with_choice(job, choice).stages, run_lengths(job), strict=True), 1):
        if steps:
            config = stage.config
            found.append(StagePlan(number, stage.first_step, steps, config, memory_of(config), step_of(config)))
    return found


def run_lengths(job: LoadedConfig) -> list[int]:
    """Steps of each stage. A run without stages is as long as its schedule, though this job may train a part of it."""
    steps = job.config.training.steps if job.later_stages else scheduled_steps(job.config)
    return steps_of_stages(job.stages, steps)


def run_time(stages: Iterable[tuple[int, StepTime]]) -> RunTime:
    """Add up the stages of a run: the steps of each, and one of them, with the waits for data and saves."""
    steps = 0
    tokens = 0
    seconds = 0.0
    gpu_hours = 0.0
    for n, step in stages:
        steps += n
        tokens += n * step.tokens
        seconds += n * step.seconds_with_waits
        gpu_hours += n * step.seconds_with_waits * step.ranks / 3600
    return RunTime(steps, tokens, seconds, gpu_hours)


def _once(estimate: Callable[[Config], _Estimate]) -> Callable[[Config], _Estimate]:
    """An estimate that is made once for all stages that take the same."""
    made: dict[str, _Estimate] = {}

    def of_stage(config: Config) -> _Estimate:
        key = repr((config.model, config.training, config.data, config.optimizer.groups))
        if key not in made:
            made[key] = estimate(config)
        return made[key]

    return of_stage
