"""The lines of `fingerprints.jsonl`: one for each launch, with what decides the bits of its steps, and one per step.

A step's line has its loss and gradient norm, exactly, and the numbers of `parallelisms/guards/fingerprint.py`, in
base64: 12 bytes per parameter and 4 per rank.
"""

import base64
import json
from dataclasses import asdict, dataclass

import numpy as np

from configs.untrusted import parse_json
from trainer.proof.chain import link, opened, sealed

FILE_NAME = "fingerprints.jsonl"
STEP, LAUNCH = "chain", "launch"
"""The keys of the hash in the lines of steps, which are chained, and of launches."""


@dataclass(frozen=True)
class Launch:
    """What decides the bits of a launch's steps."""

    step: int
    """Steps before it."""
    next_sample: int
    """Number of its first sample."""
    continues: str
    """How the chain of steps stood at its start; "" before the first step."""
    mesh: dict[str, int]
    """Sizes of the mesh's axes."""
    ranks: int
    environment: dict[str, str]
    """As in a checkpoint's manifest, and torch's version."""
    parameters: list[tuple[str, int]]
    """Name and number of elements of each of the model's parameters, in its order."""
    job: str
    """The resolved job file."""

    def line(self) -> tuple[str, str]:
        """The line and its hash, by which steps refer to it."""
        return sealed(json.dumps(asdict(self)), LAUNCH)


@dataclass(frozen=True)
class Step:
    """The fingerprint of a step."""

    step: int
    launch: str
    """The hash of the line of its launch."""
    loss: float
    grad_norm: float
    digests: np.ndarray
    """As in `Gradients`, like the other arrays."""
    norms: np.ndarray
    samples: np.ndarray
    ranks: np.ndarray

    def line(self, previous: str) -> tuple[str, str]:
        """The line and its hash; `previous` is the hash of the step before."""
        numbers = {"loss": self.loss.hex(), "grad_norm": self.grad_norm.hex()}
        arrays = {name: _text(getattr(self, name)) for name in _TYPES}
        text = json.dumps({"step": self.step, LAUNCH: self.launch, **numbers, **arrays})
        return sealed(text, STEP, previous)


_TYPES = {"digests": "<u4", "norms": "<f4", "samples": "<f4", "ranks": "<u4"}
"""The arrays of a step's line; samples may also be float64."""


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def _array(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=kind)


def read_launch(line: str) -> tuple[Launch, str] | None:
    """Read the line of a launch; returns it with its hash, or None if it is not one, or its hash does not match."""
    found = opened(line, LAUNCH)
    if found is None or link("", found[0]) != found[1]:
        return None
    try:
        values = parse_json(found[0])
        values["parameters"] = [(str(name), int(size)) for name, size in values["parameters"]]
        return Launch(**values), found[1]
    except (ValueError, TypeError, KeyError):
        return None


def read_step(text: str) -> Step | None:
    """Read the text of a step's line, without its hash; None if it is not one."""
    try:
        values = parse_json(text)
        arrays = {name: _array(values[name], kind) for name, kind in _TYPES.items()}
        if len(arrays["norms"]) * 2 == len(arrays["samples"]):
            arrays["samples"] = _array(values["samples"], "<f8")
        loss, grad_norm = (float.fromhex(values[key]) for key in ("loss", "grad_norm"))
        return Step(int(values["step"]), str(values[LAUNCH]), loss, grad_norm, *arrays.values())
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
