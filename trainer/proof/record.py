"""The lines of `fingerprints.jsonl`: one for each launch, with what decides the bits of its steps, and one per step.

A step belongs to the launch whose line is the last before its own. Its line has its loss and gradient norm, exactly,
and the numbers of `parallelisms/guards/fingerprint.py`, arrays in base64: 12 bytes per parameter and 4 per rank.
"""

import base64
import json
from dataclasses import asdict, dataclass, field

import numpy as np

FILE_NAME = "fingerprints.jsonl"
TOKENIZER = "the tokenizer"
"""Its key among the hashes of the data."""
TEACHER = "the teacher"
"""The key of its checkpoint's seal there."""
TYPES = {"digests": "<u4", "norms": "<f4", "samples": "<f4", "ranks": "<u4"}
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
    data: dict[str, str] = field(default_factory=dict)
    """The fingerprint of each source, by its name, the tokenizer's hash and the teacher's seal; empty in files of
    earlier versions."""
    code: dict[str, str] = field(default_factory=dict)
    """A hash of Keel's code in each folder (`environment.code_by_folder`); empty in files of earlier versions."""

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
    data: int | None = None
    """Digest of the global batch; None in files of earlier versions."""

    def is_of(self, launch: Launch) -> bool:
        """Whether it has a number for each of the launch's parameters, as an undamaged line has."""
        return {len(self.digests), len(self.norms), len(self.samples)} == {len(launch.parameters)}

    def line(self) -> str:
        """The line that stands in the file."""
        numbers = {"loss": self.loss.hex(), "grad_norm": self.grad_norm.hex()}
        arrays = {name: _text(getattr(self, name)) for name in TYPES}
        return json.dumps({"step": self.step, **numbers, **arrays, "data": self.data})


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
