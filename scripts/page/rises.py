"""Where a loss rises, and whether it still falls, by statistics that a few outliers do not move.

A loss is compared with the median of the logged ones before it, in units of their spread: 1.4826 times the median
absolute deviation from that median, which is the standard deviation if the noise is Gaussian. A spike hardly moves
either. Only the past counts, so a fall of the loss makes no rise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIGMAS = 5.5
"""A loss further above the median is a rise; the limit is higher where fewer than `WINDOW` losses precede it."""
WINDOW = 100
"""Logged losses that a loss is compared with."""
FEWEST = 20
"""With fewer before it, a loss is not judged."""
_SMALL_WINDOW = 10.0
"""The limit of n < `WINDOW` losses is `SIGMAS` * (1 + 10 / n): a spread measured on few of them is often too small."""
_LEAST_SPREAD = 1e-3
"""The spread counts as at least this fraction of the median; a loss that hardly varies would rise at every rounding."""
_APART = 10
"""Logged losses between two rises; closer ones are one."""
_CHUNK = 4096

_TREND_BLOCKS = 10
_TREND_CERTAIN = 29
"""Kendall's S of 10 values in random order reaches 29 or -29 in 0.9% of cases (Kendall 1970, table 1)."""
TREND_FEWEST = 40
"""A trend needs that many logged losses."""


@dataclass(frozen=True)
class Rise:
    """A time in which the loss was far above what it had been."""

    first: int
    """Index of the first loss above the limit."""
    last: int
    """Index of the last one."""
    peak: int
    """Index of the highest loss."""
    median: float
    """Of the losses before `first`."""
    sigmas: float
    """How far the peak is above that median, in units of the spread before `first`."""
    back: int | None
    """Index of the first later loss that is not above that median; None if there is none yet."""


def rises(losses: Sequence[float]) -> list[Rise]:
    """Find the rises of a loss, given at its logged steps; those less than `_APART` losses apart are one."""
    values = np.asarray(losses, dtype=np.float64)
    medians, spreads, limits = _before(values)
    high = np.flatnonzero(values > medians + limits * spreads)
    found = []
    for group in _groups(high):
        first, last = int(group[0]), int(group[-1])
        peak = first + int(values[first : last + 1].argmax())
        sigmas = float((values[peak] - medians[first]) / spreads[first])
        below = np.flatnonzero(values[peak:] <= medians[first])
        back = peak + int(below[0]) if len(below) else None
        found.append(Rise(first, last, peak, float(medians[first]), sigmas, back))
    return found


def _before(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Median and spread of the losses before each, and its limit in spreads (inf where too few precede it)."""
    medians, spreads, limits = (np.full(len(values), fill) for fill in (0.0, 1.0, np.inf))
    for i in range(FEWEST, min(WINDOW, len(values))):
        medians[i : i + 1], spreads[i : i + 1] = _location_and_spread(values[None, :i])
        limits[i] = SIGMAS * (1 + _SMALL_WINDOW / i)
    for start in range(WINDOW, len(values), _CHUNK):
        stop = min(start + _CHUNK, len(values))
        windows = np.lib.stride_tricks.sliding_window_view(values[start - WINDOW : stop - 1], WINDOW)
        medians[start:stop], spreads[start:stop] = _location_and_spread(windows)
        limits[start:stop] = SIGMAS
    return medians, spreads, limits


def _location_and_spread(windows: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of each row."""
    medians = np.median(windows, axis=1)
    deviations = np.median(np.abs(windows - medians[:, None]), axis=1)
    return medians, np.maximum(1.4826 * deviations, np.maximum(_LEAST_SPREAD * np.abs(medians), 1e-300))


def _groups(high: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    if len(high):
        yield from np.split(high, np.flatnonzero(np.diff(high) > _APART) + 1)


@dataclass(frozen=True)
class Trend:
    """How the loss moves over the last quarter of its logged steps."""

    first: int
    """Index of the first of them."""
    direction: int
    """-1: it falls; 1: it rises; 0: neither is certain."""
    change: float
    """From the first tenth of them to the last, between medians."""


def trend(losses: Sequence[float]) -> Trend | None:
    """Judge the last quarter by Kendall's test on the medians of ten blocks; None if there are too few losses."""
    n = len(losses) // 4
    if len(losses) < TREND_FEWEST:
        return None
    blocks = [float(np.median(block)) for block in np.array_split(np.asarray(losses[-n:]), _TREND_BLOCKS)]
    s = sum(np.sign(blocks[j] - blocks[i]) for j in range(_TREND_BLOCKS) for i in range(j))
    direction = int(np.sign(s)) if abs(s) >= _TREND_CERTAIN else 0
    return Trend(len(losses) - n, direction, blocks[-1] - blocks[0])
