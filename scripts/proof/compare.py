"""Compares the fingerprints of steps with their replay's: in bits, or within a bound."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.proof.record import Step

DATA = "the data"
LOSS = "the loss"
NORM = "the gradient norm"


@dataclass(frozen=True)
class Difference:
    """The difference between a step and its replay."""

    step: int
    data: bool
    """Whether it read other tokens."""
    loss: bool
    norm: bool
    parameters: list[str]
    """Names of the parameters whose gradients differ, in the model's order."""
    ranks: list[str]
    """Which ranks held what differs; empty if that is not known, or all did."""
    n_parameters: int

    def __bool__(self) -> bool:
        return self.data or self.loss or self.norm or bool(self.parameters)

    def __str__(self) -> str:
        """The difference in words; it names the last of several parameters, since the backward pass begins there."""
        kinds = ((DATA, self.data), (LOSS, self.loss), (NORM, self.norm))
        numbers = [name for name, differs in kinds if differs]
        if self.parameters:
            last = self.parameters[-1]
            n = len(self.parameters)
            which = f"gradients of {n} of {self.n_parameters} parameters, first that of {last}"
            held = f", on {', '.join(self.ranks)}" if self.ranks else ""
            numbers.append(f"the {f'gradient of {last}' if n == 1 else which}{held}")
        return ", ".join(numbers)


def difference(recorded: Step, replayed: Step, names: Sequence[str], n_ranks: int) -> Difference:
    """The difference in bits between a step of a run on `n_ranks` ranks and its replay; `names`: all parameters."""
    digests = _unequal(recorded.digests, replayed.digests) | _unequal(recorded.samples, replayed.samples)
    return Difference(
        recorded.step,
        has_other_data(recorded, replayed),
        recorded.loss.hex() != replayed.loss.hex(),
        recorded.grad_norm.hex() != replayed.grad_norm.hex(),
        [names[number] for number in np.flatnonzero(digests).tolist()],
        _ranks(recorded.ranks, replayed.ranks, n_ranks),
        len(names),
    )


def has_other_data(recorded: Step, replayed: Step) -> bool:
    """Whether a step and its replay have read other tokens, as far as both have recorded them."""
    return recorded.data is not None and replayed.data is not None and recorded.data != replayed.data


def _ranks(a: np.ndarray, b: np.ndarray, n_ranks: int) -> list[str]:
    """The ranks whose digests differ, if not all do; a digest is of one rank, or of a range (`GradientFingerprint`)."""
    places = np.flatnonzero(a != b).tolist() if len(a) == len(b) else []
    if len(places) == len(a):
        return []
    ranges = [(-(-place * n_ranks // len(a)), -(-(place + 1) * n_ranks // len(a)) - 1) for place in places]
    return [f"rank {first}" if first == last else f"ranks {first} to {last}" for first, last in ranges]


def _unequal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether each pair of elements differs in bits; in the numbers of a NaN, too."""
    width = f"<u{a.dtype.itemsize}"
    return a.view(width) != b.view(width)


@dataclass(frozen=True)
class Gap:
    """The largest difference of a kind of number between a step and its replay, relative to its size."""

    step: int
    what: str
    """"the loss", or the name of a parameter."""
    value: float
    bound: float

    def __str__(self) -> str:
        """ "1.2e-07 of the loss, in step 12 (the bound there is 1e-04)"."""
        if self.what == DATA:
            return f"{DATA} of step {self.step}"
        where = self.what if self.what in (LOSS, NORM) else f"the gradient of {self.what}"
        return f"{self.value:.2g} of {where}, in step {self.step} (the bound there is {self.bound:.2g})"


def gaps(
    recorded: Step, replayed: Step, parameters: Sequence[tuple[str, int]], bound: float, dtype: str
) -> Iterator[Gap]:
    """The differences of the data, the loss, the gradient norm, and each parameter's norm and sample.

    A sample is compared relative to itself or to the root mean square of its parameter's gradient, if that is larger.
    Some gradients are zero but for round-off, such as those of a bias of keys. They have no size to compare with, so
    one below a rounding (of `dtype`) of all gradients' norm is left out.
    """

    def gap(what: str, a: float, b: float, unit: float) -> Gap:
        alike = a == b or (math.isnan(a) and math.isnan(b))
        value = 0.0 if alike else abs(a - b) / unit if unit else math.inf
        return Gap(recorded.step, what, value if value == value else math.inf, bound)

    if has_other_data(recorded, replayed):
        yield Gap(recorded.step, DATA, math.inf, bound)
    yield gap(LOSS, recorded.loss, replayed.loss, abs(replayed.loss))
    yield gap(NORM, recorded.grad_norm, replayed.grad_norm, replayed.grad_norm)
    rounding = _EPSILON[dtype] * float(np.linalg.norm(replayed.norms))
    for number, (name, size) in reversed([*enumerate(parameters)]):
        was = float(recorded.norms[number])
        norm = float(replayed.norms[number])
        if was < rounding and norm < rounding:
            continue
        yield gap(name, was, norm, norm)
        sample = float(recorded.samples[number]), float(replayed.samples[number])
        yield gap(name, *sample, max(abs(sample[1]), norm / math.sqrt(size)))


MAX_STEPS_APART = 50
"""Steps after a checkpoint that are compared where bits may differ: training doubles a difference again and again."""
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}
_MARGIN = 64
_AMPLIFIED = 8192


def bound_of(steps: int, dtype: str, orthogonalizes: bool = False) -> float:
    """How far the `steps`-th step of a replay may be off where bits may differ, relative to each number's size.

    64 k^2 roundings of `dtype`, in which gradients are computed. With AdamW at lr = 1e-2, which is steep, and float32,
    the largest differences measured were 1/14 (k = 1), 1/50 (k = 10) and 1/36 of that (k = 50), then 1/9 (k = 70).

    An update that gives all directions of a matrix one length, as Muon's, enlarges round-off in those with little
    gradient: at lr = 1e-2, differences of 19 times that were measured at k = 2, 710 at k = 5 and 7 at k = 50. Behind
    the first step, its bound is 8,192 times as wide.
    """
    return _MARGIN * _EPSILON[dtype] * steps**2 * (_AMPLIFIED if orthogonalizes and steps > 1 else 1)
