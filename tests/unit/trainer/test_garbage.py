"""Python's collector during training: it runs between steps only, and does not walk what existed before."""

import gc

import pytest

from trainer.guards.garbage import Garbage

pytestmark = pytest.mark.slow


@pytest.fixture
def collections():
    """The generation of each collection that took place."""
    seen = []

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def make_cycles(n):
    for _ in range(n):
        cycle = []
        cycle.append(cycle)


def test_a_step_is_never_interrupted_and_its_cycles_are_freed_in_time(collections):
    garbage = Garbage(warm_up_steps=2)
    with garbage:
        collections.clear()
        for step in range(1, 103):
            make_cycles(1000)
            assert len(collections) == (step > 2)  # after the second step
            frozen = gc.get_freeze_count()
            garbage.after_step()
            assert (gc.get_freeze_count() > frozen) == (step == 2)
        assert collections == [2, 2]  # ... and after the 102nd, of 100,000 cycles
        assert gc.get_count()[0] < 1000
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_an_error_leaves_the_collector_as_it_was():
    with pytest.raises(ZeroDivisionError), Garbage(warm_up_steps=0):
        raise ZeroDivisionError
    assert gc.isenabled()
