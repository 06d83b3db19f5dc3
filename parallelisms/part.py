"""Where a rank's part of a parameter lies in the whole: the numbers that its elements have there."""

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from parallelisms.init import local_ranges

_MOST_LEVELS = 3


@dataclass(frozen=True)
class Part:
    """A part whose element at (i, j, k) of (any, rows, run) is the whole's number first + i x outer + j x inner + k.

    Element numbers count the whole parameter row by row. FSDP, tensor and expert parallelism all cut such parts.
    """

    first: int
    """Number of the part's first element."""
    rows: int
    """How many runs there are before the next step of `outer`."""
    run: int
    """How many elements of the part are neighbors in the whole as well."""
    outer: int
    """Elements of the whole between the first elements of two groups of `rows` runs."""
    inner: int
    """Elements of the whole between the first elements of two runs."""

    @property
    def levels(self) -> int:
        """1: all elements of the part are neighbors in the whole; 2: no more than `rows` runs; 3: more."""
        return 1 + (self.inner > 0) + (self.outer > 0)

    def numbers(self, start: int, stop: int, device: torch.device) -> Tensor:
        """The whole's numbers of the part's elements `start` to `stop`; (stop - start,) int64."""
        elements = torch.arange(start, stop, device=device)
        if self.levels == 1:
            return elements + self.first
        runs = elements // self.run
        return self.first + runs // self.rows * self.outer + runs % self.rows * self.inner + elements % self.run


def part_of(parameter: Tensor) -> Part:
    """The part of a parameter, sharded or not, that this rank holds."""
    ranges = local_ranges(parameter)
    strides = [parameter.shape[dimension + 1 :].numel() for dimension in range(parameter.dim())]
    if not all(ranges):
        return Part(0, rows=1, run=1, outer=0, inner=0)
    first = sum(indices.start * stride for indices, stride in zip(ranges, strides, strict=True))
    none: list[tuple[int, int]] = []
    levels = reduce(_joined, zip(map(len, ranges), strides, strict=True), none)
    assert len(levels) <= _MOST_LEVELS, (parameter.shape, levels)
    (_, outer), (rows, inner), (run, _) = [(1, 0)] * (_MOST_LEVELS - len(levels)) + levels
    return Part(first, rows, run, outer, inner)


def _joined(levels: list[tuple[int, int]], level: tuple[int, int]) -> list[tuple[int, int]]:
    """Add a dimension, (size, stride in the whole), to the outer ones; joined with the last where no gap is between."""
    size, stride = level
    if levels and (levels[-1][1] == size * stride or levels[-1][0] == 1):
        return [*levels[:-1], (levels[-1][0] * size, stride)]
    return [*levels, level]
