"""Thins long curves, so that a page stays small and its extremes stay visible."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def thin(values: Sequence[float] | NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Choose at most about `most` of a curve's points, ascending indices: the lowest and highest of each of many bins.

    On a screen with fewer columns than bins the thinned curve covers the same pixels as the whole one. The first and
    the last point are kept, too.
    """
    array = np.asarray(values, dtype=np.float64)
    if len(array) <= most:
        return np.arange(len(array))
    edges = np.linspace(0, len(array), max(1, most // 2) + 1).astype(np.int64)
    kept = {0, len(array) - 1}
    for start, stop in pairwise(edges.tolist()):
        kept |= {start + int(array[start:stop].argmin()), start + int(array[start:stop].argmax())}
    return np.array(sorted(kept))


def bin_means(values: Sequence[float], bins: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The means of at most `bins` equal bins of a curve, each at its middle point's index."""
    array = np.asarray(values, dtype=np.float64)
    size = -(-len(array) // bins)
    starts = np.arange(0, len(array), size)
    stops = np.minimum(starts + size, len(array))
    return (starts + stops - 1) // 2, np.add.reduceat(array, starts) / (stops - starts)
