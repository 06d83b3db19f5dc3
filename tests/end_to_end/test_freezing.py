"""Frozen parameters from the job file to the checkpoint: what rests stays, and a stop anywhere leaves no trace."""

import shutil

import pytest
import torch

from tests.end_to_end.launch import assert_same_tensors, curve, launch_here, records, tensors

RESTING = '[{pattern = "layers.0.*", freeze = true}, {pattern = "embed*", freeze_until_step = 6, weight_decay = 0.5}]'
WORDS = ("--optimizer.groups", RESTING, "--checkpoint.keep_last", "0")


@pytest.mark.slow
def test_stops_before_at_and_after_the_step(tmp_path):
    """The straight run saves at every step that is looked at; the stopped one ends there, and goes on."""
    assert launch_here(tmp_path, *WORDS, "--checkpoint.interval", "1") == 0
    straight = tmp_path / "straight"
    shutil.move(tmp_path / "run", straight)
    for steps in (3, 6, 9, 20):
        assert launch_here(tmp_path, *WORDS, "--training.steps", str(steps)) == 0
    assert curve(tmp_path / "run") == curve(straight)
    assert_same_tensors(tensors(tmp_path / "run"), tensors(straight))

    at = {step: tensors(straight, step) for step in (1, 5, 6, 7, 20)}
    for name in at[1]:
        if name.startswith("model.layers.0."):
            assert torch.equal(at[1][name], at[20][name]), name
    assert not any(name.startswith("optimizer.layers.0.") for name in at[1])
    embedding, moment = "model.embed_tokens.weight", "optimizer.embed_tokens.weight.exp_avg"
    assert torch.equal(at[1][embedding], at[6][embedding])  # and so weight decay has left it alone
    assert not torch.equal(at[6][embedding], at[7][embedding])
    assert not at[6][moment].any()
    assert at[7][moment].any()

    flops = {r["step"]: r["tflops"] * r["step_seconds"] for r in records(straight) if r["tflops"] and r["step_seconds"]}
    before, after = (flops[step] for step in (5, 8))
    assert before < after  # what is not computed is not counted


def test_freezing_is_part_of_the_run(tmp_path, capsys):
    assert launch_here(tmp_path, *WORDS, "--training.steps", "2") == 0
    changed = RESTING.replace("6", "7")
    assert launch_here(tmp_path, "--optimizer.groups", changed) == 78
    assert "the run's settings differ" in capsys.readouterr().err
