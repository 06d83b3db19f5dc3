"""Weights & Biases: `metrics.wandb = true`.

W&B's own settings apply (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, `wandb login`); its files are in `wandb/` in the run
folder. Every curve is over `step`. W&B can't take back a step: where that is needed, a new W&B run of the same group
gets the history. Offline each launch makes such a run, and moves the older ones to `wandb/abandoned/`, so that
`wandb sync runs/debug/wandb/offline-run-*` uploads one whole run.
"""

import uuid
from pathlib import Path
from typing import Any

from trainer.report.sinks.line import Line
from trainer.report.sinks.sink import Record, SinkRun, curves


class WandB:
    """Writes the curves of a run to W&B."""

    def __init__(self, run: SinkRun) -> None:
        import wandb

        self._wandb: Any = wandb
        self._line = Line(run.folder / "wandb" / "keel.json", run.first_step)
        is_online = wandb.setup().settings.mode in ("online", "shared")
        continues = bool(is_online and self._line.continues and self._line.before)
        name = self._line.before if continues and self._line.before else uuid.uuid4().hex[:8]
        if not continues:
            _set_aside(run.folder / "wandb")
        self._run: Any = wandb.init(
            id=name,
            resume="allow",
            name=run.name,
            group=run.name,
            dir=run.folder,
            config=run.config,
            settings=wandb.Settings(console="off", silent=True),
        )
        self._line.begin(name)
        self._run.define_metric("*", step_metric="step")
        for record in () if continues else run.history():
            self.write(record)

    def write(self, record: Record) -> None:
        """Log a record's curves, and its experts' loads as histograms."""
        self._line.last_step = max(self._line.last_step, record["step"])
        shown: dict[str, Any] = {"step": record["step"], **curves(record)}
        for layer, tokens in record.get("tokens_per_expert", {}).items():
            bars = (tokens, list(range(len(tokens) + 1)))
            shown[f"router/tokens_per_expert/{layer}"] = self._wandb.Histogram(np_histogram=bars)
        self._run.log(shown)

    def close(self) -> None:
        """Finish the run there."""
        self._run.finish()
        self._line.close()


def _set_aside(folder: Path) -> None:
    """Move the offline runs of earlier launches away, whose history the new one repeats."""
    for old in sorted(folder.glob("offline-run-*")):
        aside = folder / "abandoned"
        aside.mkdir(exist_ok=True)
        old.rename(aside / old.name)
