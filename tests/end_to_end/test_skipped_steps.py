"""A loss that is not finite changes nothing, on all ranks alike, and too many of them end the run."""

import math
from pathlib import Path

import pytest

from tests.end_to_end.launch import assert_same_tensors, launch, launch_here, records, status, tensors

pytestmark = pytest.mark.slow


def test_steps_that_overflow_are_skipped_until_the_limit(tmp_path: Path):
    """The first update makes the weights so large that float32 overflows in every later forward pass."""
    words = "--optimizer.lr 1e30 --lr_schedule.warmup_steps 0 --training.max_skipped_steps 3"
    outcome = launch(tmp_path, f"{words} --checkpoint.interval 1 --checkpoint.mode sync", ranks=2, expect=1)
    found = records(tmp_path / "run")  # strict JSON
    assert math.isfinite(found[0]["loss"])
    assert "skipped" not in found[0]
    for record in found[1:]:
        assert record["loss"] is None or record["grad_norm"] is None
        assert "is nan" in record["skipped"] or "is inf" in record["skipped"]
    for step in (2, 3, 4, 5):
        assert f"step {step} skipped: loss " in outcome.out
        assert f"its samples are {8 * (step - 1)} to {8 * step - 1}" in outcome.out
    assert outcome.said.count("of the last 4 steps was not finite, and training.max_skipped_steps is 3") == 1
    assert "Traceback (most recent call last)" not in outcome.err.partition("torch/distributed/elastic")[0]
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["step"]) == ("failed", 5)
    assert found[-1]["step"] == 5  # the step that ends the run, too
    # No save while steps are skipped: it would cost a good one its place.
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_resume_goes_on_counting(tmp_path: Path, capsys):
    """Two skipped before the stop and two after it are four in a row; the save of the stop removes none before it."""
    words = [
        "--optimizer.lr",
        "1e30",
        "--lr_schedule.warmup_steps",
        "0",
        "--training.max_skipped_steps",
        "3",
        "--metrics.interval",
        "1",
        "--checkpoint.interval",
        "1",
        "--checkpoint.keep_last",
        "1",
    ]
    assert launch_here(tmp_path, *words, "--training.steps", "3") == 0
    saved = [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert saved == ["step-00000001", "step-00000003"]
    first, last = tensors(tmp_path / "run", 1), tensors(tmp_path / "run", 3)
    assert_same_tensors(first, last)  # skipped steps change nothing
    assert launch_here(tmp_path, *words) == 1
    assert "of the last 4 steps was not finite" in capsys.readouterr().err
    assert status(tmp_path / "run")["step"] == 5
