"""What a launch knows of steps that a spike of the loss has made it leave."""

from types import SimpleNamespace
from typing import Any

from configs.load import load
from trainer import validation
from trainer.progress import Progress
from trainer.saved_state import RunState
from trainer.validation import Validation


def test_all_steps_after_the_checkpoint_are_new():
    """A stop in the middle of a step saves what is new, also below the step that the launch began with."""
    progress = Progress(load("parity.toml", ("--fault.spikes.action", "rewind")).config, RunState(step=150))
    progress.go_back(RunState(step=100), 9.0, [0, 1])
    assert progress.first_step == 100


def test_the_step_before_a_checkpoint_that_is_returned_to_was_finite():
    progress = Progress(load("parity.toml", ("--fault.spikes.action", "rewind")).config, RunState(step=150))
    progress.last_was_finite = False
    progress.go_back(RunState(step=100), 9.0, [0, 1])
    assert progress.last_was_finite


def test_an_interrupted_validation_leaves_no_loss_of_other_weights(monkeypatch):
    results: list[Any] = [SimpleNamespace(validation_loss=2.0), None]
    monkeypatch.setattr(validation, "validate", lambda *_: results.pop(0))
    measured: Any = object.__new__(Validation)
    measured._loader = ()
    measured._token_bytes = None
    for loss in (2.0, None):
        measured.measure(SimpleNamespace(average=None), 20, lambda: False)
        assert measured.loss_after(20) == loss
