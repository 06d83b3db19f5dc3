"""The rule for jumps of the loss, by an independent computation."""

import math
import statistics

import pytest

from configs.errors import UserError
from configs.load import load
from configs.run_change import run_key_diff
from configs.schema import Spikes
from tests.end_to_end.launch import TINY
from trainer.guards.spikes import MAX_REWINDS, loss_limit, remembered, rewind_target


def test_the_limit_is_mean_and_deviations_of_the_last_losses():
    config = Spikes(action="skip", window=4, threshold=2.5)
    losses = [9.0, 5.25, 5.0, 4.5, 4.75]
    past: list[float] = []
    for loss in losses:
        past = remembered(config, past, loss)
    assert past == losses[1:]
    expected = statistics.fmean(past) + 2.5 * statistics.pstdev(past)
    assert loss_limit(config, past) == pytest.approx(expected, rel=1e-14)


def test_it_says_nothing_before_the_window_is_full_nor_when_off():
    config = Spikes(action="rewind", window=3)
    assert loss_limit(config, [1.0, 1.0]) == math.inf
    assert loss_limit(config, [1.0, 1.0, 1.0]) == 1.0
    assert loss_limit(Spikes(), [1.0] * 200) == math.inf
    assert remembered(Spikes(), [], 1.0) == []


def test_its_keys_decide_what_is_learned_the_others_of_the_table_do_not():
    old = load(str(TINY), (), 1).config.model_dump(mode="json")
    new = load(str(TINY), ("--fault.spikes.action", "skip", "--fault.compare_interval", "7"), 1).config
    assert run_key_diff(old, new.model_dump(mode="json")) == ['fault.spikes.action: "none" -> "skip"']
    del old["fault"]  # a checkpoint from before the table
    assert run_key_diff(old, load(str(TINY), (), 1).config.model_dump(mode="json")) == []


def test_where_a_run_would_not_return_it_has_not_returned_too_often():
    """The data and keys of the checkpoint are those of an earlier stage, which ends later than it."""
    config = Spikes(action="rewind", rewind_interval=40)
    incidents = [{"what": "rewind", "to_step": 40}] * MAX_REWINDS
    assert rewind_target(config, 45, incidents, 9.0, earliest=41) is None
    with pytest.raises(UserError, match=f"has returned to step 40 {MAX_REWINDS} times already"):
        rewind_target(config, 45, incidents, 9.0, earliest=40)
    assert rewind_target(config, 45, incidents[1:], 9.0, earliest=40) == 40
