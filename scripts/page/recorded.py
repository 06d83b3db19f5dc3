"""What the folder of a run says of the run: its metrics, its launches, its config and how it ended. No torch here."""

import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli

from checkpoint.manifest import RunChange, read_manifest, step_folder, steps_in
from configs.errors import UserError
from configs.reading.toml_text import value_text
from configs.untrusted import MAX_JSON_BYTES, parse_json, printable, read_file
from trainer.lifecycle import read_status
from trainer.report.metrics import METRICS_NAME, read_lines

SILENT_SECONDS = 120.0
"""A run renews its status every 30 s."""
Record = Mapping[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True)
class Launch:
    """One launch of a run."""

    started: float
    """Seconds since the epoch."""
    step: int
    """Steps completed before it."""
    facts: Mapping[str, Any]
    """Further keys of `trainer.report.wall_clock.describe_launch`."""

    @property
    def previous(self) -> Mapping[str, Any]:
        """How the launch before it ended: state, step, reason, time; empty if there was none."""
        found = self.facts.get("previous")
        return found if isinstance(found, dict) else {}

    @property
    def mesh(self) -> str:
        """ "2 ranks (dp_shard 2)"."""
        ranks, mesh = self.facts.get("ranks"), self.facts.get("mesh")
        axes = ", ".join(f"{axis} {size}" for axis, size in mesh.items()) if isinstance(mesh, dict) else ""
        return f"{ranks} rank{'' if ranks == 1 else 's'}" + (f" ({axes})" if axes else "")


@dataclass(frozen=True)
class Recorded:
    """A run as its folder has recorded it."""

    folder: Path
    name: str
    """Unique among the runs that are shown together."""
    records: list[Record]
    """The lines of metrics.jsonl, by ascending step."""
    unreadable_lines: int
    status: Mapping[str, Any]
    """status.json; empty if there is none."""
    config: Mapping[str, Any]
    """config.toml, by dotted key; empty if there is none."""

    @property
    def state(self) -> str:
        """running, done, preempted, failed; silent: it says that it is running, but has not renewed its status."""
        state = str(self.status.get("state", "unknown"))
        return "silent" if state == "running" and time.time() - self.status["time"] > SILENT_SECONDS else state

    @property
    def step(self) -> int:
        """Steps completed."""
        return max(int(self.status.get("step", 0)), self.records[-1]["step"] if self.records else 0)

    @cached_property
    def run_changes(self) -> list[RunChange]:
        """Run keys that were changed on a resume, as the newest checkpoint knows them; empty without a readable one."""
        root = self.folder / "checkpoints"
        try:
            return read_manifest(step_folder(root, steps_in(root)[-1])).run_changes
        except (IndexError, UserError):
            return []

    @cached_property
    def launches(self) -> list[Launch]:
        """All launches that a record describes, in their order."""
        found = []
        for each in self._listed("launches"):
            if is_number(each.get("started")) and type(each.get("step")) is int:
                found.append(Launch(each["started"], each["step"], each))
        return sorted(found, key=lambda launch: launch.started)

    @cached_property
    def incidents(self) -> list[Mapping[str, Any]]:
        """Spikes, rewinds and healed copies, each with `step` and `what`."""
        return [each for each in self._listed("incidents") if type(each.get("step")) is int]

    def _listed(self, key: str) -> Iterator[Mapping[str, Any]]:
        for record in self.records:
            listed = record.get(key)
            yield from (each for each in (listed if isinstance(listed, list) else ()) if isinstance(each, dict))

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """The steps at which a key has a finite number, and the numbers."""
        points = [(record["step"], record[key]) for record in self.records if is_number(record.get(key))]
        return [step for step, _ in points], [value for _, value in points]

    def last(self, key: str) -> float | None:
        """The newest finite number of a key; None if there is none."""
        return next((record[key] for record in reversed(self.records) if is_number(record.get(key))), None)

    def seconds(self) -> dict[str, float]:
        """Seconds by kind of all steps that the run still has; empty if they were not recorded."""
        total: dict[str, float] = {}
        for record in self.records:
            spent = record.get("seconds_by_kind")
            for kind, value in spent.items() if isinstance(spent, dict) else ():
                total[kind] = total.get(kind, 0.0) + (value if is_number(value) else 0.0)
        return total

    def wall_seconds(self) -> float | None:
        """Seconds from the start of the first launch to the last record; None if launches were not recorded."""
        ends = [record["time"] for record in self.records if "loss" in record and is_number(record.get("time"))]
        return max(0.0, max(ends) - self.launches[0].started) if self.launches and ends else None


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def was_not_finite(record: Record) -> bool:
    """Whether a step changed nothing because its loss or gradient norm was not finite."""
    return any(key in record and record[key] is None for key in ("loss", "grad_norm"))


def read_runs(folders: list[Path]) -> list[Recorded]:
    """Read run folders; each gets the shortest name that tells it from the others.

    Raises:
        UserError: a folder is not a run's, or is given twice.
    """
    resolved = [folder.resolve() for folder in folders]
    for number, folder in enumerate(resolved):
        if folder in resolved[:number]:
            raise UserError(f"{folders[number]} is given twice")
    return [read_run(folder, name) for folder, name in zip(folders, _names(resolved), strict=True)]


def _names(folders: list[Path]) -> list[str]:
    """The last part of each path, and as many before it as it takes to be unique."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return [printable(name) for name in names]


def read_run(folder: Path, name: str) -> Recorded:
    """Read one run folder.

    Raises:
        UserError: it is not a run folder, or a file in it can't be read.
    """
    if not (folder / METRICS_NAME).is_file():
        raise UserError(f"{folder} is not a run folder: it has no {METRICS_NAME}")
    records: dict[int, Record] = {}
    unreadable = 0
    try:
        for line in read_lines(folder / METRICS_NAME):
            record = _record(line)
            if record is None:
                unreadable += bool(line.strip())
            else:
                records[record["step"]] = _merged(records.get(record["step"], {}), record)
        config = flat(read_config(folder))
    except OSError as error:
        raise UserError(f"{error.filename or folder} can't be read: {error.strerror}") from None
    ordered = [records[step] for step in sorted(records)]
    return Recorded(folder, name, ordered, unreadable, read_status(folder), config)


def _record(line: str) -> Record | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _merged(known: Record, record: Record) -> Record:
    """What two lines say of a step: of two that trained, the later counts; others, as of an evaluation, add keys."""
    if "loss" in record:
        return {**known, **record}
    added = {key: value for key, value in record.items() if key not in known}
    tables = {
        key: {**known[key], **value}
        for key, value in record.items()
        if isinstance(value, dict) and isinstance(known.get(key), dict)
    }
    return {**known, **added, **tables}


def read_config(folder: Path) -> dict[str, Any]:
    """The tables of a run's config.toml; empty if there is none.

    Raises:
        UserError: it is not TOML.
        OSError: it can't be read.
    """
    path = folder / "config.toml"
    try:
        return tomli.loads(read_file(path, MAX_JSON_BYTES).decode())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a job file: {error}") from None


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys; a list of tables is numbered ("data.sources.0.path")."""
    is_tables = isinstance(config, list) and any(isinstance(each, dict) for each in config)
    if not isinstance(config, dict) and not is_tables:
        return {prefix.removeprefix("."): config}
    items = config.items() if isinstance(config, dict) else enumerate(config)
    return {key: leaf for name, value in items for key, leaf in flat(value, f"{prefix}.{name}").items()}


IDENTITY = re.compile(r"job\.(name|output_dir)")
"""Keys in which two runs always differ."""


def differences(configs: list[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The keys in which configs differ, each with its value in every config as TOML ("-": not set)."""
    keys = sorted({key for config in configs for key in config})
    rows = [(key, [_text(config, key) for config in configs]) for key in keys if not IDENTITY.fullmatch(key)]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _text(config: Mapping[str, Any], key: str) -> str:
    return value_text(config[key]) if key in config else "-"
