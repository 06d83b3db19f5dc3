"""The order of the samples: a true permutation, well mixed, and mixtures of exact composition."""

import time
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import ConfigError
from trainer.data.order import Epochs, Mixture, Start, derive_key, permute

KEYS = st.integers(0, 2**64 - 1)
MASK = 2**64 - 1


def mix(value: int) -> int:
    """splitmix64's finalizer in Python's own integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def permute_one(index: int, n: int, key: int) -> int:
    """The permutation as the paper has it, one number at a time."""
    bits = max(2, (n - 1).bit_length())
    low_bits, high_bits = bits // 2, bits - bits // 2
    while True:
        round_key, high, low = key, index >> low_bits, index % 2**low_bits
        for _ in range(4):
            round_key = (round_key + 0x9E3779B97F4A7C15) & MASK
            low ^= mix(high ^ round_key) >> (64 - low_bits)
            round_key = (round_key + 0x9E3779B97F4A7C15) & MASK
            high ^= mix(low ^ round_key) >> (64 - high_bits)
        index = high << low_bits | low
        if index < n:
            return index


def chi_square(observed: np.ndarray, expected: float) -> float:
    """Deviation from a uniform distribution, in standard deviations."""
    statistic, freedom = float(((observed - expected) ** 2 / expected).sum()), observed.size - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


@given(st.integers(1, 3000), KEYS)
@settings(max_examples=200, deadline=None)
def test_permutation_is_a_bijection(n, key):
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@given(st.integers(1, 2**50), KEYS, st.data())
@settings(max_examples=100, deadline=None)
def test_permutation_equals_the_scalar_reference(n, key, data):
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    assert permute(np.array(index), n, key).tolist() == [permute_one(i, n, key) for i in index]


def test_one_key_for_all_or_one_for_each():
    keys = np.arange(1, 7, dtype=np.uint64)
    together = permute(np.full(6, 5), 1000, keys)
    assert together.tolist() == [int(permute(5, 1000, int(key))) for key in keys]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_permutation_of_a_small_domain_is_equally_likely(n):
    counts = dict.fromkeys(permutations(range(n)), 0)
    n_keys = 300 * len(counts)
    keys = np.array([derive_key("test", i) for i in range(n_keys)], dtype=np.uint64)
    for drawn in np.stack([permute(np.full(n_keys, i), n, keys) for i in range(n)], axis=1).tolist():
        counts[tuple(drawn)] += 1
    assert abs(chi_square(np.array(list(counts.values())), 300)) < 5


@pytest.mark.parametrize("n", [10_007, 1_000_003, 240_000_000])
def test_neighbors_are_sent_far_apart(n):
    images = permute(np.arange(10_000) + (n - 10_000) // 2, n, derive_key("mixing", n))
    places = np.bincount(images * 50 // n, minlength=50)
    steps = np.bincount((np.diff(images) % n) * 50 // n, minlength=50)
    pairs = np.bincount((images[:-1] * 7 // n) * 7 + images[1:] * 7 // n, minlength=49)
    for observed in (steps, pairs) if n == 10_007 else (places, steps, pairs):
        assert abs(chi_square(observed, observed.sum() / observed.size)) < 5


def test_keys_do_not_depend_on_the_process():
    """A changed key would change the data of every run that is resumed."""
    assert derive_key("epoch", 1, "web", 2) == xxhash.xxh3_64_intdigest(b'["epoch", 1, "web", 2]') == 0xB192F45A733F9CF7


def test_keys_of_different_parts_differ():
    parts = [("a", "b"), ("ab",), ("a", "b", ""), ("a", 1), ("a", "1"), ("a", 11)]
    assert len({derive_key(*p) for p in parts}) == len(parts)


def test_512_indices_cost_less_than_two_milliseconds():
    index = np.arange(512) * 468_750
    permute(index, 240_000_000, 1)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        permute(index, 240_000_000, 1)
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3  # 0.15 ms on an idle core


@given(st.integers(1, 50), st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_every_epoch_has_every_window_once_in_an_order_of_its_own(n_windows, seed):
    order = Epochs("web", n_windows, seed)
    epochs = order.window(np.arange(4 * n_windows)).reshape(4, n_windows)
    assert all(sorted(epoch) == list(range(n_windows)) for epoch in epochs.tolist())
    if n_windows > 20:
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4
        assert (
            order.window(np.arange(n_windows)).tolist()
            != Epochs("code", n_windows, seed).window(np.arange(n_windows)).tolist()
        )


@given(st.integers(1, 10**12), st.integers(0, 10**15))
@settings(max_examples=30, deadline=None)
def test_a_seek_gives_what_reading_up_to_there_gives(n_windows, start):
    order = Epochs("web", n_windows, 3)
    whole = order.window(np.arange(start, start + 20))
    assert [int(order.window(np.array([start + i]))[0]) for i in range(20)] == whole.tolist()


WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@given(WEIGHTS, st.integers(0, 10), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_block_has_the_weights_exact_composition(weights, seed, block):
    mixture = Mixture([str(i) for i in range(len(weights))], weights, seed)
    length = mixture.block_length
    source, ordinal = mixture.locate(np.arange(block * length, (block + 1) * length))
    exact = [Fraction(w) / sum(map(Fraction, weights)) * length for w in weights]
    for s, share in enumerate(exact):
        count = int((source == s).sum())
        assert abs(count - share) < 1 + Fraction(1, 10**6)
        assert abs(count - share) <= share / 100 + Fraction(1, 10**6)
        # Nothing dropped or repeated: the block's ordinals are the next `count` ones, in ascending order.
        assert ordinal[source == s].tolist() == list(range(block * count, (block + 1) * count))


@given(WEIGHTS, st.integers(0, 5000))
@settings(max_examples=40, deadline=None)
def test_sources_are_spread_evenly(weights, start):
    mixture = Mixture([str(i) for i in range(len(weights))], weights, 0)
    source, _ = mixture.locate(np.arange(start, start + 64))
    for s, weight in enumerate(weights):
        assert abs((source == s).sum() - 64 * weight / sum(weights)) < 2 * len(weights) + 1


def test_a_seek_into_a_mixture_is_free():
    mixture = Mixture(["a", "b", "c"], [7, 2, 1], 0)
    source, ordinal = mixture.locate(np.arange(5 * mixture.block_length))
    for i in (0, 1, 1023, 1024, 3333, 5119):
        assert [int(x[0]) for x in mixture.locate(np.array([i]))] == [source[i], ordinal[i]]


STRETCHES = st.lists(
    st.tuples(st.dictionaries(st.sampled_from("abcd"), st.floats(0.05, 20), min_size=1), st.integers(0, 3000)),
    min_size=2,
    max_size=5,
)


@given(STRETCHES, st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_sources_go_on_where_an_earlier_mixture_left_them(stretches, seed):
    """Over any chain of mixtures, a source that comes, goes and comes back has the ordinals 0, 1, 2, ..."""
    start = Start()
    seen = {name: [] for name in "abcd"}
    for weights, length in stretches:
        mixture = Mixture(list(weights), list(weights.values()), seed, start)
        end = start.sample + length
        sources, ordinals = mixture.locate(np.arange(start.sample, end))
        for name, ordinal in zip(np.array(list(weights))[sources].tolist(), ordinals.tolist(), strict=True):
            seen[name].append(ordinal)
        read = mixture.read_before(end)
        assert {name: count for name, count in read.items() if count} == {
            name: len(found) for name, found in seen.items() if found
        }
        start = Start(end, read)
    assert all(found == list(range(len(found))) for found in seen.values())


def test_largest_remainders_get_the_rest():
    assert Mixture(["a", "b", "c"], [0.7, 0.2, 0.1], 0).counts.tolist() == [717, 205, 102]  # of 716.8, 204.8, 102.4
    assert Mixture(["a", "b", "c"], [1, 1, 1], 0).counts.tolist() == [342, 341, 341]


def test_a_rare_source_makes_the_block_longer():
    mixture = Mixture(["a", "b"], [1.0, 1e-4], 0)
    assert mixture.counts[1] > 0
    assert mixture.counts[1] / mixture.block_length == pytest.approx(1e-4, rel=0.01)


def test_weights_too_far_apart_are_refused():
    with pytest.raises(ConfigError, match="differ too much"):
        Mixture(["a", "b"], [1.0, 1e-12], 0)
