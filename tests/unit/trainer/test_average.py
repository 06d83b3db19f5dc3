"""The average's updates, by a formula."""

import pytest
import torch

from configs.schema import Average
from trainer.average import WeightAverage

GO = torch.tensor(0.0)
SKIP = torch.tensor(1.0)


def test_updates_are_the_formula():
    """The first copies; each later one moves it by 1 - decay of the distance, unless its step was skipped."""
    weights = {name: torch.randn(shape, dtype=torch.float64) for name, shape in (("a", (5, 3)), ("b", (7,)))}
    average = WeightAverage(Average(interval=2, decay=0.75, start_step=3), lambda: weights)
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


def test_an_exchange_and_back_changes_no_bit():
    weights = {"a": torch.randn(9)}
    average = WeightAverage(Average(interval=1), lambda: weights)
    average.update(1, GO)
    weights["a"].normal_()
    before = weights["a"].clone()
    kept = average.state()["average.a"].clone()
    average.exchange()
    assert torch.equal(weights["a"], kept)
    average.exchange()
    assert torch.equal(weights["a"], before)
    assert torch.equal(average.state()["average.a"], kept)


@pytest.mark.parametrize("updates", [0, 3])
def test_what_was_loaded_says_whether_it_has_begun(updates):
    average = WeightAverage(Average(interval=1), lambda: {"a": torch.zeros(2)})
    average.state()["average_updates"].fill_(updates)
    average.was_loaded()
    assert average.has_begun == bool(updates)
