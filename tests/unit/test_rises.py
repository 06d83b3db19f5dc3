"""Rises and trends of made curves whose truth is known, and their rate of false alarms on noise."""

import numpy as np
import pytest

from scripts.page.rises import SIGMAS, WINDOW, rises, trend


def noise(n, seed, sigma=0.05):
    return np.random.default_rng(seed).normal(4.0, sigma, n)


def falling(n, seed):
    """8.3 to 4, as a loss falls, with noise that shrinks a little."""
    return 4 + 4.3 * np.exp(-np.arange(n) / (n / 6)) + noise(n, seed) - 4


@pytest.mark.parametrize("n", [25, 60, 150, 1000])
def test_noise_alone_hardly_ever_rises(n):
    assert sum(bool(rises(noise(n, seed))) for seed in range(100)) <= 2


def test_a_long_run_of_noise_has_no_rise():
    assert rises(noise(100_000, 0)) == []


@pytest.mark.parametrize("n", [60, 400, 2000])
def test_a_falling_loss_hardly_ever_rises(n):
    assert sum(bool(rises(falling(n, seed))) for seed in range(20)) <= 1


def test_planted_spikes_are_found_each_with_its_steps():
    losses = falling(1000, 1)
    losses[300:305] += [2.0, 3.0, 4.0, 2.5, 2.0]  # one rise of five steps
    losses[700] += 0.6
    first, second = rises(losses)
    assert (first.first, first.peak, first.last) == (300, 302, 304)
    assert (second.first, second.peak, second.last) == (700, 700, 700)
    assert first.back is not None
    assert 305 <= first.back < 320
    before = losses[200:300]
    spread = 1.4826 * np.median(np.abs(before - np.median(before)))
    assert first.median == np.median(before)
    assert first.sigmas == pytest.approx((losses[302] - np.median(before)) / spread)


def test_a_level_that_stays_up_is_one_rise_that_is_not_back():
    losses = noise(400, 3)
    losses[250:] += 1.0
    (rise,) = rises(losses)
    assert (rise.first, rise.back) == (250, None)


def test_a_spike_does_not_hide_the_next():
    losses = noise(400, 4)
    losses[200], losses[230] = 60.0, 4.6
    assert [rise.peak for rise in rises(losses)] == [200, 230]


def test_a_loss_that_hardly_varies_does_not_rise_by_rounding():
    losses = np.full(300, 2.0)
    losses[200] += 1e-6
    assert rises(losses) == []
    losses[200] = 2.2
    assert [rise.peak for rise in rises(losses)] == [200]


def test_few_losses_are_not_judged():
    assert rises([]) == []
    assert rises([3.0] * 20 + [9.0]) != []
    assert rises([3.0] * 19 + [9.0]) == []


def test_each_window_is_the_past_alone():
    """The windows of the fast path are those of a slow one."""
    losses = np.random.default_rng(5).standard_t(2, 6000) + 10
    expected = []
    for i in range(WINDOW, len(losses)):
        past = losses[i - WINDOW : i]
        spread = 1.4826 * np.median(np.abs(past - np.median(past)))
        expected += [i] if losses[i] > np.median(past) + SIGMAS * max(spread, 1e-3 * abs(np.median(past))) else []
    found = {i for rise in rises(losses) for i in range(rise.first, rise.last + 1)}
    assert set(expected) <= found
    assert {rise.first for rise in rises(losses) if rise.first >= WINDOW} <= set(expected)


def test_trends():
    steps = np.arange(1000)
    assert trend(noise(39, 0)) is None
    down, up = trend(noise(1000, 0) - 4e-4 * steps), trend(noise(1000, 0) + 4e-4 * steps)
    assert (down.direction, up.direction, down.first) == (-1, 1, 750)
    assert down.change == pytest.approx(-0.09, abs=4 * 0.05 / 5 * 1.25 * 2**0.5)  # medians of 25, from middle to middle


@pytest.mark.parametrize("n", [40, 100, 1000])
def test_noise_has_a_trend_in_one_percent_of_cases(n):
    """The 99.9% quantile of a binomial of 1000 and 0.0093 is 20."""
    assert sum(trend(noise(n, seed)).direction != 0 for seed in range(1000)) <= 20
