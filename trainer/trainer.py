"""A job from its config to its last checkpoint: everything is built once, then the loop runs.

    runtime = Runtime(job, device, console, stop, ledger, watchdog)
    trainer = Trainer(runtime)
    state = trainer.train()         # "done", or "preempted" after a signal

Each part knows one thing: the loader which samples come next, the learner how to compute a step, `Progress` how far the
run has come, the checkpoint manager when and where to save, `Saver` what, `Watch` where the time goes and whether a
rank hangs, the console what the user sees.

A step is queued on the device, and its result is read later: on a GPU when the next step's gradients are queued, so
that the device always has work, elsewhere at once. All that depends on a result happens where it is read.
"""

from collections.abc import Callable
from functools import partial

import torch

from configs.errors import UserError, mistakes_of_the_job
from configs.load import LoadedConfig
from configs.run_stages import stage_of
from parallelisms.ranges import named_range
from trainer.commands import Commands
from trainer.data.fork import forked_position
from trainer.data.loader import MicroBatch, merge_state_dicts
from trainer.details import Details
from trainer.guards.agreement import on_all_ranks
from trainer.guards.phases import Phase
from trainer.guards.replicas import check_replicas
from trainer.guards.skipped_steps import report_skip
from trainer.guards.spikes import rewind_target
from trainer.guards.verdict import QueuedStep, StepResult
from trainer.lifecycle import State
from trainer.lr_schedule import learning_rate_of
from trainer.opening import Opened, Runtime, open_loader
from trainer.proof.fingerprints import Fingerprints
from trainer.report.beside_plan import BesidePlan
from trainer.report.console import Console
from trainer.report.metrics import Kind, Memory, memory_counts, memory_of
from trainer.report.step_records import StepRecords
from trainer.report.wall_clock import WallClock, describe_launch
from trainer.saved_state import RunState, too_many_skipped
from trainer.saving import Saver
from trainer.step import build_learner
from trainer.validation import ValidationResult
from trainer.watch import Watch


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
        self.runtime = runtime
        self.config = opened.config
        self.checkpoints = opened.checkpoints
        self.learner = build_learner(opened.config, opened.mesh, [stage.config for stage in opened.stages[1:]])
        with mistakes_of_the_job():
            self._load(opened)
            self.validation = opened.validation
            self.progress = opened.progress
            self.loader = opened.loader
            self.stages = opened.stages
            self.stage = opened.stage
            if self.stage is not self.stages[0]:
                self.config = self.stage.config
                self.learner.begin_stage(self.config)
            self.checkpoints.begin_lineage()
            self.checkpoints.check_memory(self.learner.state())
            self.watch = Watch(runtime, self.config, self.learner, self.run.step)
            self._open_records(runtime.job, opened.peak)
        self.details = Details(self.config, self.learner)
        is_rewound = self.config.fault.spikes.action == "rewind"
        self.reads_late = runtime.device.type == "cuda" and not is_rewound
        """Whether a step's result is read only when the next step's work is queued, so that the device never idles."""
        self.last: QueuedStep | None = None
        """The last step, until its result is read."""
        self.awaits_validation = False
        """Whether a stop has ended the validation after the last step, which the next launch repeats."""

    def _load(self, opened: Opened) -> None:
        """Load the checkpoint that was found, or the one to fall back to if its files turn out to be damaged."""
        saved = self.checkpoints.resume(self.learner.state())
        self.learner.was_loaded()  # also if only weights were loaded, from checkpoint.init_from
        if saved != opened.found:
            opened.begin_at(saved)

    def _open_records(self, job: LoadedConfig, peak: float | None) -> None:
        """Open what this launch writes into the run folder."""
        config = self.config
        ledger = self.runtime.ledger
        watchdog = self.runtime.watchdog
        incarnation = watchdog.incarnation
        mesh = self.learner.mesh
        fingerprints = Fingerprints(job, self.learner.fingerprint, mesh.sizes.axes, mesh.device, self.console.outages)
        wall_clock = WallClock(ledger, describe_launch(config, mesh, self.run.step, ledger, job.choice, incarnation))
        plan = BesidePlan(mesh)
        self.records = StepRecords(config, self.console, ledger, peak, wall_clock, plan, fingerprints, incarnation)
        committed = self.checkpoints.latest_step
        record = self.records.write_evaluation
        self.commands = Commands(config, self.console, self.runtime.stop, watchdog, committed, record)
        self.commands.open()
        self.records.open(self.run, self.loader.state_dict())
        self.checkpoints.repeated = self.records.repeated_validations
        self.saver = Saver(
            config.job.folder,
            self.checkpoints,
            self.commands,
            self.learner,
            self.progress,
            self.validation,
            fingerprints,
            self.console,
        )

    def train(self) -> State:
        """Train up to `training.steps` or until a signal, then save."""
        try:
            return self._train()
        finally:
            self.records.flush()  # after an error, too

    def _train(self) -> State:
        n_steps = self.config.training.steps
        on_gpu = self.runtime.device.type == "cuda"
        knows_peak = self.records.peak is not None
        with self.watch.training(), self.console.training(self.run.step, n_steps, knows_peak, on_gpu):
            self._vote_to_stop()
            self._repeat_validation()
            while self.step < n_steps and not self.progress.is_stopping:
                number = self.step + 1
                self._enter_stage(number)
                self.learner.freeze(self.step)
                self.watch.begin(number, self.saver.rescuer(self.last, self.loader))
                with self.watch.step(number):
                    with self.watch.waiting_for_data():
                        batch = next(self.loader)
                    gradients = self._gradients(number, batch)
                    # Now the device has work. The result of the last step, if it is not read yet, is waited for.
                    is_overwritten = self._read_result()
                    if is_overwritten:
                        gradients = self._gradients(number, batch)
                    step = self._judge(number, batch, gradients)
                    self.watch.updating()  # waits while a signal has the state saved in the middle of this step
                    self.learner.update(step, self._learning_rate(number))
                    self.learner.update_average(number, step.skip)
                    self.last = step
                if self._is_awaited(number):
                    self._read_result()
                    if self.step < number:  # the run has gone back to before a spike
                        continue
                self.checkpoints.poll()
                self.watch.grace.check(self.checkpoints.save_seconds, self.watch.is_typical(number))
                if self._should_save():
                    self._save()
                    self._vote_to_stop()  # saving may have taken long
                self.commands.poll()
            self._read_result()
            self._save()
            is_done = self.run.step >= n_steps and not self.awaits_validation
            with self.runtime.ledger.measure(Kind.CHECKPOINT):
                self.checkpoints.close()
        with self.runtime.ledger.measure(Kind.CHECKPOINT):
            self.commands.finish(is_done)
        # Whether a stop has ended commands, as the first rank knows.
        are_left = bool(self.learner.mesh.max_over_all(torch.tensor(int(self.commands.are_left))))
        if is_done and not are_left and self.config.checkpoint.after_save:
            self.checkpoints.prune()  # no save comes that removes what commands have kept until now
        self._close()
        return "done" if is_done and not are_left else "preempted"

    @property
    def run(self) -> RunState:
        """The state of the run after the last step whose result was read."""
        return self.progress.run

    @property
    def step(self) -> int:
        """Steps completed, or queued on the device; `run.step` counts those whose result was read."""
        return self.run.step + (self.last is not None)

    @property
    def console(self) -> Console:
        """What the user sees."""
        return self.runtime.console

    def _enter_stage(self, number: int) -> None:
        """Go on with the keys of the stage of step `number`; the model and the optimizer's state stay as they are."""
        stage = stage_of(self.stages, number)
        if stage is self.stage:
            return
        self._read_result()
        with self.watch.during(self.run.step, "the data of the next stage", Kind.PREPARATION), mistakes_of_the_job():
            position = merge_state_dicts(on_all_ranks(self.loader.state_dict))
            position = forked_position(position, self.config.model_dump(mode="json"), stage.config)
            self.loader.close()
            self.loader = open_loader(stage.config, self.learner.mesh, position)
            self.validation.begin_stage(stage.config)
        self.learner.begin_stage(stage.config)
        self.progress.config = stage.config
        self.records.config = stage.config
        self.watch.begin_stage(number)
        self.stage = stage
        self.config = stage.config
        self.console.line(f"step {number} begins stage {self.stages.index(stage) + 1}: {stage}")

    # ----------------------------------------------------------------------- a step is queued

    def _gradients(
        self, number: int, batch: list[MicroBatch], in_buffers: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the passes of step `number`."""
        with self.details.watching(number, batch):
            return self.learner.gradients(batch, in_buffers)

    def _judge(self, number: int, batch: list[MicroBatch], gradients: tuple[torch.Tensor, torch.Tensor]) -> QueuedStep:
        """Queue the verdict on step `number`, which depends on the steps before and on a signal to any rank."""
        details = self.details.numbers()
        is_stopping = bool(self.runtime.stop)
        return self.learner.judge(batch, gradients, self.progress.loss_limit, is_stopping, number, details)

    def _learning_rate(self, number: int) -> float:
        return learning_rate_of(self.stage, number)

    def _vote_to_stop(self, doing: str = "training") -> bool:
        """Learn whether any rank was told to stop. In training the ranks learn it with a step's result instead.

        All ranks stop after the same step, or in the same validation. A signal takes effect within one optimizer step
        (including compilation in a launch's first step; two where results are read late) or one validation batch,
        plus the save.
        """
        self.runtime.watchdog.step(self.step, doing)
        with self.watch.phases.measure(Phase.OTHER):
            # Whether any rank was told to stop.
            is_stopping = self.learner.mesh.max_over_all(torch.tensor(int(bool(self.runtime.stop))))
            self.progress.is_stopping |= bool(is_stopping)
        return self.progress.is_stopping

    # ----------------------------------------------------------------------- its result is read

    def _is_awaited(self, number: int) -> bool:
        """Whether the result of step `number`, the last, must be read before the next begins."""
        intervals = (self.config.validation.interval, self.config.fault.compare_interval)
        return not self.reads_late or any(_is_due(interval, number) for interval in intervals)

    def _read_result(self) -> bool:
        """Wait for the last step, if its result is not read yet, and do what is due after that step.

        Returns:
            Whether that computed a step again, which overwrote the gradients.
        """
        last = self.last
        self.last = None
        if last is None:
            return False
        self.runtime.watchdog.step(self.run.step)  # if the device hangs, it is in that step
        with self.runtime.ledger.waiting_for_step():
            result = last.result()
        self.progress.is_stopping |= result.is_stopping
        is_overwritten = result.is_missing_rows
        if result.is_missing_rows:
            with self.watch.grace.changing():
                last = self._again_without_buffers(last)
                self.saver.last = last
            result = last.result()
        if result.skipped:
            with self.watch.phases.measure(Phase.OTHER):
                is_overwritten |= report_skip(result, self.progress, self.learner, last.micro_batches, self.console)
        if result.is_spike and self._rewind(result):
            return is_overwritten
        self.records.fingerprints.record(self.run, result)
        self.progress.count(result)
        if self.progress.has_skipped_too_many:
            self._log(result, None)
            raise UserError(too_many_skipped(self.config, self.run, self.config.job.folder))
        step = self.run.step
        if _is_due(self.config.fault.compare_interval, step):
            self._compare_copies()
        is_validated = _is_due(self.config.validation.interval, step)
        validation = self._validate() if is_validated else None
        is_due = _is_due(self.config.metrics.interval, step) or step in (1, self.config.training.steps)
        has_news = is_validated or result.details is not None or self.progress.has_unlogged_incidents
        if is_due or has_news:
            self._log(result, validation)
        self.console.advance(step)
        return is_overwritten

    def _again_without_buffers(self, last: QueuedStep) -> QueuedStep:
        """Compute the last step again, with all rows of its experts; it has changed nothing yet."""
        number = self.run.step + 1
        self.learner.take_back(last, number)  # and the next step's gradients, if there are any
        gradients = self._gradients(number, last.micro_batches, in_buffers=False)
        step = self._judge(number, last.micro_batches, gradients)
        self.learner.update(step, self._learning_rate(number))
        self.learner.update_average(number, step.skip)
        self.learner.freeze(number)
        balance = self.learner.load_balance
        balance.repeated_steps = (balance.repeated_steps or 0) + 1
        if balance.repeated_steps == 1:
            factor = self.config.expert.buffer_factor
            self.console.note(
                f"step {number} is computed again: more rows go to the experts of a rank than a buffer of "
                f"expert.buffer_factor {factor:g} holds; repeated_steps in metrics.jsonl counts such steps"
            )
        return step

    def _rewind(self, result: StepResult) -> bool:
        """Go back to a checkpoint from before a spike, but not in the data.

        The run keys alone decide which checkpoint: when others happen to be saved, as at a stop, must not change what
        the run learns. If the process is killed before the next checkpoint, the resumed run meets the same spike again.

        Returns:
            Whether there was a checkpoint to go back to.

        Raises:
            UserError: the run has gone back to that checkpoint too often.
        """
        earliest = self.stage.border.after  # before it, data and keys are an earlier stage's
        to_step = rewind_target(self.config.fault.spikes, self.run.step, self.run.incidents, result.loss, earliest)
        if to_step is None:
            return False
        with self.watch.during(self.run.step, "going back", Kind.CHECKPOINT):
            if not self.checkpoints.can_rewind(to_step):
                return False
            self.commands.finish(is_done=False)  # they may be reading checkpoints that the rewind moves
            self.records.flush()  # a copy of the metrics is kept with those checkpoints
            saved = self.checkpoints.rewind(to_step, self.learner.state())
            self.learner.was_loaded()
        self.saver.is_due = False
        self.watch.go_back(self.run.step + 1 - to_step)
        position = self.loader.state_dict()
        samples = [saved["data"]["next_sample"], position["next_sample"] - 1]
        self.progress.go_back(RunState(**saved["run"]), result.loss, samples)
        self.console.note(f"back to step {to_step}; samples {samples[0]} to {samples[1]} are skipped")
        # From here on, all is as if the run had been resumed there.
        self.watch.profiler.finish()
        self.commands.open()
        self.records.open(self.run, position)
        return True

    def _compare_copies(self) -> None:
        """Check that replicated tensors are equal on all ranks, or heal them.

        Raises:
            UserError: they differ; nothing may be saved.
        """
        step = self.run.step
        if self.progress.compared_step == step:
            return
        on_difference = self.config.fault.on_difference
        saved_step = self.checkpoints.latest_step()
        with self.watch.during(step, "comparing replicas", Kind.TRAINING):
            healed = check_replicas(self.learner.replicas(), on_difference, step, saved_step)
        self.progress.compared_step = step
        if healed:
            self.console.warning_of_all(f"healed replicas that differed from the majority after step {step}:{healed}")
            self.progress.record("heal", tensors=[line.strip() for line in healed.strip().split("\n")])

    def _validate(self) -> ValidationResult | None:
        """Validate; returns None if a signal ends it early."""
        with self.watch.during(self.run.step, "validation", Kind.VALIDATION):
            found = self.validation.measure(self.learner, self.run.step, partial(self._vote_to_stop, "validation"))
        self.awaits_validation = found is None
        return found

    def _repeat_validation(self) -> None:
        """Validate the state that this launch begins with, if the launch before was stopped in that."""
        step = self.run.step
        is_validated = step > 0 and _is_due(self.config.validation.interval, step)
        if is_validated and self.records.lacks_validation(step) and (found := self._validate()):
            self.records.write_validation(step, found)

    def _log(self, result: StepResult, validation: ValidationResult | None) -> None:
        step = self.run.step
        with self.watch.phases.measure(Phase.OTHER):
            of_model = self.learner.measure()
            memory = self.memory()
        self.records.write(
            self.run,
            result,
            self._learning_rate(step),
            self.learner.frozen(step - 1),
            memory=memory,
            validation=validation,
            of_model=of_model,
            lag=self.watch.take_lag(),
            details=None if result.details is None else self.details.read(result.details),
            incidents=self.progress.take_incidents(),
            awaits_validation=self.awaits_validation,
            writes_status=not self.watch.grace.has_begun,
        )

    def memory(self) -> Memory:
        """The largest memory use on any rank; all ranks must call it."""
        counts = torch.tensor(memory_counts(self.runtime.device.type))
        # The largest of each count.
        return memory_of(self.learner.mesh.max_over_all(counts).tolist())

    # ----------------------------------------------------------------------- the run is saved

    def _should_save(self) -> bool:
        """Whether to save now; a save that is due after a non-finite step waits for the next finite one.

        What a spike may return to does not wait: a stop saves after any step, and must not change what a spike does.
        """
        self.saver.is_due |= self.checkpoints.should_save(self.step)
        if self.saver.is_due:
            self._read_result()
        return self.saver.is_due and (self.progress.last_was_finite or self.checkpoints.is_returned_to(self.run.step))

    def _save(self) -> None:
        """Save the state of the run, unless replicas of it differ between ranks."""
        self._compare_copies()
        self.runtime.watchdog.step(self.run.step, "checkpoint")
        self.records.flush()
        with named_range("save"), self.watch.during(self.run.step, "checkpoint", Kind.CHECKPOINT):
            self.checkpoints.wait()
            self.commands.poll()  # lock the last checkpoint for its commands before this one replaces it
            self.saver.save(self.loader)

    def _close(self) -> None:
        self.learner.finish_update()
        self.watch.profiler.finish()
        self.loader.close()
        self.validation.close()
        self.records.close()


def _is_due(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0
