"""The records of a run: `metrics.jsonl`, and where the time went.

`metrics.jsonl` has one JSON object per logged step, in the file as soon as it is logged, with the keys of `StepMetrics`
in their order. A validated step is always logged, with the keys of the validation added; so is a step with an incident,
such as a spike of the loss, with the key `incidents`. A mixture of experts adds three keys of its own, and so does the
step after a window in which the ranks were compared. docs/metrics.md describes every key. Floats are written with
`repr`, so that reading them back gives the same bits. JSON has no NaN: a non-finite value is null, and the key
`skipped` says what it was. A resume truncates the file to the step that it resumes from, so that no step appears twice.
The result of an evaluation is a line of its own (`EvaluationMetrics`), which may come after those of later steps; so is
that of a validation that a stop has ended, and the next launch repeated (`ValidationMetrics`). The sinks get each
record, too (`sinks/`).

Throughput is that of training alone. `TimeLedger` assigns every second of the process to exactly one kind of work;
tokens per second counts training and waiting for data, but never compilation, validation or checkpoints.
"""

import errno
import json
import math
import resource
import stat
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

from configs.files import AppendedFile, exists, require_plain, write_atomically
from configs.untrusted import parse_json
from trainer.guards.outages import Outages
from trainer.report.sinks.sink import SinkRun
from trainer.report.sinks.worker import Sinks
from trainer.stopwatch import Stopwatch

# --------------------------------------------------------------------------- time


class Kind(StrEnum):
    """A kind of work that a process spends its time on."""

    STARTUP = "start-up"
    PREPARATION = "data preparation"
    COMPILE = "compile"
    TRAINING = "training"
    DATA = "waiting for data"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"

    @property
    def key(self) -> str:
        """Its name in `StepMetrics.seconds_by_kind`: "startup"."""
        return self.name.lower()


@dataclass(frozen=True)
class Throughput:
    """Speed over the steps since the last logged one; all None if they only compiled."""

    tokens_per_second: float | None
    """Tokens of all ranks per second of training and of waiting for data."""
    step_seconds: float | None
    """Mean duration of a step, including waiting for data."""
    data_seconds: float | None
    """Mean time per step spent waiting for data."""


class TimeLedger(Stopwatch[Kind]):
    """Assigns every second since its creation to one kind of work; the sum is the whole time.

    Time outside of `with ledger.measure(kind)` blocks counts as start-up. A nested block's time counts only as its own.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(Kind.STARTUP, clock)
        self._steps = 0
        self._mark = (0, 0.0, 0.0)  # steps, training seconds and data seconds at the last `throughput`

    @contextmanager
    def step(self, compiling: bool = False) -> Iterator[None]:
        """Count one optimizer step as training, or, while torch.compile is at work, as compilation."""
        with self.measure(Kind.COMPILE if compiling else Kind.TRAINING):
            yield
        self._steps += not compiling

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count a wait for the loader inside `step`; in a compiling step it counts as compilation."""
        with self.measure(Kind.COMPILE if self._open[-1] is Kind.COMPILE else Kind.DATA):
            yield

    @contextmanager
    def waiting_for_step(self) -> Iterator[None]:
        """Count a wait for a step that is queued on the device, which before a save comes after its `step` context.

        On an H100, a step before a save was otherwise said to take 10 ms instead of 470.
        """
        with self.measure(Kind.COMPILE if self._open[-1] is Kind.COMPILE else Kind.TRAINING):
            yield

    def seconds(self) -> dict[Kind, float]:
        """Seconds by kind so far."""
        self._book()
        return dict(self._seconds)

    def throughput(self, tokens_per_step: int) -> Throughput:
        """Speed since the last call. If the device runs behind the host, wait for it before (read the loss)."""
        seconds = self.seconds()
        now = (self._steps, seconds[Kind.TRAINING], seconds[Kind.DATA])
        steps, training, data = (new - old for new, old in zip(now, self._mark, strict=True))
        self._mark = now
        if steps == 0:
            return Throughput(None, None, None)
        elapsed = training + data
        return Throughput(steps * tokens_per_step / elapsed, elapsed / steps, data / steps)


# --------------------------------------------------------------------------- memory


def memory_peak_bytes(device_type: str) -> int:
    """Peak memory of this process: of torch's CUDA allocator, or its resident set on a CPU."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if exists(status):  # Linux; getrusage would include what the parent held when it forked this process
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB


@dataclass(frozen=True)
class Memory:
    """Peak memory of a process on its device; the fields are keys of `StepMetrics`."""

    memory_peak_bytes: int
    """Peak of allocated tensors on CUDA; otherwise of the resident set."""
    memory_reserved_peak_bytes: int | None = None
    """Peak that the CUDA allocator has reserved on the device; null on a CPU, like all following fields."""
    memory_percent: float | None = None
    """The reserved peak in percent of the device's memory; near 100 the allocator frees and retries, which is slow."""
    allocator_retries: int | None = None
    """How often it had to free and retry since the process began."""
    allocator_ooms: int | None = None
    """How often memory was insufficient even then."""


def memory_counts(device_type: str) -> list[int]:
    """This process's counts for `memory_of`; over several ranks, take the largest of each."""
    if device_type != "cuda":
        return [memory_peak_bytes(device_type)]
    import torch

    stats = torch.cuda.memory_stats()  # the host's counters, so nothing waits for the device
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms")
    return [*(stats[name] for name in names), total]


def memory_of(counts: list[int]) -> Memory:
    """Interpret `memory_counts`, of one rank or the largest over all ranks."""
    if len(counts) == 1:
        return Memory(*counts)
    allocated, reserved, retries, ooms, total = counts
    return Memory(allocated, reserved, 100 * reserved / total, retries, ooms)


# --------------------------------------------------------------------------- the record


@dataclass(frozen=True)
class StepMetrics:
    """One logged step, as written to `metrics.jsonl`."""

    step: int
    """Optimizer steps completed since the start of the run."""
    loss: float
    """Mean cross-entropy, in nats, over all valid target tokens of the step's global batch."""
    grad_norm: float
    """Global norm of the gradients before clipping."""
    lr: float
    """Learning rate of this step, before any group's scale."""
    tokens: int
    """Tokens trained on since the start of the run."""
    tokens_per_second: float | None
    """Tokens per second of all ranks; null if every step since the last line compiled."""
    step_seconds: float | None
    data_seconds: float | None
    mfu: float | None
    """Model FLOPs utilization, 0 to 1 (trainer/planning/flops.py); null if the device's peak is unknown."""
    tflops: float | None
    """Model TFLOP/s per device, counted as for mfu."""
    memory_peak_bytes: int
    """The largest over the ranks, since this launch began; see `Memory` for this and the other memory keys."""
    memory_reserved_peak_bytes: int | None
    memory_percent: float | None
    allocator_retries: int | None
    allocator_ooms: int | None
    time: float
    """Seconds since the epoch."""
    validation_loss: float | None = None
    """Mean over all valid target tokens of the validation, in nats."""
    validation_perplexity: float | None = None
    """exp of validation_loss."""
    validation_bits_per_byte: float | None = None
    """Bits per byte of text of all sources together; null without a tokenizer."""
    validation_by_source: dict[str, dict[str, float | None]] | None = None
    """Each source's own `loss`, `perplexity` and `bits_per_byte`, by its name."""
    validation_average_loss: float | None = None
    """The loss of the average of the weights; null if [average] keeps none, or it has not begun."""
    validation_stopped: bool | None = None
    """True if a stop ended the validation; the next launch repeats it (`ValidationMetrics`)."""
    tokens_per_expert: dict[int, list[int]] | None = None
    """Tokens of the step's global batch sent to each expert of a mixture, by layer number."""
    load_imbalance: float | None = None
    """The busiest expert's tokens over the mean of its layer's experts, for the most uneven layer; 1 is even."""
    router_entropy: float | None = None
    """Entropy of the router's scores, in nats, averaged over tokens and layers."""
    router_entropies: dict[int, float] | None = None
    """That of each layer, by its number."""
    repeated_steps: int | None = None
    """Steps of this launch so far that were computed again, since a buffer of experts was too small."""
    max_attention_logit: float | None = None
    """The step's largest logit of any head, with optimizer.qk_clip."""
    multi_token_losses: dict[str, float] | None = None
    """Mean cross-entropy of each module that predicts further tokens, over its valid targets, by depth from "1"."""
    distillation_loss: float | None = None
    """Mean divergence from the teacher over the valid targets, in nats, without the square of the temperature."""
    incidents: list[dict[str, Any]] | None = None
    """The run's incidents since the previous line (see docs/faults.md)."""
    slowest_rank: int | None = None
    """The rank that kept the others waiting longest in the last window in which ranks were compared."""
    lag_seconds: float | None = None
    """How long it kept them waiting, per step."""
    phase_seconds: dict[str, float] | None = None
    """Time per step outside of collectives, by phase, on the rank that spent the most."""
    layer_grad_norms: dict[str, float | None] | None = None
    """Measured with metrics.details_interval, like the next four keys: see docs/metrics.md."""
    layer_activation_rms: dict[str, float | None] | None = None
    grad_noise_scale: float | None = None
    grad_noise_trace: float | None = None
    grad_signal: float | None = None
    launches: list[dict[str, Any]] | None = None
    """The launches since the previous line (`describe_launch`), with those whose lines a resume has removed."""
    seconds_by_kind: dict[str, float] | None = None
    """Seconds of rank 0 since the previous line of this launch, or since its start, by `Kind.key`; the sum is all."""
    goodput: float | None = None
    """Seconds that trained the steps up to here over all seconds since the run's first launch began, 0 to 1."""
    plan: dict[str, dict[str, float]] | None = None
    """`planned` and `measured` by quantity, in the run's last line (trainer/report/beside_plan.py)."""
    planned_parts: dict[str, float] | None = None
    """Planned seconds of a step by part, in the run's last line."""

    def to_json(self) -> str:
        """Format as one line of JSON; the keys of validation, experts and lag are left out if they have no value."""
        return _json({key: value for key, value in asdict(self).items() if value is not None or key not in _OPTIONAL})


@dataclass(frozen=True)
class ValidationMetrics:
    """The result of a validation that the launch before was stopped in, as written to `metrics.jsonl`."""

    step: int
    """Steps of the run before it; the other keys are those of `StepMetrics`."""
    validation_loss: float
    validation_perplexity: float
    validation_bits_per_byte: float | None
    validation_by_source: dict[str, dict[str, float | None]]
    validation_average_loss: float | None
    time: float

    def to_json(self) -> str:
        """Format as one line of JSON."""
        return _json({key: value for key, value in asdict(self).items() if value is not None})


@dataclass(frozen=True)
class EvaluationMetrics:
    """The result of an evaluation of a checkpoint, as written to `metrics.jsonl`."""

    step: int
    """The checkpoint's."""
    evaluation: dict[str, dict[str, float]]
    """Each task's metrics, such as `acc` and `acc_stderr`, by its name."""
    time: float
    """Seconds since the epoch, when it ended."""

    def to_json(self) -> str:
        """Format as one line of JSON."""
        return _json(asdict(self))


Metrics = StepMetrics | ValidationMetrics | EvaluationMetrics
"""A line of `metrics.jsonl`."""


def _json(record: dict[str, Any]) -> str:
    bad: list[str] = []
    record = {key: _finite(value, key, bad) for key, value in record.items()}
    if bad:
        record["skipped"] = ", ".join(bad)
    return json.dumps(record, allow_nan=False)


def _finite(value: Any, name: str, bad: list[str]) -> Any:
    """The value, also of tables in tables, with null for what is not finite; `bad` then gets its name and value."""
    if isinstance(value, dict):
        return {key: _finite(each, f"{name}.{key}", bad) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(f"{name} is {value}")
        return None
    return value


_OPTIONAL = {field.name for field in fields(StepMetrics) if field.default is None}


METRICS_NAME = "metrics.jsonl"


class MetricsLog:
    """The run folder's `metrics.jsonl`, and the run's sinks. Only rank 0 has one."""

    def __init__(
        self,
        run_folder: Path,
        outages: Outages,
        resumed_step: int = 0,
        sinks: Sinks | None = None,
        name: str = "",
        config: dict[str, Any] | None = None,
        before_writing: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            run_folder: must exist.
            outages: told if a record can't be written; the record is then kept for the next time.
            resumed_step: records of later steps are removed; 0 removes everything.
            sinks: get the records, too.
            name, config: for the sinks (see `SinkRun`).
            before_writing: called before each record, and by `flush`; its error is raised, and nothing is written.

        Raises:
            OSError: the file can't be truncated, or is a link.
        """
        path = run_folder / METRICS_NAME
        self.unreadable_lines = cut_back(path, resumed_step)
        """Number of lines removed because they were not JSON, as after a kill in the middle of one."""
        self._outages = outages
        self._file = AppendedFile(path)
        self._file.touch()  # a run that is stopped before its first step has an empty file, not none
        self._before_writing = before_writing or (lambda: None)
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        self._written: list[futures.Future[None]] = []
        self._sinks = sinks or Sinks({}, print)
        self._sinks.open(SinkRun(name, run_folder, config or {}, outages, resumed_step + 1, path, path.stat().st_size))

    def write(self, metrics: Metrics, afterwards: Callable[[], None] = lambda: None) -> None:
        """Append a record, then call `afterwards`; in a thread, since a disk may be slower than a step."""
        self._wait(timeout=0)
        self._written.append(self._thread.submit(self._write, metrics, afterwards))

    def _write(self, metrics: Metrics, afterwards: Callable[[], None]) -> None:
        self._before_writing()
        self._file.write(f"{metrics.to_json()}\n".encode())
        self._outages.flush(self._file)
        self._sinks.put({key: value for key, value in asdict(metrics).items() if value is not None})
        afterwards()

    def close(self) -> None:
        """Write the records still pending, or report that they are missing."""
        self._wait()
        self._thread.shutdown()
        self._outages.give_up(self._file)
        self._sinks.close()

    def flush(self) -> None:
        """Write pending records; called before a save, so that no earlier step is missing."""
        self._wait()
        self._before_writing()
        self._outages.flush(self._file)
        self._sinks.flush()

    def _wait(self, timeout: float | None = None) -> None:
        """Wait for what `write` was given; raises what its thread raised."""
        for done in futures.wait(self._written, timeout).done:
            self._written.remove(done)
            done.result()


_MAX_RECORD_CHARACTERS = 1 << 20


def cut_back(path: Path, step: int) -> int:
    """Keep only the steps up to `step` of a `metrics.jsonl`; returns how many unreadable lines were removed as well.

    The file is replaced atomically, so a crash in here leaves the old one. A file that needs no change is not touched.

    Raises:
        OSError: the file can't be written, or is not a plain file.
    """
    require_plain(path)
    if not exists(path):
        return 0
    steps = [record["step"] if record else None for record in map(_record, read_lines(path))]
    keeps = [found is not None and found <= step for found in steps]
    if not all(keeps):
        write_atomically(path, compress(read_lines(path), keeps))
    return steps.count(None)


def last_step(path: Path) -> int:
    """The last step of a `metrics.jsonl`; 0 if there is none."""
    return max((record["step"] for record in read_records(path)), default=0)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a `metrics.jsonl`, each with its step; lines that are none are left out."""
    if exists(path):
        yield from filter(None, map(_record, read_lines(path)))


def lacks_validation(path: Path, step: int) -> bool:
    """Whether a stop ended the validation after `step` steps, and no launch since has repeated it."""
    keys = {key for record in read_records(path) if record["step"] == step for key in record}
    return "validation_stopped" in keys and "validation_loss" not in keys


def repeated_validations(path: Path) -> dict[int, float]:
    """The losses of validations that have a record of their own, by step: the checkpoints were saved before."""
    validations = (record for record in read_records(path) if "loss" not in record and record.get("validation_loss"))
    return {record["step"]: record["validation_loss"] for record in validations}


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a file with their line ends; a very long one, which is not a record, comes in parts.

    Raises:
        OSError: it can't be read, or is a pipe or a device, whose reading might never end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        yield from iter(partial(file.readline, _MAX_RECORD_CHARACTERS), "")


def _record(line: str) -> dict[str, Any] | None:
    """What a line records; None if the line is not a complete record."""
    try:
        record = parse_json(line) if line.endswith("\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None
