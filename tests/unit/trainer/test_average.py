"""The average's updates, by a formula."""

import math

import pytest
import torch
from torch import Tensor

from configs.schema import Average
from parallelisms.part import part_of
from trainer.average import ExponentialAverage, average_of
from trainer.kernels.keyed import key_of, random_bits, rounded

GO = torch.tensor(0.0)
SKIP = torch.tensor(1.0)


def test_updates_are_the_formula():
    """The first copies; each later one moves it by 1 - decay of the distance, unless its step was skipped."""
    weights = {name: torch.randn(shape, dtype=torch.float64) for name, shape in (("a", (5, 3)), ("b", (7,)))}
    average = ExponentialAverage(Average(interval=2, decay=0.75, start_step=3), lambda: weights)
    expected = None
    for number in range(1, 14):
        for weight in weights.values():
            weight.copy_(torch.randn_like(weight))
        skip = SKIP if number in (9, 10) else GO
        average.update(number, skip)
        assert average.has_begun == (number >= 5)
        if number in (5, 7, 11, 13):
            now = {name: weight.clone() for name, weight in weights.items()}
            expected = {
                name: now[name] if expected is None else 0.75 * expected[name] + 0.25 * now[name] for name in now
            }
        if expected:
            state = average.state()
            assert state.keys() == {"average.a", "average.b", "average_updates"}
            for name, value in expected.items():
                torch.testing.assert_close(state[f"average.{name}"], value, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exchange_and_back_changes_no_bit(dtype):
    weights = {"a": torch.randn(9)}
    average = ExponentialAverage(Average(interval=1, dtype=dtype), lambda: weights)
    average.update(1, GO)
    weights["a"].normal_()
    before = weights["a"].clone()
    kept = average.state()["average.a"].clone()
    assert kept.dtype == getattr(torch, dtype)
    average.exchange()
    assert weights["a"].dtype == torch.float32
    assert torch.equal(weights["a"], kept.float())
    average.exchange()
    assert torch.equal(weights["a"], before)
    after = average.state()["average.a"]
    assert after.dtype == kept.dtype
    assert torch.equal(after, kept)


@pytest.mark.parametrize("updates", [0, 3])
def test_what_was_loaded_says_whether_it_has_begun(updates):
    average = ExponentialAverage(Average(interval=1), lambda: {"a": torch.zeros(2)})
    average.state()["average_updates"].fill_(updates)
    average.was_loaded()
    assert average.has_begun == bool(updates)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_mean_of_the_last_updates(dtype):
    """Of fewer before there are as many; with a step that is taken back and computed again, and a resume."""
    weights = {"a": torch.randn(5, 3), "b": torch.randn(7)}
    config = Average(interval=2, last=3, start_step=1, dtype=dtype)
    average = average_of(config, lambda: weights, seed=0)
    taken: list[dict[str, Tensor]] = []
    for number in range(1, 14):
        for weight in weights.values():
            weight.normal_()
        average.update(number, GO)
        if number == 9:
            average.take_back(number)
            average.update(number, GO)
        if number == 10:
            state = {name: tensor.clone() for name, tensor in average.state().items()}
            average = average_of(config, lambda: weights, seed=0)
            for name, tensor in average.state().items():
                tensor.copy_(state[name])
            average.was_loaded()
        if number > 1 and number % 2 == 1:
            taken.append({name: weight.clone() for name, weight in weights.items()})
        assert average.has_begun == bool(taken)
        if taken:
            before = {name: weight.clone() for name, weight in weights.items()}
            average.exchange()
            for name, weight in weights.items():
                expected = torch.stack([each[name].to(getattr(torch, dtype)).double() for each in taken[-3:]]).mean(0)
                torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-6)
            average.exchange()
            assert all(torch.equal(weights[name], each) for name, each in before.items())
    state = average.state()
    assert state.keys() == {f"average.{index}.{name}" for index in range(3) for name in weights} | {"average_updates"}
    assert sorted(state["average_updates"].tolist()) == [9, 11, 13]


# --------------------------------------------------------------------------- in bfloat16

ROUNDED = Average(interval=1, decay=0.999, dtype="bfloat16")


def moved(config: Average, steps: int) -> Tensor:
    """The average of 20,000 weights that move linearly, by 0.3 in all."""
    start = torch.linspace(1.05, 1.65, 20_000)
    weights = {"a": start.clone()}
    average = ExponentialAverage(config, lambda: weights)
    for number in range(1, steps + 1):
        weights["a"].copy_(start + 0.3 * number / steps)
        average.update(number, GO)
    return average.state()["average.a"]


def test_an_average_in_bfloat16_follows_what_rounding_to_nearest_would_not():
    """Weights run ahead by up to 0.15; an update by 0.15 x 0.001 is 2% of the last bit, 2^-7 from 1 to 2."""
    steps = 1500
    exact = moved(ROUNDED.model_copy(update={"dtype": "float32"}), steps)
    found = moved(ROUNDED, steps)
    assert found.dtype == torch.bfloat16
    errors = (found.double() - exact) * 2**7
    assert abs(errors.mean()) < 5 * errors.std() / len(errors) ** 0.5
    assert errors.std() == pytest.approx(deviation(steps), rel=0.03)
    nearest = torch.linspace(1.05, 1.65, 20_000).bfloat16()  # rounded to the nearest, it stays where it begins
    behind = (nearest.double() - exact) * 2**7
    assert behind.mean() < -10


def deviation(steps: int) -> float:
    """The standard deviation of the rounding errors of `moved`, in last bits, by their probabilities."""
    ahead = 0.0
    variance = 1 / 6  # the mean of p (1 - p) over the first roundings, whose probabilities are spread evenly
    for _ in range(steps - 1):
        ahead += 0.3 / steps * 2**7
        up = 0.001 * ahead
        ahead -= up
        variance = 0.999**2 * variance + up * (1 - up)
    return math.sqrt(variance)


def test_an_update_in_bfloat16_rounds_the_formula_by_the_hash_of_step_and_element():
    torch.manual_seed(0)
    weights = {"a": torch.randn(30, 7), "b": torch.randn(11)}
    average = ExponentialAverage(ROUNDED, lambda: weights, seed=3)
    for number in range(1, 4):
        before = {name: average.state()[f"average.{name}"].float() for name in weights}
        for weight in weights.values():
            weight.normal_()
        average.update(number, GO)
        for name, weight in weights.items():
            exact = weight if number == 1 else before[name] + (weight - before[name]) * torch.tensor(0.001)
            bits = random_bits(key_of(3, name, part_of(weight), "average"), number, 0, weight.numel(), weight.device)
            expected = rounded(exact.flatten(), bits & 0xFFFF).view_as(weight)
            assert torch.equal(average.state()[f"average.{name}"], expected)
    kept = average.state()["average.a"].clone()
    average.update(4, SKIP)
    assert torch.equal(average.state()["average.a"], kept)


def test_random_numbers_are_not_those_of_the_moments():
    part = part_of(torch.empty(100))
    keys = [key_of(0, "a", part), key_of(0, "a", part, "average")]
    mine, moments = (random_bits(key, 1, 0, 100, torch.device("cpu")) for key in keys)
    assert not (mine == moments).any()
