"""MLflow, as an example of a sink of one's own: `metrics.sink = "scripts.examples.mlflow_sink:MLflow"`.

It needs the package mlflow or mlflow-skinny. Records go where MLflow's own settings say (MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME), or to `mlflow/` in the run folder. MLflow can't take back a step: where that is needed, a new
MLflow run gets the history, and the old one is deleted (`mlflow gc` removes it for good, and `mlflow runs restore`
brings it back).
"""

import os
import re
from contextlib import suppress
from typing import Any

from trainer.report.sinks.line import Line
from trainer.report.sinks.sink import Record, SinkRun, curves

_BATCH = 900
"""MLflow takes 1,000 values at once."""
_MAX_VALUE = 500
"""Characters of a parameter's value; older servers take no more."""


class MLflow:
    """Writes the curves of a run to MLflow."""

    def __init__(self, run: SinkRun) -> None:
        store = os.environ.get("MLFLOW_TRACKING_URI")
        if not store:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for this
            store = (run.folder / "mlflow").resolve().as_uri()
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._metric_type = Metric
        self._client = MlflowClient(tracking_uri=store)
        self._line = Line(run.folder / "mlflow.json", run.first_step)
        if self._line.continues and self._line.before:
            self._run = self._line.before
            self._client.update_run(self._run, status="RUNNING")
            self._line.begin(self._run)
            return
        created = self._client.create_run(self._experiment(run.name), run_name=run.name)
        self._run = created.info.run_id
        self._line.begin(self._run)
        params = [Param(key, str(value)[:_MAX_VALUE]) for key, value in _flat(run.config).items()]
        for start in range(0, len(params), 100):
            self._client.log_batch(self._run, params=params[start : start + 100])
        self._client.log_batch(self._run, tags=[RunTag("keel.folder", str(run.folder.resolve()))])
        self._repeat(run)
        if self._line.before:
            with suppress(Exception):  # someone may have removed it
                self._client.delete_run(self._line.before)

    def _experiment(self, name: str) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", name)
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name)

    def _repeat(self, run: SinkRun) -> None:
        metrics: list[Any] = []
        for record in run.history():
            metrics += self._metrics(record)
            if len(metrics) > _BATCH:
                self._log(metrics)
                metrics = []
        self._log(metrics)

    def write(self, record: Record) -> None:
        """Log a record's curves."""
        self._line.last_step = max(self._line.last_step, record["step"])
        self._log(self._metrics(record))

    def _log(self, metrics: list[Any]) -> None:
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run, metrics=metrics[start : start + _BATCH])

    def _metrics(self, record: Record) -> list[Any]:
        at = round(record.get("time", 0) * 1000)
        return [self._metric_type(_name(tag), value, at, record["step"]) for tag, value in curves(record).items()]

    def close(self) -> None:
        """End the run there."""
        self._client.set_terminated(self._run)
        self._line.close()


def _name(tag: str) -> str:
    """The tag in the characters that MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", tag)


def _flat(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return flat
