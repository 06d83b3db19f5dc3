"""A job from its config to its last checkpoint: everything is built once, then the loop runs.

    trainer = Trainer(job, device, console, stop, ledger)
    state = trainer.train()         # "done", or "preempted" after a signal

Each part knows one thing: the loader which samples come next, the learner how to make a step of them, the checkpoint
manager when and where to save, the console what a person sees. The mesh appears here only to be handed on.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint.manager import CheckpointManager
from checkpoint.manifest import step_folder
from checkpoint.store import on_rank_zero
from configs.errors import UserError
from configs.layout import mesh_sizes
from configs.load import LoadedConfig
from configs.run_change import run_key_diff
from configs.schema import Config
from parallelisms.mesh import build_mesh
from trainer.console import Console
from trainer.data.loader import MicroBatch, build_loader, merge_state_dicts
from trainer.data.tokenizer import load_tokenizer
from trainer.exports import Exports
from trainer.flops import flops_per_token, mfu, peak_flops, tflops_per_device
from trainer.lifecycle import State, StopRequest, Watchdog, write_status
from trainer.lr_schedule import learning_rate
from trainer.metrics import Kind, MetricsLog, StepMetrics, TimeLedger, memory_peak_bytes
from trainer.preparation import prepare_data
from trainer.profile import StepProfiler
from trainer.saved_state import check_saved_state
from trainer.step import StepResult, build_learner
from trainer.validation import ValidationResult, validate

# torch.compile works in the first step of a launch, and may once more in the second.
COMPILING_STEPS = 2


@dataclass(frozen=True)
class RunState:
    """Where a run stands, beside its tensors and its data; a checkpoint keeps it as JSON."""

    step: int = 0
    """Optimizer steps completed since the start of the run."""
    tokens: int = 0
    """Tokens trained on since then."""
    skipped_in_a_row: int = 0
    """How many of the last steps changed nothing."""


class Trainer:
    """One rank's part in one job."""

    def __init__(
        self, job: LoadedConfig, device: torch.device, console: Console, stop: StopRequest, ledger: TimeLedger
    ) -> None:
        """Build everything on this rank's device, and take up the run where `checkpoint.load` says.

        The process group exists already, and so does the run folder.

        Raises:
            KeelError: the job, its data or its checkpoint do not allow it; the same on all ranks.
        """
        self.config = config = job.config
        self.console, self.stop, self.ledger = console, stop, ledger
        self.folder = run_folder(config)
        self.device = device
        self.rank = dist.get_rank()
        self.mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), self.device)
        with ledger.measure(Kind.PREPARATION):
            _on_first_rank_in_its_own_time(lambda: prepare_data(config, console, stop))
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
        )
        saved = self.checkpoints.resume(self.learner.state())
        self.learner.was_loaded()  # also where only weights were, from checkpoint.init_from
        if saved:
            check_saved_state(saved, RunState)
        self.run = RunState(**saved["run"]) if saved else RunState()
        self.first_step = self.run.step
        self._build_loaders(saved["data"] if saved else {"next_sample": 0, "sources": None})
        self.checkpoints.begin_line()
        self.exports = self._build_exports()
        self.profiler = StepProfiler(config, self.folder, self.rank, self.device.type, self.run.step)
        self.watchdog = Watchdog(config.job.timeout_seconds, self.rank, self.folder / "run.log")
        self.metrics_log = self._open_metrics_log() if self.rank == 0 else None
        self.peak = peak_flops(device_name(self.device), config.training.compute_dtype)
        self.losses: list[float] = []
        """Of the steps of this launch."""
        self.validated: tuple[int, float] | None = None
        """Step and loss of the last validation."""

    def _build_loaders(self, data: dict) -> None:
        config, dp_rank, dp_size = self.config, self.mesh.dp_rank, self.mesh.sizes.dp
        self.loader = build_loader(config, dp_rank, dp_size, data["next_sample"], states=data["sources"])
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

    def _open_metrics_log(self) -> MetricsLog:
        log = MetricsLog(self.folder, self.config.metrics.tensorboard, self.run.step)
        if log.unreadable_lines:
            self.console.warning(f"{log.unreadable_lines} unreadable lines were removed from metrics.jsonl")
        return log

    def train(self) -> State:
        """Train up to `training.steps`, or until a signal; save at the end of either."""
        last_step = self.config.training.steps
        with self.watchdog, self.console.training(self.run.step, last_step, show_mfu=self.peak is not None):
            while self.run.step < last_step and not self._agreed_to_stop():
                result, lr = self._step()
                self._count(result)
                validation = self._validate() if self._is_due(self.config.validation.interval) else None
                if validation or self._is_due(self.config.metrics.interval) or self.run.step in (1, last_step):
                    self._log(result, lr, validation)
                self.console.advance(self.run.step)
                self.checkpoints.poll()
                if self.checkpoints.should_save(self.run.step):
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
        return bool(self.mesh.max_over_all(torch.tensor(int(bool(self.stop)))))

    def _step(self) -> tuple[StepResult, float]:
        lr = learning_rate(self.config.lr_schedule, self.config.optimizer.lr, self.run.step)
        compiling = self.config.compile.enable and self.run.step - self.first_step < COMPILING_STEPS
        self.profiler.before_step(self.run.step + 1)
        with self.ledger.step(compiling):
            with self.ledger.waiting_for_data():
                micro_batches = next(self.loader)
            result = self.learner.step(micro_batches, lr)
        self.profiler.after_step(self.run.step + 1)
        if result.skipped:
            self._report_skip(result, micro_batches)
        return result, lr

    def _count(self, result: StepResult) -> None:
        """Add a step to the run.

        Raises:
            UserError: too many steps in a row changed nothing.
        """
        training = self.config.training
        self.run = RunState(
            step=self.run.step + 1,
            tokens=self.run.tokens + self._tokens_per_step,
            skipped_in_a_row=self.run.skipped_in_a_row + 1 if result.skipped else 0,
        )
        self.losses.append(result.loss)
        if self.run.skipped_in_a_row > training.max_skipped_steps:
            raise UserError(
                f"the loss or gradient norm of the last {self.run.skipped_in_a_row} steps was not finite, and "
                f"training.max_skipped_steps is {training.max_skipped_steps}; lower optimizer.lr or training.max_norm, "
                f"or look at the samples that {self.folder / 'run.log'} names"
            )

    def _report_skip(self, result: StepResult, micro_batches: list[MicroBatch]) -> None:
        by_rank: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, [sample for batch in micro_batches for sample in batch.samples])
        samples = sorted({sample for samples in by_rank for sample in samples})
        self.console.note(
            f"step {self.run.step + 1} skipped: loss {result.loss}, gradient norm {result.grad_norm}; its samples are "
            f"{samples[0]} to {samples[-1]}"
        )

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.run.step % interval == 0

    def _validate(self) -> ValidationResult | None:
        """What a validation finds; None if a signal ends it."""
        assert self.validation_loader is not None
        with self.ledger.measure(Kind.VALIDATION):
            result = validate(
                self.learner, self.validation_loader, self.token_bytes, lambda: self._agreed_to_stop("validation")
            )
        if result:
            self.validated = (self.run.step, result.loss)
        return result

    def _save(self) -> None:
        """Save all that decides what comes next.

        There is no random state among it, since no step draws from one: weights and data are keyed by the seed, and
        there is no dropout. Nor are there running sums of metrics: every logged number is of its own step, or of the
        wall clock.
        """
        self.watchdog.step(self.run.step, "checkpoint")
        with self.ledger.measure(Kind.CHECKPOINT):
            self.checkpoints.wait()
            self._poll_exports()  # so that the export of the last one has begun before this one takes its place
            by_rank: list[dict] = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(by_rank, self.loader.state_dict())
            data = merge_state_dicts(by_rank)
            trainer_state = {"tokens": self.run.tokens, "run": asdict(self.run), "data": data}
            self.checkpoints.save(
                self.run.step,
                self.learner.state(),
                trainer_state,
                data_fingerprint={name: state["fingerprint"] for name, state in data["sources"].items()},
                validation_loss=self.validated[1] if self.validated and self.validated[0] == self.run.step else None,
            )

    def _log(self, result: StepResult, lr: float, validation: ValidationResult | None) -> None:
        speed = self.ledger.throughput(self._tokens_per_step)
        flops = flops_per_token(self.config.model, self.config.training.seq_len).causal
        tflops = tflops_per_device(speed.tokens_per_second, flops, self.mesh.sizes.world_size)
        balance = self.learner.load_balance.measure()
        metrics = StepMetrics(
            step=self.run.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens=self.run.tokens,
            **asdict(speed),
            mfu=mfu(tflops, self.peak),
            tflops=tflops,
            memory_peak_bytes=self.memory_peak_bytes(),
            time=time.time(),
            validation_loss=validation.loss if validation else None,
            validation_bits_per_byte=validation.bits_per_byte if validation else None,
            **(vars(balance) if balance else {}),
        )
        self.console.step(metrics)
        if self.metrics_log:
            self.metrics_log.write(metrics)
            write_status(self.folder, "running", self.run.step)

    def memory_peak_bytes(self) -> int:
        """The most that any rank has held; all ranks must call it."""
        return int(self.mesh.max_over_all(torch.tensor(memory_peak_bytes(self.device.type))))

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
        _on_first_rank_in_its_own_time(lambda: exports.finish(lambda: stopped or bool(self.stop)))

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


def _on_first_rank_in_its_own_time(work: Callable[[], None]) -> None:
    """Do something slow on rank 0 while the others wait, longer than a collective may take."""
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    on_rank_zero(patient, work)
    dist.destroy_process_group(patient)


def run_folder(config: Config) -> Path:
    """Where a run writes everything."""
    return Path(config.job.output_dir or f"runs/{config.job.name}")


def device_type(job: LoadedConfig) -> str:
    """ "cpu" or "cuda".

    Raises:
        ConfigError: cuda is asked for, and there is none.
    """
    wanted, available = job.config.job.device, torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise job.error("job.device", 'device is "cuda", but torch sees no CUDA device here; use "auto" or "cpu"')
    return "cpu" if wanted == "cpu" or not available else "cuda"


def device_name(device: torch.device) -> str:
    """As the data sheets call it, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
