"""The order of samples backward: the inverse of the permutation, of the epochs and of the mixture, by brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.microscope.inverse import ordinals, sample_of, unpermute
from trainer.data.order import Epochs, Mixture, Start, permute

KEYS = st.integers(0, 2**64 - 1)
WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@settings(max_examples=100)
@given(st.one_of(st.integers(1, 3000), st.integers(1, 2**50)), KEYS, st.data())
def test_permutation(n, key, data):
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50)))
    assert np.array_equal(unpermute(permute(index, n, key), n, key), index)


@settings(max_examples=30)
@given(st.integers(1, 500), st.none() | st.integers(0, 2**31), st.integers(0, 5))
def test_epochs(n_windows, seed, epoch):
    epochs = Epochs("text", n_windows, seed)
    every = epoch * n_windows + np.arange(n_windows)
    assert np.array_equal(ordinals(epochs, epochs.window(every), epoch), every)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    st.integers(0, 2**31),
    st.integers(0, 2**40),
    st.integers(0, 5000),
)
def test_mixture(weights, seed, first_block, start):
    read = {f"source {i}": 7 * i for i in range(3)}
    mixture = Mixture([f"source {i}" for i in range(len(weights))], weights, seed, Start(start, read))
    first = start + first_block * mixture.block_length
    samples = first + np.arange(min(3 * mixture.block_length, 3000))
    for sample, source, ordinal in zip(samples.tolist(), *map(np.ndarray.tolist, mixture.locate(samples)), strict=True):
        assert sample_of(mixture, source, ordinal) == sample


@pytest.mark.parametrize("weights", [[1.0], [1, 1], [5, 3, 2], [0.9, 0.09, 0.01]])
def test_count(weights):
    mixture = Mixture([f"source {i}" for i in range(len(weights))], weights, 0)
    sources, _ = mixture.locate(np.arange(2 * mixture.block_length))
    for n in [0, 1, 7, 500, mixture.block_length - 1, mixture.block_length, mixture.block_length + 333, len(sources)]:
        counts = {f"source {i}": np.count_nonzero(sources[:n] == i) for i in range(len(weights))}
        assert mixture.read_before(n) == counts
