"""A job from its config to its last checkpoint: everything is built once, then the loop runs.

    trainer = Trainer(job, device, console, stop, ledger, watchdog)
    state = trainer.train()         # "done", or "preempted" after a signal

Each part knows one thing: the loader which samples come next, the learner how to make a step of them, the checkpoint
manager when and where to save, the console what a person sees. The mesh appears here only to be handed on.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint.manager import CheckpointManager
from checkpoint.manifest import step_folder
from configs.errors import UserError
from configs.layout import mesh_sizes
from configs.load import LoadedConfig
from configs.run_change import run_key_diff
from parallelisms.guards.collective_waits import CollectiveWaits
from parallelisms.mesh import build_mesh, groups_of_axes
from parallelisms.ranks import gather, on_rank_zero
from trainer.data.loader import MicroBatch, build_loader, merge_state_dicts
from trainer.data.tokenizer import load_tokenizer
from trainer.exports import Exports
from trainer.guards.agreement import compare_data, on_all_ranks
from trainer.guards.copies import see_that_copies_are_equal
from trainer.guards.environment import device_name, environment
from trainer.guards.grace import Grace
from trainer.guards.phases import Lag, Phase, PhaseClock
from trainer.guards.spikes import loss_limit, rewind_target
from trainer.guards.trace_nonfinite import trace_nonfinite
from trainer.guards.verdict import StepResult, describe
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import State, StopRequest, write_status
from trainer.lr_schedule import learning_rate
from trainer.planning.flops import flops_per_token, mfu, peak_flops, tflops_per_device
from trainer.preparation import prepare_data, require_inputs
from trainer.report.console import Console
from trainer.report.metrics import Kind, Memory, MetricsLog, StepMetrics, TimeLedger, memory_counts, memory_of
from trainer.report.profile import StepProfiler
from trainer.saved_state import RunState, check_saved_state, too_many_skipped
from trainer.step import build_learner
from trainer.validation import ValidationResult, validate

# torch.compile works in the first step of a launch, and may once more in the second.
COMPILING_STEPS = 2


@dataclass(frozen=True)
class Finished:
    """A run between two steps, but for its tensors."""

    run: RunState
    data: dict[str, Any]
    """State of this rank's loader."""
    validation_loss: float | None
    """If it was measured after this step."""


class Trainer:
    """One rank's part in one job."""

    def __init__(
        self,
        job: LoadedConfig,
        device: torch.device,
        console: Console,
        stop: StopRequest,
        ledger: TimeLedger,
        watchdog: Watchdog,
    ) -> None:
        """Build everything on this rank's device, and take up the run where `checkpoint.load` says.

        The process group exists already, and so does the run folder.

        Raises:
            KeelError: the job, its data or its checkpoint do not allow it; the same on all ranks.
        """
        self.config = config = job.config
        self.spikes = config.fault.spikes
        self.console, self.stop, self.ledger, self.watchdog = console, stop, ledger, watchdog
        self.folder = config.job.folder
        self.device = device
        self.rank = dist.get_rank()
        self.mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), self.device)
        on_rank_zero(None, lambda: require_inputs(job))
        with ledger.measure(Kind.PREPARATION):
            watchdog.on_first_rank("preparing data", lambda: prepare_data(config, console, stop))
            compare_data(config)
        self.learner = build_learner(config, self.mesh)
        self.checkpoints = CheckpointManager(
            folder=self.folder / "checkpoints",
            settings=config.checkpoint,
            resolved=config.model_dump(mode="json"),
            mesh=self.mesh.sizes.axes,
            run_key_diff=run_key_diff,
            allow_run_change=config.job.allow_run_change,
            log=console.line,
            warn=console.warning,
            tokenizer_hash=load_tokenizer(config.tokenizer.path).hash if config.tokenizer.path else None,
            rewind_interval=self.spikes.rewind_interval if self.spikes.action == "rewind" else 0,
            environment=environment(device, config.fsdp.cpu_offload),
        )
        saved = self.checkpoints.resume(self.learner.state())
        self.learner.was_loaded()  # also where only weights were, from checkpoint.init_from
        if saved:
            check_saved_state(saved)
        self.run = RunState(**saved["run"]) if saved else RunState()
        self.first_step = self.run.step
        self._build_loaders(saved["data"] if saved else {"next_sample": 0, "sources": None})
        self.checkpoints.begin_line()
        self.checkpoints.check_room(self.learner.state())
        self.exports = self._build_exports()
        self.profiler = StepProfiler(config, self.folder, self.rank, self.device.type, self.run.step)
        waits = CollectiveWaits(groups_of_axes(self.mesh).values(), self.device)
        self.phases = PhaseClock(waits, config.fault.lag_ratio, self.mesh.sizes.pp > 1, COMPILING_STEPS)
        self.lag: Lag | None = None
        """Of the last window of steps, until it is logged."""
        self.grace = Grace(stop, config.job.grace_seconds, console, device, config.job.timeout_seconds)
        self.metrics_log: MetricsLog | None = None
        on_rank_zero(None, self._open_metrics_log)
        self.peak = peak_flops(device_name(self.device), config.training.compute_dtype)
        self._save_is_due = False
        self.last_was_finite = True
        """Loss and gradient norm of the last step."""
        self.losses: list[float] = []
        """Of the steps of this launch."""
        self.validated: tuple[int, float] | None = None
        """Step and loss of the last validation."""
        self.compared_step: int | None = None
        """After which the copies on several ranks were compared last."""
        self.unlogged_incidents: list[dict[str, Any]] = []

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

    def _open_metrics_log(self) -> None:
        if self.metrics_log:
            self.metrics_log.close()
        try:
            log = MetricsLog(self.folder, self.config.metrics.tensorboard, self.console.outages, self.run.step)
        except OSError as error:
            raise UserError(f"{error.filename or self.folder} can't be written: {error.strerror}") from None
        if log.unreadable_lines:
            self.console.warning(f"{log.unreadable_lines} unreadable lines were removed from metrics.jsonl")
        self.metrics_log = log

    def train(self) -> State:
        """Train up to `training.steps`, or until a signal; save at the end of either."""
        last_step = self.config.training.steps
        on_gpu = self.device.type == "cuda"
        with self.grace, self.console.training(self.run.step, last_step, self.peak is not None, on_gpu):
            while self.run.step < last_step and not self._agreed_to_stop():
                result, lr = self._step()
                if result.is_spike and self._rewind(result):
                    continue
                self._count(result)
                if self._is_due(self.config.fault.compare_interval):
                    self._compare_copies()
                validation = self._validate() if self._is_due(self.config.validation.interval) else None
                is_due = self._is_due(self.config.metrics.interval) or self.run.step in (1, last_step)
                if validation or is_due or self.unlogged_incidents:
                    self._log(result, lr, validation)
                self.console.advance(self.run.step)
                self.checkpoints.poll()
                is_typical = self.run.step - self.first_step > COMPILING_STEPS
                self.grace.check(self.checkpoints.save_seconds, is_typical)
                if self._should_save():
                    self._save()
                self._poll_exports()
            self._save()
            self.checkpoints.close()
        self._finish_exports()
        self._close()
        return "done" if self.run.step >= last_step else "preempted"

    # ----------------------------------------------------------------------- the parts of a step

    def _agreed_to_stop(self, doing: str = "training") -> bool:
        """Whether any rank was signalled: all stop after the same step, or in the same validation.

        So a signal is obeyed within one optimizer step (in a launch's first, its compilation included) or one batch of
        a validation, plus the save.
        """
        self.watchdog.step(self.run.step, doing)
        with self.phases.measure(Phase.OTHER):
            return bool(self.mesh.max_over_all(torch.tensor(int(bool(self.stop)))))

    def _step(self) -> tuple[StepResult, float]:
        lr = learning_rate(self.config.lr_schedule, self.config.optimizer.lr, self.run.step)
        compiling = self.config.compile.enable and self.run.step - self.first_step < COMPILING_STEPS
        self.learner.freeze(self.run.step)
        self.profiler.before_step(self.run.step + 1)
        self.grace.computing(self.run.step, partial(self._rescue, self._finished()))
        with self.ledger.step(compiling):
            with self.ledger.waiting_for_data(), self.phases.measure(Phase.DATA):
                micro_batches = next(self.loader)
            limit = loss_limit(self.spikes, self.run.past_losses)
            with self.phases.step():
                result = self.learner.step(micro_batches, lr, limit, self.grace.updating)
            self.phases.decided(result.decided_at)
        self.profiler.after_step(self.run.step + 1)
        if result.skipped:
            with self.phases.measure(Phase.OTHER):
                self._report_skip(result, micro_batches)
        self._report_lag()
        return result, lr

    def _report_lag(self) -> None:
        lag = self.phases.finish_step()
        if lag:
            self.lag = lag
            complaint = self.phases.complaint(lag)
            if complaint and self.rank == 0:
                self.console.warning(f"step {self.run.step + 1}: {complaint}")

    def _count(self, result: StepResult) -> None:
        """Add a step to the run.

        Raises:
            UserError: too many steps in a row changed nothing.
        """
        limit = loss_limit(self.spikes, self.run.past_losses)
        self.run = self.run.after(result, self._tokens_per_step, self.spikes)
        self.losses.append(result.loss)
        self.last_was_finite = result.is_spike or not result.skipped
        if result.is_spike:
            self._record("skip", loss=result.loss, limit=limit)
        if self.run.skipped_in_a_row > self.config.training.max_skipped_steps:
            raise UserError(too_many_skipped(self.config, self.run, self.folder))

    def _report_skip(self, result: StepResult, micro_batches: list[MicroBatch]) -> None:
        by_rank = gather([sample for batch in micro_batches for sample in batch.samples])
        samples = sorted({sample for samples in by_rank for sample in samples})
        limit = f" (a spike is above {loss_limit(self.spikes, self.run.past_losses)})" if result.is_spike else ""
        self.console.note(
            f"step {self.run.step + 1} skipped: {describe(result.gather())}{limit}; its samples are {samples[0]} to "
            f"{samples[-1]}"
        )
        if self.config.fault.trace_nonfinite and self.last_was_finite and not result.is_spike:
            self.console.note(f"step {self.run.step + 1}: {trace_nonfinite(self.learner, micro_batches)}")

    def _record(self, what: str, **details: Any) -> None:
        """Add to the incidents, which later checkpoints hold, and the next line of metrics."""
        self.run = self.run.with_incident(what, **details)
        self.unlogged_incidents.append(self.run.incidents[-1])

    def _rewind(self, result: StepResult) -> bool:
        """Go back to a checkpoint from before a spike, but not in the data; whether there was one to go back to.

        Where to is decided by the run's own keys: when a checkpoint happens to be saved, as at a stop, must not change
        what the run learns. If the process is killed before the next checkpoint, the same spike brings it here again.

        Raises:
            UserError: the run has gone back there too often.
        """
        to_step = rewind_target(self.spikes, self.run.step, self.run.incidents, result.loss)
        if to_step is None:
            return False
        self.watchdog.step(self.run.step, "going back")
        with self.ledger.measure(Kind.CHECKPOINT), self.phases.measure(Phase.CHECKPOINT):
            if not self.checkpoints.can_rewind(to_step):
                return False
            self._finish_exports()  # they may read checkpoints that are moved aside now
            saved = self.checkpoints.rewind(to_step, self.learner.state())
            self.learner.was_loaded()
        spike, limit = self.run.step + 1, loss_limit(self.spikes, self.run.past_losses)
        samples = [saved["data"]["next_sample"], self.loader.state_dict()["next_sample"] - 1]
        self.run = replace(RunState(**saved["run"]), incidents=self.run.incidents)
        self._record("rewind", spike_step=spike, to_step=to_step, loss=result.loss, limit=limit, samples=samples)
        self.unlogged_incidents = self.run.incidents[len(saved["run"].get("incidents", [])) :]
        self.console.note(f"back to step {to_step}; samples {samples[0]} to {samples[1]} are passed over")
        self._begin_again()
        return True

    def _begin_again(self) -> None:
        """Make the records of a run that has gone back what they would be if it had been resumed there."""
        self.compared_step = None
        self.profiler.finish()
        self.exports = self._build_exports()
        on_rank_zero(None, self._open_metrics_log)

    def _compare_copies(self) -> None:
        """See that what several ranks hold copies of is equal, or made equal again.

        Raises:
            UserError: it differs; nothing may be saved.
        """
        if self.compared_step == self.run.step:
            return
        self.watchdog.step(self.run.step, "comparing copies")
        on_difference, saved_step = self.config.fault.on_difference, self.checkpoints.latest_step()
        with self.ledger.measure(Kind.TRAINING), self.phases.measure(Phase.OTHER):
            healed = see_that_copies_are_equal(self.learner.copies(), on_difference, self.run.step, saved_step)
        self.compared_step = self.run.step
        if healed:
            self.console.warning(f"copies that differed after step {self.run.step} have what most ranks have:{healed}")
            self._record("heal", tensors=[line.strip() for line in healed.strip().split("\n")])

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.run.step % interval == 0

    def _validate(self) -> ValidationResult | None:
        """What a validation finds; None if a signal ends it."""
        assert self.validation_loader is not None
        with self.ledger.measure(Kind.VALIDATION), self.phases.measure(Phase.OTHER):
            result = validate(
                self.learner, self.validation_loader, self.token_bytes, lambda: self._agreed_to_stop("validation")
            )
        if result:
            self.validated = (self.run.step, result.loss)
        return result

    def _should_save(self) -> bool:
        """Whether a save is due; one that is due after a step that was not finite is made after the next that is."""
        self._save_is_due |= self.checkpoints.should_save(self.run.step)
        return self._save_is_due and self.last_was_finite

    def _save(self) -> None:
        """Save all that decides what comes next.

        There is no random state among it, since no step draws from one: weights and data are keyed by the seed, and
        there is no dropout. Nor are there running sums of metrics: every logged number is of its own step, or of the
        wall clock.
        """
        self._compare_copies()
        self.watchdog.step(self.run.step, "checkpoint")
        if self.metrics_log:
            self.metrics_log.flush()
        with self.ledger.measure(Kind.CHECKPOINT), self.phases.measure(Phase.CHECKPOINT):
            self.checkpoints.wait()
            self._poll_exports()  # so that the export of the last one has begun before this one takes its place
            self._save_finished(self._finished())
        self._save_is_due = False

    def _finished(self) -> Finished:
        """Where the run stands now, between two steps."""
        step, loss = self.validated or (None, None)
        return Finished(self.run, self.loader.state_dict(), loss if step == self.run.step else None)

    def _save_finished(self, finished: Finished, group: dist.ProcessGroup | None = None) -> None:
        """Save what a step has left, as long as tensors are as it has left them; `group`: of all ranks."""

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
            prune=not run.skipped_in_a_row,  # the end may come while steps are skipped
        )

    def _rescue(self, finished: Finished, reason: str, group: dist.ProcessGroup) -> Callable[[], None]:
        """Save what the last step has left while the next one is computed; threads of all ranks call it together.

        A launch's first step is spared that: the same command begins where this launch did.

        Returns: what makes it known, once it is written.
        """
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
            if self.rank > 0 or (is_new and failed):  # why it has failed, the main thread says
                return
            write_status(self.folder, "preempted", step, reason, checkpoint=str(newest) if newest else None)
            if is_new:
                self.console.line(f"{reason}: step {step} is saved")

        return make_known

    def _log(self, result: StepResult, lr: float, validation: ValidationResult | None) -> None:
        speed = self.ledger.throughput(self._tokens_per_step)
        frozen = self.learner.frozen(self.run.step - 1)
        flops = flops_per_token(self.config.model, self.config.training.seq_len, frozen).causal
        tflops = tflops_per_device(speed.tokens_per_second, flops, self.mesh.sizes.world_size)
        with self.phases.measure(Phase.OTHER):
            balance, memory = self.learner.load_balance.measure(), self.memory()
        metrics = StepMetrics(
            step=self.run.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens=self.run.tokens,
            **asdict(speed),
            mfu=mfu(tflops, self.peak),
            tflops=tflops,
            **asdict(memory),
            time=time.time(),
            validation_loss=validation.loss if validation else None,
            validation_bits_per_byte=validation.bits_per_byte if validation else None,
            incidents=self.unlogged_incidents or None,
            **(vars(balance) if balance else {}),
            slowest_rank=self.lag.rank if self.lag else None,
            lag_seconds=self.lag.seconds if self.lag else None,
            phase_seconds=self.lag.phase_seconds if self.lag else None,
        )
        self.unlogged_incidents = []
        self.lag = None
        self.console.step(metrics)
        if self.metrics_log:
            self.metrics_log.write(metrics)
            if not self.grace.has_begun:
                with self.console.outages.tolerate(self.folder / "status.json"):
                    write_status(self.folder, "running", self.run.step)

    def memory(self) -> Memory:
        """The most that any rank has held; all ranks must call it."""
        return memory_of(self.mesh.max_over_all(torch.tensor(memory_counts(self.device.type))).tolist())

    def ends(self) -> tuple[float, float] | None:
        """The first and the last loss of this launch; None if it made no step."""
        return (self.losses[0], self.losses[-1]) if self.losses else None

    def _poll_exports(self) -> None:
        if self.exports and self.rank == 0:
            self.exports.poll(self.checkpoints.latest_step())

    def _finish_exports(self) -> None:
        """Make those that are due, the last checkpoint's, too; after a signal, leave them to the next launch."""
        exports, stopped = self.exports, self.run.step < self.config.training.steps
        if exports is None:
            return
        if not stopped:
            self._poll_exports()
        self.watchdog.on_first_rank("exports", lambda: exports.finish(lambda: stopped or bool(self.stop)))

    def _close(self) -> None:
        self.learner.finish_update()
        self.profiler.finish()
        for loader in filter(None, (self.loader, self.validation_loader)):
            loader.close()
        if self.metrics_log:
            self.metrics_log.close()

    @property
    def newest_checkpoint(self) -> Path | None:
        """The folder of the last checkpoint that was written or loaded."""
        step = self.checkpoints.latest_step()
        return None if step is None else step_folder(self.folder / "checkpoints", step)

    @property
    def _tokens_per_step(self) -> int:
        return self.config.training.global_batch_size * self.config.training.seq_len
