"""The schedule against values worked out by hand, and what must hold for any settings."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.layout import schedule_lengths
from configs.schema import LrSchedule
from trainer.lr_schedule import learning_rate


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"name": "cosine", "warmup_steps": 4, "total_steps": 14, "min_lr_ratio": 0.1},
            {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 9: 0.55, 13: 0.1220245676671, 14: 0.1, 1000: 0.1},
        ),
        (
            {"name": "linear", "warmup_steps": 1, "total_steps": 11, "min_lr_ratio": 0.0},
            {0: 0.5, 1: 1.0, 2: 0.9, 6: 0.5, 10: 0.1, 11: 0.0},
        ),
        (
            {
                "name": "warmup_stable_decay",
                "warmup_steps": 3,
                "total_steps": 20,
                "decay_steps": 5,
                "min_lr_ratio": 0.5,
            },
            {0: 0.25, 2: 0.75, 3: 1.0, 14: 1.0, 15: 1.0, 16: 0.9, 19: 0.6, 20: 0.5},
        ),
        (
            {"name": "warmup_stable_decay", "total_steps": 100, "min_lr_ratio": 0.0},
            {0: 1.0, 90: 1.0, 95: 0.5, 99: 0.1, 100: 0.0},
        ),
        (
            {
                "name": "warmup_stable_decay",
                "total_steps": 20,
                "decay_steps": 4,
                "decay_shape": "one_minus_sqrt",
                "min_lr_ratio": 0.2,
            },
            {0: 1.0, 16: 1.0, 17: 0.6, 20: 0.2, 21: 0.2},
        ),
        (
            {
                "name": "warmup_stable_decay",
                "total_steps": 20,
                "decay_steps": 4,
                "decay_shape": "cosine",
                "min_lr_ratio": 0.0,
            },
            {16: 1.0, 18: 0.5, 20: 0.0},
        ),
        ({"name": "constant", "warmup_steps": 1, "total_steps": 4}, {0: 0.5, 1: 1.0, 4: 1.0, 1000: 1.0}),
        (
            {"name": "inverse_sqrt", "warmup_steps": 3, "total_steps": 63, "decay_steps": 0, "min_lr_ratio": 0.0},
            {0: 0.25, 3: 1.0, 15: 0.5, 63: 0.25, 99: 0.2},
        ),
        (
            {"name": "inverse_sqrt", "warmup_steps": 3, "total_steps": 27, "decay_steps": 24, "min_lr_ratio": 0.0},
            {3: 1.0, 15: 0.25, 27: 0.0, 30: 0.0},
        ),
        (
            {"name": "power", "exponent": 1.0, "total_steps": 100, "decay_steps": 10, "min_lr_ratio": 0.5},
            {0: 1.0, 1: 0.75, 9: 0.55, 100: 0.5},
        ),
    ],
)
def test_values_by_hand(settings: dict, expected: dict[int, float]):
    schedule = LrSchedule(**settings)
    for step, value in expected.items():
        assert learning_rate(schedule, 3e-4, step) == pytest.approx(3e-4 * value, rel=1e-12, abs=1e-20)


@st.composite
def schedules(draw: st.DrawFn) -> LrSchedule:
    warmup = draw(st.integers(0, 40))
    decay = draw(st.integers(1, 40))
    return LrSchedule(
        name=draw(st.sampled_from(["cosine", "linear", "warmup_stable_decay", "inverse_sqrt", "power"])),
        decay_shape=draw(st.sampled_from(["linear", "cosine", "one_minus_sqrt"])),
        warmup_steps=warmup,
        total_steps=warmup + decay + draw(st.integers(0, 40)),
        decay_steps=decay,
        min_lr_ratio=draw(st.floats(0, 1)),
    )


@given(schedules())
def test_rises_to_the_peak_then_falls_to_the_minimum(schedule: LrSchedule):
    values = [learning_rate(schedule, 2.0, step) for step in range(schedule.total_steps + 3)]
    rise, fall = values[: schedule.warmup_steps + 1], values[schedule.warmup_steps :]
    assert values[0] > 0
    assert all(before < after for before, after in itertools.pairwise(rise))
    assert values[schedule.warmup_steps] == 2.0 == max(values)
    assert all(before >= after - 1e-15 for before, after in itertools.pairwise(fall))
    assert values[schedule.total_steps :] == [2.0 * schedule.min_lr_ratio] * 3


@given(schedules(), st.integers(1, 9))
def test_steps_of_equal_tokens_make_the_same_curve_by_steps_and_by_tokens(schedule: LrSchedule, size: int):
    lengths = {f"{name}_tokens": getattr(schedule, f"{name}_steps") * size for name in ("warmup", "decay", "total")}
    of_tokens = LrSchedule(**schedule.model_dump(include={"name", "decay_shape", "min_lr_ratio"}), **lengths)
    for step in range(schedule.total_steps + 3):
        rate = learning_rate(of_tokens, 2.0, step * size, size)
        assert rate == pytest.approx(learning_rate(schedule, 2.0, step), rel=1e-12)


@given(schedules(), st.integers(0, 200))
def test_prolonging_a_stable_run_leaves_its_past_as_it_was(schedule: LrSchedule, more: int):
    schedule = schedule.model_copy(update={"name": "warmup_stable_decay"})
    longer = schedule.model_copy(update={"total_steps": schedule.total_steps + more})
    for step in range(schedule.total_steps - schedule_lengths(schedule).decay + 1):
        assert learning_rate(longer, 1e-3, step) == learning_rate(schedule, 1e-3, step)
