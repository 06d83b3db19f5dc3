"""What `keel plan --tune` prints and writes: the best ways to run a job, or the best for each number of ranks."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError, UserError
from configs.files import exists, is_folder
from configs.layout import mesh_sizes
from configs.load import LoadedConfig, find_job_file, load
from configs.reading.keys import flat
from configs.reading.merge import JOB_FILES
from configs.reading.toml_text import table_text, value_text
from configs.schema import Config
from trainer.planning.by_stage import RunTime, run_lengths, run_time
from trainer.planning.devices import Device
from trainer.planning.search import Found, Outcome, Search
from trainer.planning.step_time import StepTime, estimate_step
from trainer.report.console import Console, Row
from trainer.report.units import count, percent, size

MOST_COUNTS = 64
"""Numbers of ranks of one curve."""


def rank_counts(text: str) -> list[int]:
    """Parse "8", "8,16,64", or "8..512", which doubles from 8 on.

    Raises:
        ConfigError: it is none of these.
    """
    first, is_range, last = text.partition("..")
    words = [first, last] if is_range else text.split(",")
    if not all(word.isdecimal() and 0 < int(word) < 10**9 for word in words):
        raise ConfigError(f'--ranks {text} is no number of ranks; write for example 8, "8,16,64" or "8..512"')
    numbers = [int(word) for word in words]
    if is_range:
        low, high = numbers
        numbers = [low << n for n in range(high.bit_length()) if low << n <= high]
    if not numbers or numbers != sorted(set(numbers)) or len(numbers) > MOST_COUNTS:
        raise ConfigError(f"--ranks {text}: the numbers of ranks must ascend, at most {MOST_COUNTS}")
    return numbers


def changed(before: Config, after: Config) -> dict[str, Any]:
    """The keys of a job that differ, as nested tables; "none" stands for a key that is no longer set."""
    return _changed(before.model_dump(), after.model_dump())


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in after.items():
        was = before.get(key)
        if isinstance(value, dict) and isinstance(was, dict):
            found |= {key: inner} if (inner := _changed(was, value)) else {}
        elif value != was:
            found[key] = "none" if value is None else value
    return found


def words_of(job: Config, found: Config) -> str:
    """The keys that make a job this one: "mesh.tp = 8, training.micro_batch_size = 2"."""
    words = flat(changed(job, found))
    return ", ".join(f"{key} = {value_text(value)}" for key, value in words.items()) or "the job as it is"


def require_new(file: Path, option: str = "--write") -> None:
    """Raise UserError if a file to write exists or can't be one."""
    if exists(file):
        raise UserError(f"{option} {file}: exists already; remove it, or name another file")
    if file.suffix != ".toml" or not is_folder(file.parent):
        raise UserError(f"{option} {file}: name a .toml file in a folder that exists")


def write_job(file: Path, name_or_path: str, found: Config) -> None:
    """Write a job file with the named job as its base, and the keys that differ from it."""
    base = find_job_file(name_or_path)
    is_shipped = base.resolve().parent == JOB_FILES.resolve() and not exists(file.parent / base.name)
    name = base.name if is_shipped else os.path.relpath(base.resolve(), file.parent.resolve())
    keys = table_text(changed(load(name_or_path).config, found))
    file.write_text(f"base = {value_text(name)}\n\n{keys}", encoding="utf-8")


@dataclass(frozen=True)
class Tuning:
    """The searches that a command line asks for."""

    job: LoadedConfig
    device: Device
    gpus_per_host: int
    device_bytes: float

    def search(self, ranks: int) -> Search:
        """The search for one number of ranks."""
        lengths = run_lengths(self.job)
        later = [stage.config for stage, steps in zip(self.job.stages, lengths, strict=True) if steps][1:]
        return Search(self.job.config, ranks, self.device, self.gpus_per_host, self.device_bytes, later=later)

    def step(self, found: Found, ranks: int) -> StepTime:
        """The whole estimate of a found job's step; of its first stage."""
        return estimate_step(found.config, ranks, self.device, self.gpus_per_host)

    def _run(self, found: Found, ranks: int) -> RunTime:
        stages = found.config, *self.search(ranks).later_of(found.config)
        lengths = filter(None, run_lengths(self.job))
        steps = [estimate_step(stage, ranks, self.device, self.gpus_per_host) for stage in stages]
        return run_time(zip(lengths, steps, strict=True))

    # ------------------------------------------------------------------------- one number of ranks

    def as_json(self, outcome: Outcome, ranks: int, price: float | None) -> dict[str, Any]:
        """The outcome as plain values."""
        counts = {name: getattr(outcome, name) for name in ("considered", "too_large", "pruned", "estimated")}
        return counts | {"best": [self._found_as_json(found, ranks, price) for found in outcome.best]}

    def _found_as_json(self, found: Found, ranks: int, price: float | None) -> dict[str, Any]:
        step = self.step(found, ranks)
        run = self._run(found, ranks)
        return {
            "changes": flat(changed(self.job.config, found.config)),
            "step_seconds": step.seconds,
            "tokens_per_second_per_gpu": step.tokens_per_second,
            "mfu": step.mfu,
            "memory_bytes": found.memory,
            "parts_seconds": dict(step.parts),
            "gpu_hours": run.gpu_hours,
            "price": run.gpu_hours * price if price else None,
        }

    def show(self, outcome: Outcome, ranks: int, price: float | None, console: Console) -> None:
        """Print the best, each with what it changes, what the run costs, and why it beats the next."""
        rows: list[Row] = [
            ("considered", f"{outcome.considered:,} ways to run the same job"),
            ("do not fit", f"{outcome.too_large:,}"),
            ("slower by a bound", f"{outcome.pruned:,}"),
            ("estimated", f"{outcome.estimated:,}"),
        ]
        if self.job.later_stages:
            rows.append(("stages", "times are of the first; all of them are possible and fit"))
        console.table(f"{self.job.config.job.name} on {ranks} ranks of {self.device.title} (estimate)", rows)
        for place, found in enumerate(outcome.best):
            step = self.step(found, ranks)
            after = outcome.best[place + 1 : place + 2]
            reason = [("beats the next by", found.beats(after[0]))] if after else []
            cost = [("the run", self._cost(found, ranks, price))] if price else []
            console.table(
                f"{place + 1}. {_mesh(found, ranks)}",
                [
                    ("a step", f"{step.seconds:.4g} s, {count(step.tokens_per_second)} tokens/s a GPU"),
                    ("MFU, memory", f"{percent(step.mfu)}, {size(found.memory)}"),
                    *cost,
                    ("changes", words_of(self.job.config, found.config)),
                    *reason,
                ],
            )

    def _cost(self, found: Found, ranks: int, price: float) -> str:
        hours = self._run(found, ranks).gpu_hours
        return f"{count(hours)} GPU-hours; {count(hours * price)} at {price:g} a GPU-hour"

    # ------------------------------------------------------------------------- a curve

    def curve(self, counts: Sequence[int], price: float | None) -> list[dict[str, Any]]:
        """The best for each number of ranks; efficiency is relative to the smallest number that has one."""
        found: list[dict[str, Any]] = []
        for ranks in counts:
            try:
                best = self.search(ranks).run().best[0]
            except UserError as error:
                found.append({"ranks": ranks, "none": str(error)})
                continue
            values: dict[str, Any] = {"ranks": ranks, "mesh": _mesh(best, ranks)} | self._found_as_json(
                best, ranks, price
            )
            first = next((each for each in found if "none" not in each), values)
            each_gpu = values["tokens_per_second_per_gpu"]
            efficiency = each_gpu / first["tokens_per_second_per_gpu"]
            found.append(values | {"tokens_per_second": ranks * each_gpu, "efficiency": efficiency})
        if all("none" in each for each in found):
            raise UserError("\n".join(each["none"] for each in found))
        return found

    def show_curve(self, points: Sequence[Mapping[str, Any]], console: Console) -> None:
        """Print a line for each number of ranks."""
        rows: list[Row] = []
        for each in points:
            if "none" in each:
                rows.append((f"{each['ranks']} ranks", each["none"]))
                continue
            cost = f", {count(each['price'])} for them" if each["price"] else ""
            rows.append(
                (
                    f"{each['ranks']} ranks",
                    f"{count(each['tokens_per_second'])} tokens/s, {count(each['tokens_per_second_per_gpu'])} a GPU, "
                    f"efficiency {percent(each['efficiency'])}, {count(each['gpu_hours'])} GPU-hours{cost}; "
                    f"{each['mesh']}",
                )
            )
        console.table(f"{self.job.config.job.name} on {self.device.title}, the best of each (estimate)", rows)


def _mesh(found: Found, ranks: int) -> str:
    return str(mesh_sizes(found.config, ranks))
