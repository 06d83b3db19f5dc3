"""A job from its config to its last checkpoint: everything is built once, then the loop runs.

    trainer = Trainer(job, device, console, stop, ledger, watchdog)
    state = trainer.train()         # "done", or "preempted" after a signal

Each part knows one thing: the loader which samples come next, the learner how to compute a step, the checkpoint manager
when and where to save, the console what the user sees.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint.manager import CheckpointManager
from checkpoint.manifest import step_folder
from configs.errors import UserError, mistakes_of_the_job
from configs.layout import mesh_sizes
from configs.load import LoadedConfig
from configs.run_change import run_key_diff
from parallelisms.attention.backend import attention_kernel
from parallelisms.guards.collective_waits import CollectiveWaits
from parallelisms.mesh import build_mesh, groups_of_axes
from parallelisms.ranks import gather, on_rank_zero
from parallelisms.symmetric_memory import fast_paths
from trainer.data.loader import MicroBatch, build_loader, merge_state_dicts
from trainer.data.tokenizer import load_tokenizer
from trainer.details import Details, Measured
from trainer.evaluation.beside import Evaluations
from trainer.exports import Exports
from trainer.guards.agreement import compare_data, on_all_ranks
from trainer.guards.copies import see_that_copies_are_equal
from trainer.guards.environment import device_name, environment
from trainer.guards.garbage import Garbage
from trainer.guards.grace import Grace
from trainer.guards.phases import Lag, Phase, PhaseClock
from trainer.guards.saved_state import check_saved_state
from trainer.guards.spikes import loss_limit, rewind_target
from trainer.guards.trace_nonfinite import trace_nonfinite
from trainer.guards.verdict import StepResult, Verdict, describe
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import State, StopRequest, write_status
from trainer.lr_schedule import learning_rate
from trainer.planning.float8 import float8_products
from trainer.planning.flops import peak_flops
from trainer.planning.least_recomputation import chosen, least_recomputation
from trainer.planning.skeleton import skeleton
from trainer.planning.unknown_names import require_known_names
from trainer.preparation import prepare_data, require_inputs
from trainer.proof.fingerprints import Fingerprints
from trainer.report.console import Console
from trainer.report.metrics import EvaluationMetrics, Kind, Memory, TimeLedger, memory_counts, memory_of
from trainer.report.profile import StepProfiler
from trainer.report.step_records import StepRecords, tokens_per_step
from trainer.report.wall_clock import describe_launch
from trainer.sampling.periodic import Sampler
from trainer.saved_state import RunState, too_many_skipped
from trainer.step import Terms, build_learner
from trainer.validation import ValidationResult, validate

# torch.compile compiles in the first step of a launch, and may compile again in the second.
COMPILING_STEPS = 2


@dataclass(frozen=True)
class Pending:
    """The last step, until its result is read."""

    verdict: Verdict
    lr: float
    micro_batches: list[MicroBatch]
    details: Measured | None


@dataclass(frozen=True)
class Finished:
    """The state of a run between two steps, without its tensors."""

    run: RunState
    verdict: Verdict | None
    """Of one more step, whose result is not in `run` yet."""
    data: dict[str, Any]
    """State of this rank's loader."""
    validation_loss: float | None
    """None unless it was measured after this step."""


class Trainer:
    """Trains one job on one rank."""

    def __init__(
        self,
        job: LoadedConfig,
        device: torch.device,
        console: Console,
        stop: StopRequest,
        ledger: TimeLedger,
        watchdog: Watchdog,
        before_build: Callable[["Trainer"], None] = lambda trainer: None,
    ) -> None:
        """Check everything that the job names, then build it on this rank's device, and load the checkpoint.

        The process group and the run folder must exist.

        Args:
            before_build: called when everything is checked and no weight is drawn yet.

        Raises:
            KeelError: the job, its data or its checkpoint is at fault; raised on all ranks alike.
        """
        config = job.config
        self.spikes = config.fault.spikes
        self.console, self.stop, self.ledger, self.watchdog = console, stop, ledger, watchdog
        self.folder, self.choice = config.job.folder, job.choice
        self.device = device
        self.rank = dist.get_rank()
        self.peak = peak_flops(device_name(device), config.training.compute_dtype)
        self.mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), self.device)
        with mistakes_of_the_job():
            require_known_names(job)
            self.recomputation = least_recomputation(config, self.mesh)
            self.config = config = chosen(config, self.recomputation)
            self.attention = attention_kernel(config, device)
            self.float8 = float8_products(config, device)
            self.communication = fast_paths(config, self.mesh)
            on_rank_zero(None, lambda: require_inputs(job))
            with ledger.measure(Kind.PREPARATION):
                watchdog.on_first_rank("preparing data", lambda: prepare_data(config, console, stop))
                compare_data(config)
            self.sampler = Sampler(job)
            saved = self._check()
        before_build(self)
        self.learner = build_learner(config, self.mesh)
        with mistakes_of_the_job():
            self._load(saved)
            self.checkpoints.begin_line()
            self.checkpoints.check_room(self.learner.state())
            self.exports, self.evaluations = self._build_exports(), self._build_evaluations()
            self.profiler = StepProfiler(config, self.folder, self.rank, self.device.type, self.run.step)
            gradients, axes = self.learner.fingerprint, self.mesh.sizes.axes
            self.fingerprints = Fingerprints(job, gradients, axes, device, console.outages)
            incarnation = watchdog.incarnation
            launch = describe_launch(config, self.mesh, self.first_step, ledger, job.choice, incarnation)
            self.records = StepRecords(config, console, ledger, self.peak, launch, self.fingerprints, incarnation)
            self.records.open(self.run, self.loader.state_dict()["next_sample"])
        waits = CollectiveWaits(groups_of_axes(self.mesh).values(), self.device)
        self.phases = PhaseClock(waits, config.fault.lag_ratio, self.mesh.sizes.pp > 1, COMPILING_STEPS)
        self.details = Details(config, self.learner)
        self.lag: Lag | None = None
        """Lag in the last window of steps, until it is logged."""
        self.grace = Grace(stop, config.job.grace_seconds, console, device, config.job.timeout_seconds)
        self.reads_late = self.device.type == "cuda" and self.spikes.action != "rewind"
        """Whether a step's result is read only when the next step's work is queued, so that the device never idles."""
        self.pending: Pending | None = None
        self.is_stopping = False
        """Whether a rank was told to stop, as far as all ranks know."""
        self._save_is_due = False
        self.last_was_finite = True
        """Whether the last step had a finite loss and gradient norm."""
        self.ends: tuple[float, float] | None = None
        """The first and the last loss of this launch; None before a step."""
        self.validated: tuple[int, float] | None = None
        """Step and loss of the last validation."""
        self.compared_step: int | None = None
        """Step after which replicas were last compared."""
        self.unlogged_incidents: list[dict[str, Any]] = []

    def _check(self) -> dict[str, Any] | None:
        """Open the data and what describes the checkpoint, before minutes go into weights.

        Returns:
            What the checkpoint says of the run; None if the run starts from scratch.
        """
        config, path = self.config, self.config.tokenizer.path
        tokenizer = load_tokenizer(path, config.model.vocab_size) if path else None
        self.checkpoints = CheckpointManager(
            folder=self.folder / "checkpoints",
            settings=config.checkpoint,
            resolved=config.model_dump(mode="json"),
            mesh=self.mesh.sizes.axes,
            run_key_diff=run_key_diff,
            allow_run_change=config.job.allow_run_change,
            log=self.console.line,
            warn=self.console.warning,
            tokenizer_hash=tokenizer.hash if tokenizer else None,
            rewind_interval=self.spikes.rewind_interval if self.spikes.action == "rewind" else 0,
            environment=environment(self.device, config.fsdp.cpu_offload),
            metrics=self.folder / "metrics.jsonl",
            incarnation=self.watchdog.incarnation,
        )
        shapes = skeleton(config.model).shapes
        saved = self.checkpoints.find({f"model.{name}": shape for name, shape in shapes.items()})
        self._begin_at(saved)
        return saved

    def _begin_at(self, saved: dict[str, Any] | None) -> None:
        """Set the run's state, and open its data, at what a checkpoint says; None: at the start."""
        if saved:
            check_saved_state(saved)
        self.run = RunState(**saved["run"]) if saved else RunState()
        self.first_step = self.run.step
        self._build_loaders(saved["data"] if saved else {"next_sample": 0, "sources": None})

    def _load(self, found: dict[str, Any] | None) -> None:
        """Load the checkpoint that was found, or the one to fall back to if its files turn out to be damaged."""
        saved = self.checkpoints.resume(self.learner.state())
        self.learner.was_loaded()  # also if only weights were loaded, from checkpoint.init_from
        if saved != found:
            self._begin_at(saved)

    def _build_loaders(self, data: dict) -> None:
        config, dp_rank, dp_size = self.config, self.mesh.dp_rank, self.mesh.sizes.dp
        self.loader = build_loader(
            config, dp_rank, dp_size, data["next_sample"], states=data["sources"], order=data.get("order")
        )
        self.validation_loader, self.token_bytes = None, None
        if config.validation.interval:
            self.validation_loader = build_loader(config, dp_rank, dp_size, start_sample=0, validation=True)
            if config.tokenizer.path:
                self.token_bytes = torch.from_numpy(load_tokenizer(config.tokenizer.path).token_bytes())

    def _build_exports(self) -> Exports | None:
        if not self.config.checkpoint.export_every:
            return None
        log, warn = self.console.line, self.console.warning
        return Exports(self.config, self.folder, self.checkpoints.latest_step(), log, warn)

    def _build_evaluations(self) -> Evaluations:
        def record(result: EvaluationMetrics) -> None:
            self.records.write_evaluation(result)

        return Evaluations(self.config, self.checkpoints.latest_step(), record, self.console.line, self.console.warning)

    def train(self) -> State:
        """Train up to `training.steps` or until a signal, then save."""
        try:
            return self._train()
        finally:
            self.records.flush()  # after an error, too

    def _train(self) -> State:
        last_step, on_gpu = self.config.training.steps, self.device.type == "cuda"
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
                is_typical = self.step - self.first_step > COMPILING_STEPS
                self.grace.check(self.checkpoints.save_seconds, is_typical)
                if self._should_save():
                    self._save()
                    self._vote_to_stop()  # saving may have taken long
                self._poll_exports()
            self._settle()
            self._save()
            self.checkpoints.close()
        self._finish_exports()
        self._close()
        return "done" if self.run.step >= last_step else "preempted"

    # ----------------------------------------------------------------------- parts of a step

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
        compiling = self.config.compile.enable and step - self.first_step < COMPILING_STEPS
        self.watchdog.step(step)
        self.learner.freeze(step)
        self.profiler.before_step(step + 1)
        if compiling and step == self.first_step:
            self.console.line("compiling: the first step takes longer, up to minutes where nothing is cached yet")
        self.grace.computing(step, partial(self._rescue, self._finished()))
        with self.ledger.step(compiling):
            with self.ledger.waiting_for_data(), self.phases.measure(Phase.DATA):
                micro_batches = next(self.loader)
            with self.phases.step(), self.details.watching(step + 1, micro_batches):
                verdict = self.learner.step(micro_batches, lr, self._terms, self._before_update)
        self.pending = Pending(verdict, lr, micro_batches, self.details.take())
        self.profiler.after_step(step + 1)
        self._report_lag()
        return step + 1

    def _terms(self) -> Terms:
        """What a step is judged by, once its passes are queued: they keep the device busy while this waits for it."""
        if self.pending:
            self.watchdog.step(self.run.step)  # if the device hangs, it is in that step
        if is_traced := self._settle():
            self.details.begin_again()
        return Terms(loss_limit(self.spikes, self.run.past_losses), bool(self.stop), is_traced, self.run.step + 1)

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
        pending, self.pending, is_traced = self.pending, None, False
        if pending is None:
            return False
        result = pending.verdict.result()
        if result.skipped:
            with self.phases.measure(Phase.OTHER):
                is_traced = self._report_skip(result, pending.micro_batches)
        self.is_stopping |= result.is_stopping
        if result.is_spike and self._rewind(result):
            return is_traced
        self._count(result)
        if self._is_due(self.config.fault.compare_interval):
            self._compare_copies()
        validation = self._validate() if self._is_due(self.config.validation.interval) else None
        is_due = self._is_due(self.config.metrics.interval) or self.run.step in (1, self.config.training.steps)
        if validation or is_due or pending.details or self.unlogged_incidents:
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

    def _count(self, result: StepResult) -> None:
        """Add a step to the run.

        Raises:
            UserError: too many steps in a row changed nothing.
        """
        n_incidents = len(self.run.incidents)
        chain = self.fingerprints.record(self.run, result)
        self.run = self.run.after(result, tokens_per_step(self.config), self.spikes, chain)
        self.unlogged_incidents += self.run.incidents[n_incidents:]
        self.ends = (self.ends[0] if self.ends else result.loss, result.loss)
        self.last_was_finite = result.is_spike or not result.skipped
        if self.run.skipped_in_a_row > self.config.training.max_skipped_steps:
            raise UserError(too_many_skipped(self.config, self.run, self.folder))

    def _report_skip(self, result: StepResult, micro_batches: list[MicroBatch]) -> bool:
        """Tell why a step changed nothing; returns whether it was computed again for that."""
        by_rank = gather([sample for batch in micro_batches for sample in batch.samples])
        samples = sorted({sample for samples in by_rank for sample in samples})
        limit = f" (a spike is above {loss_limit(self.spikes, self.run.past_losses)})" if result.is_spike else ""
        self.console.note(
            f"step {self.run.step + 1} skipped: {describe(result.gather())}{limit}; its samples are {samples[0]} to "
            f"{samples[-1]}"
        )
        is_traced = self.config.fault.trace_nonfinite and self.last_was_finite and not result.is_spike
        if is_traced:
            self.console.note(f"step {self.run.step + 1}: {trace_nonfinite(self.learner, micro_batches)}")
        return is_traced

    def _record(self, what: str, **details: Any) -> None:
        """Record an incident, for later checkpoints and the next line of metrics."""
        self.run = self.run.with_incident(what, **details)
        self.unlogged_incidents.append(self.run.incidents[-1])

    def _rewind(self, result: StepResult) -> bool:
        """Go back to a checkpoint from before a spike, but not in the data.

        The run keys alone decide which checkpoint: when others happen to be saved, as at a stop, must not change what
        the run learns. If the process is killed before the next checkpoint, the resumed run meets the same spike again.

        Returns:
            Whether there was a checkpoint to go back to.

        Raises:
            UserError: the run has gone back to that checkpoint too often.
        """
        to_step = rewind_target(self.spikes, self.run.step, self.run.incidents, result.loss)
        if to_step is None:
            return False
        self.watchdog.step(self.run.step, "going back")
        with self.ledger.measure(Kind.CHECKPOINT), self.phases.measure(Phase.CHECKPOINT):
            if not self.checkpoints.can_rewind(to_step):
                return False
            self._finish_exports()  # they may be reading checkpoints that the rewind moves
            saved = self.checkpoints.rewind(to_step, self.learner.state())
            self.learner.was_loaded()
        spike, limit = self.run.step + 1, loss_limit(self.spikes, self.run.past_losses)
        samples = [saved["data"]["next_sample"], self.loader.state_dict()["next_sample"] - 1]
        self.run = replace(RunState(**saved["run"]), incidents=self.run.incidents)
        self._record("rewind", spike_step=spike, to_step=to_step, loss=result.loss, limit=limit, samples=samples)
        self.unlogged_incidents = self.run.incidents[len(saved["run"].get("incidents", [])) :]
        self.console.note(f"back to step {to_step}; samples {samples[0]} to {samples[1]} are skipped")
        self._begin_again()
        return True

    def _begin_again(self) -> None:
        """Reset a rewound run's records to what they would be if it had been resumed there."""
        self.compared_step = None
        self.profiler.finish()
        self.exports, self.evaluations = self._build_exports(), self._build_evaluations()
        self.records.open(self.run, self.loader.state_dict()["next_sample"])

    def _compare_copies(self) -> None:
        """Check that replicated tensors are equal on all ranks, or heal them.

        Raises:
            UserError: they differ; nothing may be saved.
        """
        if self.compared_step == self.run.step:
            return
        self.watchdog.step(self.run.step, "comparing copies")
        on_difference, saved_step = self.config.fault.on_difference, self.checkpoints.latest_step()
        with self.ledger.measure(Kind.TRAINING), self.phases.measure(Phase.OTHER):
            healed = see_that_copies_are_equal(self.learner.copies(), on_difference, self.run.step, saved_step)
        self.compared_step = self.run.step
        if healed:
            self.console.warning(f"replaced copies that differed from the majority after step {self.run.step}:{healed}")
            self._record("heal", tensors=[line.strip() for line in healed.strip().split("\n")])

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def _validate(self) -> ValidationResult | None:
        """Validate; returns None if a signal ends it early."""
        assert self.validation_loader is not None
        with self.ledger.measure(Kind.VALIDATION), self.phases.measure(Phase.OTHER):
            is_over = partial(self._vote_to_stop, "validation")
            result = validate(self.learner, self.validation_loader, self.token_bytes, is_over)
            if result:
                result = replace(result, samples=self.sampler.sample(self.learner, self.run.step, is_over))
                self.validated = (self.run.step, result.validation_loss)
        return result

    def _should_save(self) -> bool:
        """Whether to save now; a save that is due after a non-finite step waits for the next finite one."""
        self._save_is_due |= self.checkpoints.should_save(self.step)
        if self._save_is_due:
            self._settle()
        return self._save_is_due and self.last_was_finite

    def _save(self) -> None:
        """Save everything that determines the following steps.

        This includes no random state, because no step uses one: weights and data order are functions of the seed, and
        there is no dropout. It includes no running metrics either: each logged number is of one step or the wall clock.
        """
        self._compare_copies()
        self.watchdog.step(self.run.step, "checkpoint")
        self.records.flush()
        with self.ledger.measure(Kind.CHECKPOINT), self.phases.measure(Phase.CHECKPOINT):
            self.checkpoints.wait()
            self._poll_exports()  # begin the export of the last checkpoint before this one replaces it
            self._save_finished(self._finished())
        self._save_is_due = False

    def _finished(self) -> Finished:
        """Return the current state of the run, between two steps."""
        step, loss = self.validated or (None, None)
        verdict = self.pending.verdict if self.pending else None
        return Finished(self.run, verdict, self.loader.state_dict(), loss if step == self.step else None)

    def _save_finished(self, finished: Finished, group: dist.ProcessGroup | None = None) -> None:
        """Save the state after a step, while tensors are unchanged since; `group` holds all ranks."""

        def own_data() -> dict[str, Any]:
            self.loader.check_unchanged()
            return finished.data

        data, run = merge_state_dicts(on_all_ranks(own_data, group)), finished.run
        self.checkpoints.save(
            run.step,
            self.learner.state(),
            {"tokens": run.tokens, "run": asdict(run), "data": data},
            data_fingerprint={name: state["fingerprint"] for name, state in data["sources"].items()},
            validation_loss=finished.validation_loss,
            chain=run.chain,
            prune=not run.skipped_in_a_row,  # skipped steps may end the run, which then needs older checkpoints
        )

    def _rescue(self, finished: Finished, reason: str, group: dist.ProcessGroup) -> Callable[[], None]:
        """Save the state after the last step while the next one is computed; threads of all ranks call it together.

        During a launch's first step there is nothing to save: the same command starts from the same state.

        Returns:
            A function that reports the save once it is written.

        Raises:
            UserError: the ranks hold different results of that step.
        """
        if finished.verdict:
            result = finished.verdict.read()
            if result.differs:  # the main threads say which
                raise UserError("the ranks hold different results of the last step")
            chain = self.fingerprints.record(finished.run, result)
            self.fingerprints.flush()
            run = finished.run.after(result, tokens_per_step(self.config), self.spikes, chain)
            finished = replace(finished, run=run, verdict=None)
        step, is_new = finished.run.step, finished.run.step > self.first_step
        if is_new:
            self.console.line(f"{reason}: saving the state of step {step} while step {step + 1} is computed")
            self._save_finished(finished, group)
        else:
            self.console.line(f"{reason}: there is nothing new to save until the first step of this launch ends")
        under_way = self.checkpoints.under_way
        newest = step_folder(self.folder / "checkpoints", step) if is_new else self.newest_checkpoint

        def make_known() -> None:
            failed = self.checkpoints.latest_step() != step if under_way is None else under_way.exception() is not None
            if self.rank > 0 or (is_new and failed):  # the main thread reports why it failed
                return
            write_status(self.folder, "preempted", step, reason, checkpoint=str(newest) if newest else None)
            if is_new:
                self.console.line(f"{reason}: step {step} is saved")

        return make_known

    def _log(self, result: StepResult, pending: Pending, validation: ValidationResult | None) -> None:
        with self.phases.measure(Phase.OTHER):
            balance, memory = self.learner.load_balance.measure(), self.memory()
        frozen, incidents = self.learner.frozen(self.run.step - 1), self.unlogged_incidents
        details = pending.details.read() if pending.details else None
        measured = (memory, validation, balance, self.lag, details, incidents)
        self.records.write(self.run, result, pending.lr, frozen, *measured, writes_status=not self.grace.has_begun)
        self.unlogged_incidents, self.lag = [], None

    def memory(self) -> Memory:
        """The largest memory use on any rank; all ranks must call it."""
        return memory_of(self.mesh.max_over_all(torch.tensor(memory_counts(self.device.type))).tolist())

    def _poll_exports(self) -> None:
        if self.rank == 0:
            if self.exports:
                self.exports.poll(self.checkpoints.latest_step())
            self.evaluations.poll(self.checkpoints.latest_step())

    def _finish_exports(self) -> None:
        """Finish the exports and evaluations that are due, including the last checkpoint's.

        After a signal, the next launch does.
        """
        exports, stopped = self.exports, self.run.step < self.config.training.steps
        if not stopped:
            self._poll_exports()
        if exports is not None:
            self.watchdog.on_first_rank("exports", lambda: exports.finish(lambda: stopped or bool(self.stop)))
        if self.config.evaluation.interval:
            finish = self.evaluations.finish
            self.watchdog.on_first_rank("evaluations", lambda: finish(lambda: stopped or bool(self.stop)))

    def _close(self) -> None:
        self.learner.finish_update()
        self.profiler.finish()
        for loader in filter(None, (self.loader, self.validation_loader)):
            loader.close()
        self.records.close()

    @property
    def newest_checkpoint(self) -> Path | None:
        """Folder of the last checkpoint that was written or loaded."""
        step = self.checkpoints.latest_step()
        return None if step is None else step_folder(self.folder / "checkpoints", step)
