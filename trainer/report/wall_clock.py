"""Where the wall clock of a run goes, over all its launches.

Each record in `metrics.jsonl` has the seconds by kind since the record before it, and the first one of a launch also
describes the launch. A resume cuts the records of lost steps, and with them their seconds; the launches that they
describe are moved to the next record, so that no launch is forgotten. The file alone thus tells the *goodput*: the
seconds that trained steps which the run still has, over all seconds since its first launch.
"""

import socket
import time
from pathlib import Path
from typing import Any

import torch

from checkpoint.incarnation import Incarnation
from configs.elastic import Choice
from configs.schema import Config
from configs.untrusted import shortened
from parallelisms.mesh import Mesh
from trainer.guards.environment import device_name, environment
from trainer.lifecycle import read_status
from trainer.report.metrics import Kind, TimeLedger, read_records

_REASON_CHARACTERS = 500


class WallClock:
    """Accounts for a launch's time in the records of its steps; every rank has one, and rank 0's is written."""

    def __init__(self, ledger: TimeLedger, launch: dict[str, Any]) -> None:
        """`launch`: from `describe_launch`."""
        self._ledger = ledger
        self._seconds = dict.fromkeys(Kind, 0.0)
        self._trained = 0.0
        self._started = launch["started"]
        self._unwritten = [launch]

    def open(self, metrics: Path, step: int, goes_on: bool) -> None:
        """Begin after `step` steps; call it before the later records are cut from `metrics`.

        Args:
            goes_on: whether these steps, or lost ones, belong to the same run; otherwise its clock starts now.
        """
        self._trained = 0.0
        lost = []
        starts = [launch["started"] for launch in self._unwritten]
        for record in read_records(metrics) if goes_on else ():
            launches = record.get("launches")
            spent = record.get("seconds_by_kind")
            launches = [each for each in launches if _seconds(each, "started")] if isinstance(launches, list) else []
            starts += [launch["started"] for launch in launches]
            if record["step"] <= step:
                self._trained += _seconds(spent, Kind.TRAINING.key)
            else:
                lost += launches
        self._unwritten = lost + self._unwritten
        self._started = min(starts, default=self._started)  # none, if somebody has removed the file since

    def record(self, now: float) -> dict[str, Any]:
        """The keys of `StepMetrics` that account for the time since the last call; `now`: seconds since the epoch."""
        seconds = self._ledger.seconds()
        spent = {kind.key: round(seconds[kind] - self._seconds[kind], 6) for kind in Kind}
        self._seconds = seconds
        launches = self._unwritten
        self._unwritten = []
        self._trained += spent[Kind.TRAINING.key]
        wall = now - self._started  # not positive if the host's clock was set back
        goodput = min(1.0, self._trained / wall) if wall > 0 else None
        return {"launches": launches or None, "seconds_by_kind": spent, "goodput": goodput}


def describe_launch(
    config: Config,
    mesh: Mesh,
    first_step: int,
    ledger: TimeLedger,
    choice: Choice | None,
    incarnation: Incarnation | None,
) -> dict[str, Any]:
    """Describe this launch for `StepMetrics.launches`.

    Args:
        first_step: steps completed before it.
        ledger: created when the launch began.
        choice, incarnation: of an elastic run; None of another.
    """
    elastic = {"incarnation": incarnation.number} if incarnation else {}
    if choice:
        elastic |= {"idle_ranks": choice.idle}
    return {
        "started": time.time() - sum(ledger.seconds().values()),
        "step": first_step,
        "ranks": torch.distributed.get_world_size(),
        "mesh": {axis: size for axis, size in mesh.sizes.axes.items() if size > 1},
        "device": device_name(mesh.device),
        "host": socket.gethostname(),
        "torch": torch.__version__,
        "environment": environment(mesh.device, config.fsdp.cpu_offload),
        "previous": read_status(config.job.folder).get("previous"),
    } | elastic


def end_of(status: dict[str, Any]) -> dict[str, Any] | None:
    """What the next launch records of how the last one ended, from its `status.json`; None if there was none."""
    if not status:
        return None
    reason = shortened(status["reason"].partition("\n")[0], _REASON_CHARACTERS)
    return {"state": status["state"], "step": status["step"], "reason": reason, "time": status["time"]}


def _seconds(of: Any, key: str) -> float:
    """The number under `key`; 0 if a line, which anyone may have edited, has none there."""
    found = of.get(key) if isinstance(of, dict) else None
    return found if isinstance(found, int | float) else 0.0
