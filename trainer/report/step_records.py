"""What a user sees of each step: a line on the console, one in metrics.jsonl, curves, and the step in status.json."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from checkpoint.incarnation import Incarnation
from configs.errors import UserError
from configs.files import insist
from configs.layout import tokens_per_step
from configs.schema import Config
from parallelisms.ranks import on_rank_zero
from trainer.details import StepDetails
from trainer.guards.phases import Lag
from trainer.guards.verdict import StepResult
from trainer.lifecycle import refresh_status
from trainer.planning.flops import flops_per_token, mfu, tflops_per_device
from trainer.proof.fingerprints import Fingerprints
from trainer.report.beside_plan import BesidePlan
from trainer.report.console import Console
from trainer.report.metrics import (
    METRICS_NAME,
    EvaluationMetrics,
    Memory,
    MetricsLog,
    StepMetrics,
    TimeLedger,
    ValidationMetrics,
    lacks_validation,
    repeated_validations,
)
from trainer.report.sinks.choose import choose_sinks
from trainer.report.sinks.worker import Sinks
from trainer.report.starving import Starving
from trainer.report.wall_clock import WallClock
from trainer.saved_state import RunState
from trainer.validation import ValidationResult


@dataclass
class StepRecords:
    """The records of a launch's steps; every rank has them, and rank 0 writes."""

    config: Config
    """The keys of the present stage of the run."""
    console: Console
    ledger: TimeLedger
    peak: float | None
    """The device's peak FLOP/s; None if it is unknown."""
    wall_clock: WallClock
    beside_plan: BesidePlan
    """Compares the run with its plan in its last record."""
    fingerprints: Fingerprints
    """Written with the other records."""
    incarnation: Incarnation | None
    """That of an elastic run; nothing is written once there is a newer one."""
    repeated_validations: dict[int, float] = field(default_factory=dict)
    """Those of `repeated_validations`, on rank 0."""
    _log: MetricsLog | None = None
    _starving: Starving = field(default_factory=Starving)

    def open(self, run: RunState, position: dict[str, Any]) -> None:
        """Begin after the steps of `run`, at a position in the data; all ranks call it.

        Raises:
            UserError: the files can't be written.
        """
        on_rank_zero(None, lambda: self._open(run.step))
        self.fingerprints.open(run, position)

    def _open(self, step: int) -> None:
        goes_back = self._log is not None
        if self._log:
            self._log.close()
        config = self.config
        folder = self.config.job.folder
        try:
            goes_on = goes_back or config.checkpoint.load != "none"  # what this launch has written is its own run's
            insist(lambda: self.wall_clock.open(folder / METRICS_NAME, step, goes_on))
            sinks = Sinks(choose_sinks(config.metrics, folder), self.console.warning)
            run = config.job.name, config.model_dump(mode="json")
            check = self.incarnation.require_newest_known if self.incarnation else None
            if check:
                check()
            self._log = insist(
                lambda: MetricsLog(folder, self.console.outages, step, sinks, *run, before_writing=check)
            )
            self.repeated_validations.update(repeated_validations(folder / METRICS_NAME))
        except OSError as error:
            raise UserError(f"{error.filename or folder} can't be written: {error.strerror}") from None
        if self._log.unreadable_lines:
            self.console.warning(f"{self._log.unreadable_lines} unreadable lines were removed from metrics.jsonl")

    def write(
        self,
        run: RunState,
        result: StepResult,
        lr: float,
        frozen: frozenset[str],
        memory: Memory,
        validation: ValidationResult | None,
        of_model: Mapping[str, Any],
        lag: Lag | None,
        details: StepDetails | None,
        incidents: list[dict[str, Any]],
        awaits_validation: bool,
        writes_status: bool,
    ) -> None:
        """Record the last step of `run`; all ranks call it.

        Args:
            frozen: names of the parameters that it did not train.
            of_model: returned by `Learner.measure`.
            incidents: those since the last record.
            awaits_validation: whether a stop ended the step's validation.
            writes_status: whether status.json shall show the step as well.
        """
        training = self.config.training
        speed = self.ledger.throughput(tokens_per_step(self.config))
        flops = flops_per_token(self.config.model, training.seq_len, frozen).causal
        tflops = tflops_per_device(speed.tokens_per_second, flops, dist.get_world_size())
        self.beside_plan.count(self.config, speed)
        if self._log and run.step == training.steps:
            self.beside_plan.compare(memory, self.console.warning)
        now = time.time()
        metrics = StepMetrics(
            step=run.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens=run.tokens,
            **asdict(speed),
            mfu=mfu(tflops, self.peak),
            tflops=tflops,
            **asdict(memory),
            time=now,
            **(vars(validation) if validation else {}),
            validation_stopped=awaits_validation or None,
            incidents=incidents or None,
            **of_model,
            slowest_rank=lag.rank if lag else None,
            lag_seconds=lag.seconds if lag else None,
            phase_seconds=lag.phase_seconds if lag else None,
            **(vars(details) if details else {}),
            **self.wall_clock.record(now),
            plan=self.beside_plan.quantities or None,
            planned_parts=self.beside_plan.parts or None,
        )
        self.console.step(metrics)
        if self._log:
            if complaint := self._starving.complaint(metrics.tokens_per_expert):
                self.console.warning(f"step {run.step}: {complaint}")
            self._log.write(metrics, partial(self._after_metrics, run.step, writes_status))

    def lacks_validation(self, step: int) -> bool:
        """Whether the launch before was stopped in the validation after `step` steps; all ranks call it."""
        return on_rank_zero(None, lambda: lacks_validation(self.config.job.folder / METRICS_NAME, step))

    def write_validation(self, step: int, result: ValidationResult) -> None:
        """Record the validation that the launch before was stopped in; all ranks call it."""
        if math.isfinite(result.validation_loss):
            self.repeated_validations[step] = result.validation_loss
        metrics = ValidationMetrics(step, **vars(result), time=time.time())
        self.console.validation(metrics)
        if self._log:
            self._log.write(metrics)

    def write_evaluation(self, result: EvaluationMetrics) -> None:
        """Record the result of an evaluation; on rank 0."""
        if self._log:
            self._log.write(result)

    def _after_metrics(self, step: int, writes_status: bool) -> None:
        self.fingerprints.flush()
        if not writes_status:
            return
        with self.console.outages.tolerate(self.config.job.folder / "status.json"):
            refresh_status(self.config.job.folder, step, reason="")

    def flush(self) -> None:
        """Wait until all records are written."""
        if self._log:
            self._log.flush()
            self.fingerprints.flush()

    def close(self) -> None:
        """Write the records still pending, or report that they are missing."""
        if self._log:
            self._log.close()
            self.fingerprints.close()
