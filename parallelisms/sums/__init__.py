"""The meaning of `training.reduction`: in which order the sums of a step are added up, over micro-batches and ranks."""

from configs.schema import Training
from parallelisms.sums.exact import ExactSums
from parallelisms.sums.fast import Sums

_SUMS: dict[str, Sums] = {"fast": Sums(), "exact": ExactSums()}


def sums_of(training: Training) -> Sums:
    """The sums that a job asks for."""
    return _SUMS[training.reduction]
