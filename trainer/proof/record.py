"""The lines of `fingerprints.jsonl`: one for each launch, with what decides the bits of its steps, and one per step.

A step belongs to the launch whose line is the last before its own. Its line has its loss and gradient norm, exactly,
and the numbers of `parallelisms/guards/fingerprint.py`, in base64: 12 bytes per parameter and 4 per rank.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import UserError
from configs.untrusted import parse_json
from trainer.report.metrics import read_lines

FILE_NAME = "fingerprints.jsonl"
_TYPES = {"digests": "<u4", "norms": "<f4", "samples": "<f4", "ranks": "<u4"}
"""The arrays of a step's line; samples may also be float64."""


@dataclass(frozen=True)
class Launch:
    """What decides the bits of a launch's steps."""

    step: int
    """Steps before it."""
    next_sample: int
    """Number of its first sample."""
    mesh: dict[str, int]
    """Sizes of the mesh's axes."""
    ranks: int
    environment: dict[str, str]
    """The environment in a checkpoint's manifest, and torch's version."""
    parameters: list[tuple[str, int]]
    """Name and number of elements of each of the model's parameters, in its order."""
    job: str
    """The resolved job file."""

    def line(self) -> str:
        """The line that stands in the file."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Step:
    """The fingerprint of a step."""

    step: int
    loss: float
    grad_norm: float
    digests: np.ndarray
    """The array of `Gradients`, like the others."""
    norms: np.ndarray
    samples: np.ndarray
    ranks: np.ndarray

    def is_of(self, launch: Launch) -> bool:
        """Whether it has a number for each of the launch's parameters, as an undamaged line has."""
        return {len(self.digests), len(self.norms), len(self.samples)} == {len(launch.parameters)}

    def line(self) -> str:
        """The line that stands in the file."""
        numbers = {"loss": self.loss.hex(), "grad_norm": self.grad_norm.hex()}
        arrays = {name: _text(getattr(self, name)) for name in _TYPES}
        return json.dumps({"step": self.step, **numbers, **arrays})


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def _array(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=kind)


def _read_line(line: str) -> Launch | Step | None:
    """Read one line; None if it is neither."""
    try:
        values = parse_json(line)
        return _launch(values) if "job" in values else _step(values)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _launch(values: dict[str, Any]) -> Launch:
    parameters = [(str(name), int(size)) for name, size in values["parameters"]]
    return Launch(**values | {"parameters": parameters})


def _step(values: dict[str, Any]) -> Step:
    arrays = {name: _array(values[name], kind) for name, kind in _TYPES.items()}
    if len(arrays["norms"]) * 2 == len(arrays["samples"]):
        arrays["samples"] = _array(values["samples"], "<f8")
    loss, grad_norm = (float.fromhex(values[key]) for key in ("loss", "grad_norm"))
    return Step(int(values["step"]), loss, grad_norm, *arrays.values())


# --------------------------------------------------------------------------- reading the file


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
    if not path.is_file():
        raise UserError(
            f"{folder} has no {FILE_NAME}: the run's fingerprints are recorded with metrics.fingerprint = true"
        )
    for line in read_lines(path):
        if found := _read_line(line):
            yield found
