"""Receivers of a run's records besides `metrics.jsonl`: TensorBoard, W&B, or a class of your own.

A sink is a class that is called with a `SinkRun` and has two methods, `write` and `close`. `metrics.sink =
"my_module:MySink"` names one:

    class MySink:
        def __init__(self, run):            # once per launch, on the first rank
            self.file = open(run.folder / "losses.txt", "a")

        def write(self, record):            # each line of metrics.jsonl, as a dict
            if "loss" in record:
                print(record["step"], record["loss"], file=self.file)

        def close(self):                    # at the end of the launch, and before the run goes back
            self.file.close()

All of it runs in a thread (`worker.py`), so a sink may be slow, may hang and may raise: training continues.

After a resume, steps that were written may come again, as others. `SinkRun.first_step` says from which step on, and
`SinkRun.history` repeats the records before it for a store that can't forget: it begins again (`line.py`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.guards.outages import Outages

Record = dict[str, Any]
"""A line of metrics.jsonl: of a step, of an evaluation (its key `evaluation`), or of a validation that is repeated
(`validation_loss` without `loss`). Keys without a value are left out; a number that is not finite is itself, where the
file has null."""

TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "validation_loss": "validation/loss",
    "validation_perplexity": "validation/perplexity",
    "validation_bits_per_byte": "validation/bits_per_byte",
    "validation_by_source": "validation",
    "validation_average_loss": "validation/average_loss",
    "evaluation": "evaluation",
    "tokens_per_second": "speed/tokens_per_second",
    "step_seconds": "speed/step_seconds",
    "data_seconds": "speed/data_seconds",
    "mfu": "speed/mfu",
    "tflops": "speed/tflops",
    "lag_seconds": "speed/lag_seconds",
    "goodput": "speed/goodput",
    "seconds_by_kind": "time",
    "memory_peak_bytes": "memory/peak_bytes",
    "memory_reserved_peak_bytes": "memory/reserved_peak_bytes",
    "memory_percent": "memory/percent_reserved",
    "allocator_retries": "memory/allocator_retries",
    "allocator_ooms": "memory/allocator_ooms",
    "load_imbalance": "router/load_imbalance",
    "router_entropy": "router/entropy",
    "router_entropies": "router/entropy_of_layer",
    "repeated_steps": "router/repeated_steps",
    "max_attention_logit": "attention/max_logit",
    "multi_token_losses": "loss/multi_token",
    "distillation_loss": "loss/distillation",
    "layer_grad_norms": "details/grad_norm",
    "layer_activation_rms": "details/activation_rms",
    "grad_noise_scale": "details/grad_noise_scale",
    "grad_noise_trace": "details/grad_noise_trace",
    "grad_signal": "details/grad_signal",
}
"""The name of a key's curve; of a key with a table, the beginning of its curves' names."""


@dataclass(frozen=True)
class SinkRun:
    """The facts of the run that a sink gets when it is opened."""

    name: str
    """job.name."""
    folder: Path
    """The run folder, which exists."""
    config: dict[str, Any]
    """The resolved config, table by table."""
    outages: Outages
    """Reports a file that can't be written, once."""
    first_step: int = 1
    """The first step that this launch may write; what was written of it and of later steps is no longer true."""
    metrics: Path | None = None
    """The run's metrics.jsonl, cut back to the steps before `first_step`."""
    metrics_bytes: int = 0
    """Its size then; what is appended later comes to `write`."""

    def history(self) -> Iterator[Record]:
        """The run's records before `first_step`, in the order of the file."""
        if self.metrics is None:
            return
        with self.metrics.open("rb") as file:
            while file.tell() < self.metrics_bytes and (line := file.readline()):
                yield {key: value for key, value in json.loads(line).items() if value is not None}


class Sink(Protocol):
    """The interface of a sink; the class itself is called with a `SinkRun`."""

    def write(self, record: Record) -> None:
        """Take a record. What it raises is reported once, and the next record is tried."""

    def close(self) -> None:
        """Finish what was written."""


def curves(record: Record) -> dict[str, float]:
    """The numbers of a record, by the names of their curves; a table's are named tag/key, at any depth."""
    found: dict[str, float] = {}
    for key, tag in TAGS.items():
        if key in record:
            _add_curves(found, tag, record[key])
    return found


def _add_curves(found: dict[str, float], tag: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _add_curves(found, f"{tag}/{key}", each)
    elif isinstance(value, (int, float)):
        found[tag] = value
