"""What looks after a launch while it trains: watchdog, grace time, clocks, profiler, and Python's garbage collector."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from configs.schema import Config
from parallelisms.guards.collective_waits import CollectiveWaits
from parallelisms.mesh import groups_of_axes
from trainer.guards.garbage import Garbage
from trainer.guards.grace import Grace, Rescue
from trainer.guards.phases import Lag, Phase, PhaseClock
from trainer.opening import Runtime
from trainer.report.metrics import Kind
from trainer.report.profile import StepProfiler
from trainer.step import Learner

# torch.compile compiles in the first step of a launch, and may compile again in the second.
COMPILING_STEPS = 2


class Watch:
    """Looks after one launch; every rank has one, and all make the same calls."""

    def __init__(self, runtime: Runtime, config: Config, learner: Learner, first_step: int) -> None:
        """`first_step`: steps completed before this launch."""
        self._console = runtime.console
        self._watchdog = runtime.watchdog
        self._ledger = runtime.ledger
        self._compiles = config.compile.enable
        self._first_step = first_step
        device = learner.mesh.device
        waits = CollectiveWaits(groups_of_axes(learner.mesh).values(), device)
        self.phases = PhaseClock(waits, learner.mesh.sizes.pp > 1, COMPILING_STEPS)
        self.grace = Grace(runtime.stop, config.job.grace_seconds, self._console, device, config.job.timeout_seconds)
        stages = learner.stages.values()
        self.profiler = StepProfiler(config, config.job.folder, dist.get_rank(), device.type, first_step, stages)
        self._garbage = Garbage(COMPILING_STEPS)
        self._lag: Lag | None = None

    @contextmanager
    def training(self) -> Iterator[None]:
        """Save in the middle of long steps, and collect garbage between steps only, inside this context."""
        with self.grace, self._garbage:
            yield

    def begin_stage(self, number: int) -> None:
        """Note that step `number` may compile again, for sequences of another length."""
        self._first_step = number - 1

    def go_back(self, n_steps: int) -> None:
        """Note that the next step is `n_steps` before the one that would have followed: nothing compiles again."""
        self._first_step -= n_steps

    def begin(self, number: int, rescue: Rescue) -> None:
        """Begin step `number`; until `updating`, `rescue` saves the state after the step before."""
        self._watchdog.step(number - 1)
        self.profiler.before_step(number)
        if self._compiles and number == self._first_step + 1:
            self._console.line("compiling: the first step takes longer, up to minutes where nothing is cached yet")
        self.grace.computing(number - 1, rescue)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Count step `number`, which runs inside this context."""
        is_compiling = self._compiles and not self.is_typical(number)
        with self._ledger.step(is_compiling), self.phases.step():
            yield
        if lag := self.phases.finish_step():
            self._lag = lag
            complaint = self.phases.complaint(lag)
            if complaint and dist.get_rank() == 0:
                self._console.warning(f"step {number}: {complaint}")
        self._garbage.after_step()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count, inside `step`, a wait for the loader."""
        with self._ledger.waiting_for_data(), self.phases.measure(Phase.DATA):
            yield

    def updating(self) -> None:
        """Note, inside `step`, that the tensors are about to change; waits while they are being saved."""
        self.phases.updating()
        self.grace.updating()

    @contextmanager
    def during(self, step: int, what: str, kind: Kind) -> Iterator[None]:
        """Count other work between two steps, after `step` of them."""
        self._watchdog.step(step, what)
        phase = Phase.CHECKPOINT if kind is Kind.CHECKPOINT else Phase.OTHER
        with self._ledger.measure(kind), self.phases.measure(phase):
            yield

    def is_typical(self, step: int) -> bool:
        """Whether nothing is compiled any more in step number `step`."""
        return step - self._first_step > COMPILING_STEPS

    def take_lag(self) -> Lag | None:
        """The lag in the last window of steps, once."""
        lag = self._lag
        self._lag = None
        return lag
