"""The intervals of `keel compare`: their coverage on data whose truth is known, and what they promise."""

import math

import numpy as np
import pytest

from scripts.comparison.statistics import CONFIDENCE, POWER, Needed, compare, student


@pytest.mark.parametrize(
    ("confidence", "freedom", "quantile"),
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.99, 3, 5.841), (0.95, 10, 2.228), (0.98, 4, 3.747), (0.99, 120, 2.617)],
)
def test_students_quantiles_are_those_of_the_tables(confidence, freedom, quantile):
    assert student(confidence, freedom) == pytest.approx(quantile, abs=6e-4)


def test_a_quantile_of_many_degrees_of_freedom_is_hardly_too_wide():
    for confidence, normal in ((0.95, 1.95996), (0.98, 2.32635), (0.99, 2.57583)):
        assert normal < student(confidence, 10**6) < 1.015 * normal


def trial(generator, seeds, sequences, of_seed, of_text, of_both, difference=0.0):
    """Losses of two configs, whose difference has these standard deviations, on text that is hard here, easy there."""
    hard = generator.normal(3.0, 0.5, (1, sequences)) + generator.normal(0, 0.05, (seeds, 1))
    noise = (
        of_seed * generator.normal(size=(seeds, 1))
        + of_text * generator.normal(size=(1, sequences))
        + of_both * generator.normal(size=(seeds, sequences))
    )
    return compare(hard, hard + difference + noise, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "noise",
    [
        (1, 0, 0),
        pytest.param((0, 0, 1), marks=pytest.mark.slow),
        pytest.param((1, 8, 0), marks=pytest.mark.long),
        pytest.param((1, 0, 8), marks=pytest.mark.long),
        (0.3, 3, 3),
        pytest.param((0.1, 8, 0), marks=pytest.mark.slow),
    ],
)
def test_equal_configs_are_rarely_called_different(seeds, noise):
    """Whatever the noise is of: at most in 2% of the trials, of which 1,000 are run (3.5% is beyond chance)."""
    generator = np.random.default_rng(seeds)
    called = sum(trial(generator, seeds, 32, *noise).is_decided for _ in range(1000))
    assert called <= 35


def test_sequences_are_no_repetitions_of_a_training():
    """An interval over all losses as one sample, which many report, would be wrong in most trials."""
    generator, naive = np.random.default_rng(0), 0
    for _ in range(300):
        hard = generator.normal(3.0, 0.5, 64)
        difference = generator.normal(0, 0.02, (3, 1)) + generator.normal(0, 0.05, (3, 64))
        naive += abs(difference.mean()) > student(CONFIDENCE, 191) * difference.std(ddof=1) / math.sqrt(192)
        assert not compare(np.tile(hard, (1, 1)), np.tile(hard, (1, 1)) + difference[:1], 1).is_decided  # one seed
    assert naive > 100


def test_what_both_configs_share_cancels():
    found = trial(np.random.default_rng(0), 3, 64, 0.002, 0.01, 0.01)
    assert found.paired * 3 < found.unpaired
    found = trial(np.random.default_rng(0), 30, 64, 0.002, 0.01, 0.001)
    assert found.paired == pytest.approx(math.hypot(found.of_seeds, found.of_text))
    assert found.noise_floor == pytest.approx((0.05, 0.05), rel=0.4)
    assert found.paired_noise == pytest.approx(0.002, rel=0.4)


def test_the_interval_against_a_computation_by_hand():
    first = np.array([[3.0, 2.0], [3.5, 2.1], [3.2, 2.6]])
    differences = np.array([[0.1, 0.3], [0.2, 0.2], [0.3, 0.7]])
    found = compare(first, first + differences, 1000, 0.95)
    assert found.difference == pytest.approx(0.3)
    assert found.of_seeds == pytest.approx(4.3027 * np.std([0.2, 0.2, 0.5], ddof=1) / math.sqrt(3), rel=1e-4)
    assert found.of_text == pytest.approx(12.7062 * np.std([0.2, 0.4], ddof=1) / math.sqrt(2), rel=1e-4)
    means = [x.mean(1).var(ddof=1) / 3 for x in (first, first + differences)]
    freedom = sum(means) ** 2 / sum(m**2 / 2 for m in means)
    assert 2 < freedom < 4
    texts = [x.mean(0).var(ddof=1) / 2 for x in (first, first + differences)]
    by_hand = math.hypot(student(0.95, int(freedom)) * sum(means) ** 0.5, student(0.95, 1) * sum(texts) ** 0.5)
    assert found.unpaired == pytest.approx(by_hand)


def test_one_seed_tells_of_two_models_only():
    losses = np.random.default_rng(0).normal(3, 0.5, (1, 50))
    found = compare(losses, losses + 0.1 + np.random.default_rng(1).normal(0, 0.01, (1, 50)), 1000)
    assert abs(found.difference) > found.paired
    assert not found.is_decided
    assert found.of_seeds is found.needed is found.paired_noise is None


def test_equal_losses_are_no_difference():
    losses = np.random.default_rng(0).normal(3, 0.5, (3, 50))
    found = compare(losses, losses.copy(), 1000)
    assert found.is_equal
    assert not found.is_decided
    assert (found.difference, found.paired, found.needed) == (0.0, 0.0, None)
    assert compare(losses, losses + 0.25, 1000).is_decided  # the same difference in every seed and sequence


@pytest.mark.slow
@pytest.mark.parametrize("noise", [(0.02, 0.0, 0.0), (0.02, 0.1, 0.0), (0.001, 0.3, 0.0)])
def test_what_is_needed_decides_as_often_as_promised(noise):
    """With seeds and sequences as named, a difference of the measured size is called in about 80% of the trials."""
    generator = np.random.default_rng(3)
    pilot = trial(generator, 400, 400, *noise, difference=0.02)
    while abs(pilot.difference - 0.02) > 0.001:
        pilot = trial(generator, 400, 400, *noise, difference=0.02)
    needed = pilot.needed
    assert isinstance(needed, Needed)
    assert needed.tokens == needed.seeds * 1000
    rates = trial_rate(generator, needed, noise), trial_rate(generator, Needed(2, 64, 0), noise)
    assert rates[0] >= POWER - 0.1
    assert rates[0] > rates[1] or rates[1] > 0.95


def trial_rate(generator, needed, noise):
    found = [trial(generator, needed.seeds, needed.sequences, *noise, difference=0.02) for _ in range(200)]
    return sum(each.is_decided for each in found) / 200
