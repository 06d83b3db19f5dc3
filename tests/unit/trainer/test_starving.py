"""Experts that get almost no tokens: who is named, when, and how often."""

from tests.end_to_end.launch import launch_here
from trainer.report import starving
from trainer.report.starving import SHARE, STEPS, Starving


def said(*loads, n_steps=STEPS):
    """What is said of the loads, each of which comes in `n_steps` logged steps."""
    counts = Starving()
    complaints = [counts.complaint(load) for load in loads for _ in range(n_steps)]
    return [text for text in complaints if text]


def test_an_expert_under_the_stated_share_is_named_once_in_a_launch():
    even = [100] * 8
    starved = [*even[:5], 4, *even[6:]]
    assert starved[5] / (sum(starved) / 8) < SHARE < 6 / 88.25
    (text,) = said({1: even, 3: starved}, {1: even, 3: starved})
    assert "expert 5 of layer 3" in text
    assert f"{STEPS} logged steps" in text
    assert "docs/faults.md" in text
    assert said({3: [*even[:5], 6, *even[6:]]}) == []
    assert said({1: even, 3: starved}, n_steps=STEPS - 1) == []


def test_only_the_tokens_of_all_these_steps_count():
    """One step without tokens is no starvation."""
    load, none = {1: [100, 100, 100, 100]}, {1: [0, 133, 133, 134]}
    counts = Starving()
    assert [counts.complaint(each) for each in [*[none] * (STEPS - 2), load, load]] == [""] * STEPS
    assert said(none, load)
    assert said(load, none)


def test_a_line_names_a_few_and_counts_the_rest():
    loads = {layer: [1000, *[0] * 63] for layer in range(100)}
    (text,) = said(loads, loads)
    assert text.count(" of layer ") < 10
    assert "6,295 more" in text
    assert len(text) < 600


def test_layers_that_count_nothing_starve_nobody():
    assert said(None, {}, {2: [0, 0]}) == []


def test_a_launch_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(starving, "STEPS", 3)
    monkeypatch.setattr(starving, "SHARE", 3.0)  # which every expert is under
    job = ("--model.n_experts", "4", "--model.experts_per_token", "2", "--metrics.interval", "1")
    assert launch_here(tmp_path, *job, "--training.steps", "7") == 0
    printed = capsys.readouterr()
    text = "warning: step 3: less than 300% of an even share"
    assert (printed.out + printed.err).count("warning: step") == 1
    assert text in printed.out + printed.err
    assert text in (tmp_path / "run" / "run.log").read_text()
