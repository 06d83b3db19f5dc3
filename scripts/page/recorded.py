"""What the folder of a run says of the run: its metrics, its launches, its config and how it ended. No torch here."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import tomli

from checkpoint.manifest import RunChange, read_manifest, step_folder, steps_in
from configs.errors import UserError
from configs.files import exists, is_file, is_link, whole
from configs.reading.keys import flat
from configs.reading.toml_text import value_text
from configs.run_stages import stored_stages
from configs.untrusted import MAX_JSON_BYTES, link_out_of, parse_json, printable, read_file, shortened
from trainer.lifecycle import SILENT_SECONDS, read_status
from trainer.report.metrics import METRICS_NAME, read_lines

Record = Mapping[str, Any]
"""A line of metrics.jsonl."""
AFTER_SAVE = "after_save"
"""Folder with what the commands after a save have left (see `trainer.commands`)."""
_LARGEST = 1e100
"""The largest number that is computed with: squares and sums of such numbers are finite."""
_LATEST = 1e11
"""Seconds since the epoch in the year 5138, and the longest duration."""
_SHORTEST_WALL = 1e-3
"""Seconds of wall clock that can be divided into parts."""


@dataclass(frozen=True)
class Launch:
    """One launch of a run."""

    started: Any
    """Seconds since the epoch, if `is_date`; a stranger's run may hold anything."""
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
        ranks = self.facts.get("ranks")
        axes = plain(self.facts.get("mesh") or "")
        return f"{plain(ranks)} rank{'' if ranks == 1 else 's'}" + (f" ({axes})" if axes else "")


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
    borders: Sequence[int] = ()
    """Steps of the run before each stage but the first."""

    @property
    def state(self) -> str:
        """running, done, preempted, failed; silent: it says that it is running, but has not renewed its status."""
        state = str(self.status.get("state", "unknown"))
        renewed = self.status.get("time")
        is_silent = not is_date(renewed) or time.time() - renewed > SILENT_SECONDS
        return "silent" if state == "running" and is_silent else state

    @property
    def reason(self) -> str:
        """The first line of why it ended; empty if there is none."""
        return str(self.status.get("reason") or "").partition("\n")[0]

    @property
    def step(self) -> int:
        """Steps completed."""
        said = self.status.get("step")
        return max(said if is_step(said) else 0, self.records[-1]["step"] if self.records else 0)

    @cached_property
    def run_changes(self) -> list[RunChange]:
        """Run keys that were changed on a resume, as the newest checkpoint knows them; empty without a readable one."""
        root = self.folder / "checkpoints"
        try:
            return read_manifest(step_folder(root, steps_in(root)[-1])).run_changes
        except (IndexError, OSError, UserError):
            return []

    @cached_property
    def launches(self) -> list[Launch]:
        """All launches that a record describes, in their order."""
        listed = [each for each in self._listed("launches") if is_step(each.get("step"))]
        found = [Launch(each.get("started"), each["step"], each) for each in listed]
        return sorted(found, key=lambda launch: launch.started if is_date(launch.started) else _LATEST)

    @property
    def began(self) -> float | None:
        """When the first launch began, in seconds since the epoch; None if no launch has a date."""
        return next((launch.started for launch in self.launches if is_date(launch.started)), None)

    @cached_property
    def incidents(self) -> list[Mapping[str, Any]]:
        """Spikes, rewinds and healed replicas, each with `step` and `what`."""
        return [each for each in self._listed("incidents") if is_step(each.get("step"))]

    @cached_property
    def absurd(self) -> list[tuple[str, str, str]]:
        """The values left out, lines that can't be read and numbers that can't be meant: where, what, the value."""
        found: list[tuple[str, str, Any]] = []
        if self.unreadable_lines:
            found.append((METRICS_NAME, "lines that can't be read", self.unreadable_lines))
        found += [("status.json", key, value) for key, value in _absurd(self.status)]
        for record in self.records:
            found += [(f"step {record['step']:,}", key, value) for key, value in _absurd(record)]
        return [(where, key, number_text(value)) for where, key, value in found]

    @cached_property
    def commands(self) -> dict[str, list[int]]:
        """The steps after which each command of checkpoint.after_save has succeeded, ascending."""
        found = {folder.name: steps_in(folder) for folder in sorted((self.folder / AFTER_SAVE).glob("*/"))}
        return {name: steps for name, steps in found.items() if steps}

    def printed(self, name: str, step: int) -> str:
        """What a command printed; empty if that can't be read."""
        path = step_folder(self.folder / AFTER_SAVE / name, step).with_suffix(".log")
        try:
            return "" if link_out_of(path) else read_file(path, MAX_JSON_BYTES).decode(errors="replace")
        except OSError:
            return ""

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
                total[kind] = total.get(kind, 0.0) + (value if is_duration(value) else 0.0)
        return total

    def wall_seconds(self) -> float | None:
        """Seconds from the start of the first launch to the last record; None if launches were not recorded."""
        ends = [record["time"] for record in self.records if "loss" in record and is_date(record.get("time"))]
        wall = max(ends) - self.began if self.began is not None and ends else 0.0
        return wall if wall >= _SHORTEST_WALL else None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value from JSON is a number that can be computed with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def is_date(value: Any) -> TypeGuard[float]:
    """Whether a value from JSON is seconds since the epoch that a calendar has."""
    return is_number(value) and 0 <= value < _LATEST


is_duration = is_date
"""Whether a value from JSON is seconds that can have passed."""


def is_step(value: Any) -> TypeGuard[int]:
    """Whether a value from JSON is a number of steps, which a page's script can hold, too."""
    return type(value) is int and 0 <= value < 2**53


def number_text(value: Any) -> str:
    """A value from JSON in a few characters: "1e+18"."""
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"{Decimal(value):.3g}"
    return f"{value:g}" if isinstance(value, (int, float)) else shortened(plain(value), 40)


def plain(value: Any) -> str:
    """A value from JSON as text: "dp_shard 2, tp 4"; a number that can't be meant is short: "1e+400"."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    is_absurd = isinstance(value, (int, float)) and abs(value) > _LARGEST
    return number_text(value) if is_absurd else str(value)


def _absurd(value: Any, path: str = "", is_sane: Callable[[Any], bool] = is_number) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of the numbers that can't be meant, by what numbers under the path should be."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _absurd(item, f"{path}.{key}" if path else key, _EXPECTED.get(key, is_sane))
    elif isinstance(value, list):
        for item in value:
            yield from _absurd(item, path, is_sane)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and not is_sane(value):
        yield path, value


_EXPECTED = dict.fromkeys(("time", "started"), is_date) | {"step": is_step}
_EXPECTED |= dict.fromkeys(("seconds_by_kind", "step_seconds", "data_seconds", "lag_seconds"), is_duration)
"""Tests of the numbers under a key."""


def was_not_finite(record: Record) -> bool:
    """Whether a step changed nothing because its loss or gradient norm was not finite."""
    return any(key in record and record[key] is None for key in ("loss", "grad_norm"))


def run_folders(path: Path) -> list[Path]:
    """The run folder at a path, or the run folders in it and in its folders, by name.

    Raises:
        UserError: there is none.
    """
    if _is_run(path):
        return [path]
    found = [each for pattern in ("*", "*/*") for each in path.glob(pattern) if _is_run(each)]
    if not found:
        has_none = f"it has no {METRICS_NAME} and no status.json, nor has a folder in it"
        raise UserError(f"{whole(path)} is not a run folder: {has_none}")
    links_first = sorted(found, key=is_link, reverse=True)
    once = {each.resolve(): each for each in links_first}  # a link to a run beside it is no further run
    return sorted(once.values(), key=_by_number)


def _by_number(path: Path) -> list[str | int]:
    """The key of an order in which run-9 comes before run-10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def _is_run(folder: Path) -> bool:
    try:
        return is_file(folder / METRICS_NAME) or is_file(folder / "status.json")
    except PermissionError:
        return True  # who reads it says that it can't be read


def read_runs(folders: Sequence[Path], leave_out: Callable[[str], None] | None = None) -> list[Recorded]:
    """Read run folders; each gets the shortest name that tells it from the others.

    Args:
        leave_out: told of each folder that can't be read, if others can.

    Raises:
        UserError: a folder is not a run's, or is given twice.
    """
    resolved = [folder.resolve() for folder in folders]
    for number, folder in enumerate(resolved):
        if folder in resolved[:number]:
            raise UserError(f"{folders[number]} is given twice")
    runs: list[Recorded] = []
    failed: list[UserError] = []
    for folder, name in zip(folders, _names(resolved), strict=True):
        try:
            runs.append(read_run(folder, name))
        except UserError as error:
            failed.append(error)
    for unread in failed:
        if leave_out is None or not runs:
            raise unread
        leave_out(f"{unread}; this run is left out")
    return runs


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
    if not _is_run(folder):
        raise UserError(f"{whole(folder)} is not a run folder: it has no {METRICS_NAME} and no status.json")
    records: dict[int, Record] = {}
    unreadable = 0
    try:
        for line in _lines(folder / METRICS_NAME):
            record = _record(line)
            if record is None:
                unreadable += bool(line.strip())
            else:
                records[record["step"]] = _merged(records.get(record["step"], {}), record)
        config = read_config(folder)
    except OSError as error:
        raise UserError(f"{error.filename or folder} can't be read: {error.strerror}") from None
    ordered = [records[step] for step in sorted(records)]
    borders = [border.after for border, _ in stored_stages(config)[1:]]
    return Recorded(folder, name, ordered, unreadable, read_status(folder), flat(config), borders)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a run's metrics; none before its first logged step."""
    return read_lines(path) if exists(path) else iter(())


def _record(line: str) -> Record | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and is_step(record.get("step")) else None


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


IDENTITY = re.compile(r"job\.(name|output_dir)")
"""Keys in which two runs always differ."""


def differences(configs: list[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The keys in which configs differ, each with its value in every config as TOML ("-": not set)."""
    keys = sorted({key for config in configs for key in config})
    rows = [(key, [_text(config, key) for config in configs]) for key in keys if not IDENTITY.fullmatch(key)]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _text(config: Mapping[str, Any], key: str) -> str:
    return value_text(config[key]) if key in config else "-"
