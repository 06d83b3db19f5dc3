"""A run whose model predicts further tokens: what it logs, that a stop leaves no trace, and that it can be sampled."""

from pathlib import Path

import pytest

from tests.end_to_end.launch import assert_same_tensors, curve, launch_here, records, tensors

KEYS = ("--model.multi_token.depth", "2", "--training.steps")
VALIDATION = ("--validation.interval", "10", "--validation.sequences", "8")
SOURCES = ("--validation.sources", '[{name = "noise", kind = "synthetic"}]')


@pytest.mark.slow
def test_losses_are_logged_apart_and_a_stop_leaves_no_trace(tmp_path: Path):
    assert launch_here(tmp_path / "straight", *KEYS, "20", *VALIDATION, *SOURCES) == 0
    for steps in ("7", "20"):
        assert launch_here(tmp_path / "stopped", *KEYS, steps, *VALIDATION, *SOURCES) == 0
    straight, stopped = tmp_path / "straight" / "run", tmp_path / "stopped" / "run"
    assert curve(stopped) == curve(straight)
    assert_same_tensors(tensors(stopped), tensors(straight))
    logged = [record["multi_token_losses"] for record in records(straight)]
    assert logged == [record["multi_token_losses"] for record in records(stopped)]
    assert all(list(losses) == ["1", "2"] for losses in logged)
    assert all(5.4 < loss < 5.8 for losses in logged[:2] for loss in losses.values())  # about ln 256
    assert logged[-1] != logged[0]


def test_a_model_without_has_no_such_key(tmp_path: Path):
    assert launch_here(tmp_path, "--training.steps", "2") == 0
    assert not any("multi_token_losses" in record for record in records(tmp_path / "run"))
