"""Thinned curves keep their extremes and cover the same pixels."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scripts.page.thin import bin_means, thin


@given(st.lists(st.floats(-1e9, 1e9), max_size=500), st.integers(2, 100))
def test_few_points_ascending_with_the_ends_and_the_extremes(values, most):
    kept = thin(values, most).tolist()
    assert kept == sorted(set(kept))
    assert len(kept) <= max(most + 2, 0)
    if values:
        assert {0, len(values) - 1} <= set(kept)
        assert (min(values), max(values)) == (min(values[i] for i in kept), max(values[i] for i in kept))
    if len(values) <= most:
        assert kept == list(range(len(values)))


def test_every_single_spike_of_a_long_curve_is_kept():
    values = np.random.default_rng(0).normal(4, 0.05, 100_000)
    spikes = [17, 5_000, 5_001 + 400, 73_111, 99_990]
    values[spikes] += np.array([1, -1, 2, 3, 4.0])
    assert set(spikes) <= set(thin(values, 2000).tolist())


def test_a_column_of_pixels_is_covered_as_by_the_whole_curve():
    values = np.cumsum(np.random.default_rng(1).normal(size=60_000))
    kept = thin(values, 2000)
    for start in range(0, 60_000, 600):  # 100 columns, each of ten bins
        inside = kept[(kept >= start) & (kept < start + 600)]
        column = values[start : start + 600]
        assert (values[inside].min(), values[inside].max()) == (column.min(), column.max())


def test_means_of_bins():
    middles, means = bin_means([1.0, 2.0, 9.0, 4.0, 5.0, 6.0, 7.0], 3)
    assert (middles.tolist(), means.tolist()) == ([1, 4, 6], [4.0, 5.0, 7.0])
