"""Reads the fingerprints that a run has recorded in `fingerprints.jsonl`."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from configs.errors import UserError
from configs.files import is_file
from configs.untrusted import parse_json
from trainer.proof.record import FILE_NAME, TYPES, Launch, Step
from trainer.report.metrics import read_lines

NO_LINE = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
"""What `launch_of` and `step_of` raise for values that are none."""


def _array(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=kind)


def _read_line(line: str) -> Launch | Step | None:
    """Read one line; None if it is neither."""
    try:
        values = parse_json(line)
        return launch_of(values) if "job" in values else step_of(values)
    except NO_LINE:
        return None


def launch_of(values: dict[str, Any]) -> Launch:
    """The launch of a parsed line; raises one of NO_LINE if it is none."""
    parameters = [(str(name), int(size)) for name, size in values["parameters"]]
    return TypeAdapter(Launch).validate_python(values | {"parameters": parameters})


def step_of(values: dict[str, Any]) -> Step:
    """The step of a parsed line; raises as `launch_of`."""
    arrays = {name: _array(values[name], kind) for name, kind in TYPES.items()}
    if len(arrays["norms"]) * 2 == len(arrays["samples"]):
        arrays["samples"] = _array(values["samples"], "<f8")
    loss, grad_norm = (float.fromhex(values[key]) for key in ("loss", "grad_norm"))
    return Step(int(values["step"]), loss, grad_norm, **arrays, data=values.get("data"))


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps, each with the launch that computed it."""

    steps: dict[int, Step] = field(default_factory=dict)
    launches: dict[int, Launch] = field(default_factory=dict)


def read_stretch(folder: Path, first: int, last: int) -> Stretch:
    """Read the fingerprints of the steps from `first` to `last`, as far as they are recorded; other lines are skipped.

    Raises:
        UserError: the run has none.
    """
    stretch = Stretch()
    launch = None
    for found in _read(folder):
        if isinstance(found, Launch):
            launch = found
        elif launch and first <= found.step <= last and found.is_of(launch):
            stretch.steps[found.step] = found
            stretch.launches[found.step] = launch
    return stretch


def recorded_steps(folder: Path) -> list[int]:
    """The steps that a run has fingerprints of, in order.

    Raises:
        UserError: it has none.
    """
    return sorted({found.step for found in _read(folder) if isinstance(found, Step)})


def _read(folder: Path) -> Iterator[Launch | Step]:
    path = folder / FILE_NAME
    if not is_file(path):
        raise UserError(
            f"{folder} has no {FILE_NAME}: the run's fingerprints are recorded with metrics.fingerprint = true"
        )
    for line in read_lines(path):
        if found := _read_line(line):
            yield found
