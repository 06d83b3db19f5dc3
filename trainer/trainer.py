"""A job from its config to its last checkpoint: everything is built once, then the loop runs.

    runtime = Runtime(job, device, console, stop, ledger, watchdog)
    trainer = Trainer(runtime)
    state = trainer.train()         # "done", or "preempted" after a signal

Each part knows one thing: the loader which samples come next, the learner how to compute a step, `Progress` how far the
run has come, the checkpoint manager when and where to save, `Saver` what, the console what the user sees.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from configs.errors import mistakes_of_the_job
from configs.load import LoadedConfig
from parallelisms.guards.collective_waits import CollectiveWaits
from parallelisms.mesh import groups_of_axes
from parallelisms.ranges import named_range
from trainer.by_products import ByProducts
from trainer.data.loader import MicroBatch
from trainer.details import Details, Measured
from trainer.guards.copies import see_that_copies_are_equal
from trainer.guards.garbage import Garbage
from trainer.guards.grace import Grace
from trainer.guards.phases import Lag, Phase, PhaseClock
from trainer.guards.skipped_steps import report_skip
from trainer.guards.spikes import rewind_target
from trainer.guards.verdict import StepResult, Verdict
from trainer.lifecycle import State
from trainer.lr_schedule import learning_rate
from trainer.opening import Opened, Runtime
from trainer.proof.fingerprints import Fingerprints
from trainer.report.metrics import Kind, Memory, memory_counts, memory_of
from trainer.report.profile import StepProfiler
from trainer.report.step_records import StepRecords
from trainer.report.wall_clock import describe_launch
from trainer.saved_state import RunState
from trainer.saving import Finished, Saver
from trainer.step import Terms, build_learner
from trainer.validation import ValidationResult

# torch.compile compiles in the first step of a launch, and may compile again in the second.
COMPILING_STEPS = 2


@dataclass(frozen=True)
class Pending:
    """The last step, until its result is read."""

    verdict: Verdict
    lr: float
    micro_batches: list[MicroBatch]
    details: Measured | None


class Trainer:
    """Trains one job on one rank."""

    def __init__(self, runtime: Runtime, before_build: Callable[[Opened], None] = lambda opened: None) -> None:
        """Open the job, then build it on this rank's device, and load the checkpoint.

        The process group and the run folder must exist.

        Args:
            before_build: called when everything is checked and no weight is drawn yet.

        Raises:
            KeelError: the job, its data or its checkpoint is at fault; raised on all ranks.
        """
        opened = Opened(runtime)
        before_build(opened)
        config = opened.config
        mesh = opened.mesh
        self.config = config
        self.folder = config.job.folder
        self.mesh = mesh
        self.peak = opened.peak
        self.checkpoints = opened.checkpoints
        self.validation = opened.validation
        self.device = runtime.device
        self.console = runtime.console
        self.stop = runtime.stop
        self.ledger = runtime.ledger
        self.watchdog = runtime.watchdog
        self.rank = dist.get_rank()
        self.learner = build_learner(config, mesh)
        with mistakes_of_the_job():
            self._load(opened)
            self.progress = opened.progress
            self.loader = opened.loader
            self.checkpoints.begin_line()
            self.checkpoints.check_room(self.learner.state())
            self._open_records(runtime.job)
        self.saver = Saver(self.folder, self.checkpoints, self.learner, self.progress, self.fingerprints, self.console)
        waits = CollectiveWaits(groups_of_axes(mesh).values(), self.device)
        self.phases = PhaseClock(waits, config.fault.lag_ratio, mesh.sizes.pp > 1, COMPILING_STEPS)
        self.details = Details(config, self.learner)
        self.grace = Grace(self.stop, config.job.grace_seconds, self.console, self.device, config.job.timeout_seconds)
        self.reads_late = self.device.type == "cuda" and config.fault.spikes.action != "rewind"
        """Whether a step's result is read only when the next step's work is queued, so that the device never idles."""
        self.pending: Pending | None = None
        self.lag: Lag | None = None
        """Lag in the last window of steps, until it is logged."""
        self.is_stopping = False
        """Whether a rank was told to stop, as far as all ranks know."""
        self.compared_step: int | None = None
        """Step after which replicas were last compared."""
        self._save_is_due = False

    def _load(self, opened: Opened) -> None:
        """Load the checkpoint that was found, or the one to fall back to if its files turn out to be damaged."""
        saved = self.checkpoints.resume(self.learner.state())
        self.learner.was_loaded()  # also if only weights were loaded, from checkpoint.init_from
        if saved != opened.found:
            opened.begin_at(saved)

    def _open_records(self, job: LoadedConfig) -> None:
        """Open what this launch writes into the run folder besides its checkpoints."""
        config = self.config
        console = self.console
        incarnation = self.watchdog.incarnation
        gradients = self.learner.fingerprint
        axes = self.mesh.sizes.axes
        self.fingerprints = Fingerprints(job, gradients, axes, self.device, console.outages)
        launch = describe_launch(config, self.mesh, self.run.step, self.ledger, job.choice, incarnation)
        self.records = StepRecords(config, console, self.ledger, self.peak, launch, self.fingerprints, incarnation)
        committed = self.checkpoints.latest_step
        record = self.records.write_evaluation
        self.by_products = ByProducts(config, console, self.stop, self.watchdog, committed, record)
        self.by_products.open()
        stages = self.learner.stages.values()
        self.profiler = StepProfiler(config, self.folder, self.rank, self.device.type, self.run.step, stages)
        self.records.open(self.run, self.loader.state_dict()["next_sample"])

    def train(self) -> State:
        """Train up to `training.steps` or until a signal, then save."""
        try:
            return self._train()
        finally:
            self.records.flush()  # after an error, too

    def _train(self) -> State:
        last_step = self.config.training.steps
        on_gpu = self.device.type == "cuda"
        garbage = Garbage(COMPILING_STEPS)
        with self.grace, garbage, self.console.training(self.run.step, last_step, self.peak is not None, on_gpu):
            self._vote_to_stop()
            while self.step < last_step and not self.is_stopping:
                step = self._step()
                garbage.after_step()
                if self._is_awaited():
                    self._settle()
                if self.step < step:  # the run has gone back
                    continue
                self.checkpoints.poll()
                is_typical = self.step - self.progress.first_step > COMPILING_STEPS
                self.grace.check(self.checkpoints.save_seconds, is_typical)
                if self._should_save():
                    self._save()
                    self._vote_to_stop()  # saving may have taken long
                self.by_products.poll()
            self._settle()
            self._save()
            is_done = self.run.step >= last_step
            self.checkpoints.close()
        self.by_products.finish(is_done)
        self._close()
        return "done" if is_done else "preempted"

    # ----------------------------------------------------------------------- parts of a step

    @property
    def run(self) -> RunState:
        """The state of the run after the last step whose result was read."""
        return self.progress.run

    @property
    def step(self) -> int:
        """Steps completed, or queued on the device; `run.step` counts those whose result was read."""
        return self.run.step + (self.pending is not None)

    def _vote_to_stop(self, doing: str = "training") -> bool:
        """Learn whether any rank was told to stop. In training the ranks learn it with a step's result instead.

        All ranks stop after the same step, or in the same validation. A signal takes effect within one optimizer step
        (including compilation in a launch's first step; two where results are read late) or one validation batch,
        plus the save.
        """
        self.watchdog.step(self.step, doing)
        with self.phases.measure(Phase.OTHER):
            self.is_stopping |= bool(self.mesh.max_over_all(torch.tensor(int(bool(self.stop)))))
        return self.is_stopping

    def _step(self) -> int:
        """Queue the next step, and read the result of the last on the way; returns its number."""
        step = self.step
        lr = learning_rate(self.config.lr_schedule, self.config.optimizer.lr, step)
        first_step = self.progress.first_step
        compiling = self.config.compile.enable and step - first_step < COMPILING_STEPS
        self.watchdog.step(step)
        self.learner.freeze(step)
        self.profiler.before_step(step + 1)
        if compiling and step == first_step:
            self.console.line("compiling: the first step takes longer, up to minutes where nothing is cached yet")
        self.grace.computing(step, partial(self.saver.rescue, self._finished()))
        with self.ledger.step(compiling):
            with self.ledger.waiting_for_data(), self.phases.measure(Phase.DATA):
                micro_batches = next(self.loader)
            with self.phases.step(), self.details.watching(step + 1, micro_batches):
                verdict = self.learner.step(micro_batches, lr, self._terms, self._before_update)
        self.pending = Pending(verdict, lr, micro_batches, self.details.take())
        self._report_lag()
        return step + 1

    def _terms(self) -> Terms:
        """What a step is judged by, once its passes are queued: they keep the device busy while this waits for it."""
        if self.pending:
            self.watchdog.step(self.run.step)  # if the device hangs, it is in that step
        if is_traced := self._settle():
            self.details.begin_again()
        return Terms(self.progress.loss_limit, bool(self.stop), is_traced, self.run.step + 1)

    def _before_update(self) -> None:
        self.details.look_at_gradients()
        self.phases.updating()
        self.grace.updating()

    def _is_awaited(self) -> bool:
        """Whether the result of the last step must be read before the next begins."""
        due = map(self._is_due, (self.config.validation.interval, self.config.fault.compare_interval))
        return not self.reads_late or any(due)

    def _settle(self) -> bool:
        """Read the result of the last step, if it is not read yet, and do what is due after that step.

        Returns:
            Whether that computed a step again, which overwrote the gradients.
        """
        pending = self.pending
        self.pending = None
        is_traced = False
        if pending is None:
            return False
        result = pending.verdict.result()
        if result.skipped:
            with self.phases.measure(Phase.OTHER):
                is_traced = report_skip(result, self.progress, self.learner, pending.micro_batches, self.console)
        self.is_stopping |= result.is_stopping
        if result.is_spike and self._rewind(result):
            return is_traced
        self.fingerprints.record(self.run, result)
        self.progress.count(result)
        if self._is_due(self.config.fault.compare_interval):
            self._compare_copies()
        validation = self._validate() if self._is_due(self.config.validation.interval) else None
        is_due = self._is_due(self.config.metrics.interval) or self.run.step in (1, self.config.training.steps)
        if validation or is_due or pending.details or self.progress.has_unlogged_incidents:
            self._log(result, pending, validation)
        self.console.advance(self.run.step)
        return is_traced

    def _report_lag(self) -> None:
        lag = self.phases.finish_step()
        if lag:
            self.lag = lag
            complaint = self.phases.complaint(lag)
            if complaint and self.rank == 0:
                self.console.warning(f"step {self.step}: {complaint}")

    def _rewind(self, result: StepResult) -> bool:
        """Go back to a checkpoint from before a spike, but not in the data.

        The run keys alone decide which checkpoint: when others happen to be saved, as at a stop, must not change what
        the run learns. If the process is killed before the next checkpoint, the resumed run meets the same spike again.

        Returns:
            Whether there was a checkpoint to go back to.

        Raises:
            UserError: the run has gone back to that checkpoint too often.
        """
        to_step = rewind_target(self.config.fault.spikes, self.run.step, self.run.incidents, result.loss)
        if to_step is None:
            return False
        self.watchdog.step(self.run.step, "going back")
        with self.ledger.measure(Kind.CHECKPOINT), self.phases.measure(Phase.CHECKPOINT):
            if not self.checkpoints.can_rewind(to_step):
                return False
            self.by_products.finish(is_done=False)  # they may be reading checkpoints that the rewind moves
            saved = self.checkpoints.rewind(to_step, self.learner.state())
            self.learner.was_loaded()
        next_sample = self.loader.state_dict()["next_sample"]
        samples = [saved["data"]["next_sample"], next_sample - 1]
        self.progress.go_back(RunState(**saved["run"]), result.loss, samples)
        self.console.note(f"back to step {to_step}; samples {samples[0]} to {samples[1]} are skipped")
        # From here on, all is as if the run had been resumed there.
        self.compared_step = None
        self.profiler.finish()
        self.by_products.open()
        self.records.open(self.run, next_sample)
        return True

    def _compare_copies(self) -> None:
        """Check that replicated tensors are equal on all ranks, or heal them.

        Raises:
            UserError: they differ; nothing may be saved.
        """
        if self.compared_step == self.run.step:
            return
        self.watchdog.step(self.run.step, "comparing replicas")
        on_difference = self.config.fault.on_difference
        saved_step = self.checkpoints.latest_step()
        with self.ledger.measure(Kind.TRAINING), self.phases.measure(Phase.OTHER):
            healed = see_that_copies_are_equal(self.learner.copies(), on_difference, self.run.step, saved_step)
        self.compared_step = self.run.step
        if healed:
            self.console.warning(f"healed replicas that differed from the majority after step {self.run.step}:{healed}")
            self.progress.record("heal", tensors=[line.strip() for line in healed.strip().split("\n")])

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def _validate(self) -> ValidationResult | None:
        """Validate; returns None if a signal ends it early."""
        with self.ledger.measure(Kind.VALIDATION), self.phases.measure(Phase.OTHER):
            return self.validation.measure(self.learner, self.run.step, partial(self._vote_to_stop, "validation"))

    def _should_save(self) -> bool:
        """Whether to save now; a save that is due after a non-finite step waits for the next finite one."""
        self._save_is_due |= self.checkpoints.should_save(self.step)
        if self._save_is_due:
            self._settle()
        return self._save_is_due and self.progress.last_was_finite

    def _save(self) -> None:
        """Save the state of the run, unless replicas of it differ between ranks."""
        self._compare_copies()
        self.watchdog.step(self.run.step, "checkpoint")
        self.records.flush()
        with named_range("save"), self.ledger.measure(Kind.CHECKPOINT), self.phases.measure(Phase.CHECKPOINT):
            self.checkpoints.wait()
            self.by_products.poll()  # begin the export of the last checkpoint before this one replaces it
            self.saver.save(self._finished())
        self._save_is_due = False

    def _finished(self) -> Finished:
        """Return the current state of the run, between two steps."""
        verdict = self.pending.verdict if self.pending else None
        data = self.loader.state_dict()
        check_data = self.loader.check_unchanged
        return Finished(self.run, verdict, data, check_data, self.validation.loss_after(self.step))

    def _log(self, result: StepResult, pending: Pending, validation: ValidationResult | None) -> None:
        with self.phases.measure(Phase.OTHER):
            balance = self.learner.load_balance.measure()
            memory = self.memory()
        frozen = self.learner.frozen(self.run.step - 1)
        incidents = self.progress.take_incidents()
        details = pending.details.read() if pending.details else None
        measured = (memory, validation, balance, self.lag, details, incidents)
        self.records.write(self.run, result, pending.lr, frozen, *measured, writes_status=not self.grace.has_begun)
        self.lag = None

    def memory(self) -> Memory:
        """The largest memory use on any rank; all ranks must call it."""
        return memory_of(self.mesh.max_over_all(torch.tensor(memory_counts(self.device.type))).tolist())

    def _close(self) -> None:
        self.learner.finish_update()
        self.profiler.finish()
        self.loader.close()
        self.validation.close()
        self.records.close()
