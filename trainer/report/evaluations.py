"""The results of evaluations: `evaluations/step-00000100/TIME.json` in the run folder, then lines of metrics.jsonl.

Every evaluation leaves a file. Whoever has the run's folder (the run itself while it trains, otherwise `keel evaluate`)
records those that metrics.jsonl lacks. So a result is recorded once, whatever dies in between.
"""

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from checkpoint.manifest import step_folder, steps_in
from configs.files import write_json
from configs.untrusted import MAX_JSON_BYTES, parse_json, read_file
from trainer.report.metrics import METRICS_NAME, EvaluationMetrics, read_records

T = TypeVar("T")
FOLDER = "evaluations"
Scores = dict[str, dict[str, float]]
"""Metrics, such as `acc` and `acc_stderr`, by task and group of tasks."""


def write_result(run_folder: Path, step: int, scores: Scores) -> Path:
    """Write the scores of the checkpoint of `step`; returns the file.

    Raises:
        OSError: the disk refuses.
    """
    folder = step_folder(run_folder / FOLDER, step)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.time():.6f}.json"
    write_json(path, {"step": step, "evaluation": scores})
    return path


def unrecorded(run_folder: Path, known: set[tuple[int, float]]) -> Iterator[EvaluationMetrics]:
    """The results that are not `known` by step and time; they are from then on. Files in another form are left out."""
    root = run_folder / FOLDER
    for step in steps_in(root):
        for path in sorted(step_folder(root, step).glob("*.json")):
            result = _read(path, step)
            if result and (step, result.time) not in known:
                known.add((step, result.time))
                yield result


def _read(path: Path, step: int) -> EvaluationMetrics | None:
    try:
        said = parse_json(read_file(path, MAX_JSON_BYTES))["evaluation"].items()
        scores = {task: {name: _number(value) for name, value in each.items()} for task, each in said}
        return EvaluationMetrics(step, scores, float(path.stem))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _number(value: float | None) -> float:
    """A score, of which JSON has null if it is not finite, as those of a model that has diverged."""
    return math.nan if value is None else float(value)


def recorded(run_folder: Path) -> set[tuple[int, float]]:
    """Step and time of each evaluation in metrics.jsonl."""
    records = read_records(run_folder / METRICS_NAME)
    return {(record["step"], record.get("time", 0.0)) for record in records if "evaluation" in record}


def described(result: EvaluationMetrics, name: str | None = None) -> str:
    """A line for people. `name`: what was done, if it was not the evaluation of a run's step."""
    scores = [
        f"{task} {name} {value:.4f}{_plus_minus(metrics, name)}"
        for task, metrics in result.evaluation.items()
        for name, value in metrics.items()
        if not is_error(name)
    ]
    return f"{name or f'evaluation of step {result.step}'}: {', '.join(scores)}"


def _plus_minus(metrics: Mapping[str, float], name: str) -> str:
    error = error_of(metrics, name)
    return "" if error is None else f" ± {error:.4f}"


def is_error(name: str) -> bool:
    """Whether a metric is the standard error of another: `acc_stderr`, `exact_match_stderr,strict-match`."""
    return name.partition(",")[0].endswith("_stderr")


def error_of(metrics: Mapping[str, T], name: str) -> T | None:
    """The standard error of a metric; None if there is none."""
    metric, comma, how = name.partition(",")
    return metrics.get(f"{metric}_stderr{comma}{how}")
