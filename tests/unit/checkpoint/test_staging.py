"""A run learns before its first save whether it has room in the hosts' memory."""

import pytest
import torch

from checkpoint import staging
from checkpoint.manifest import steps_in
from checkpoint.shards import shards_of
from checkpoint.staging import Stager
from tests.unit.checkpoint.test_checkpoint_manager import assert_equal, begun, make_state, process_group, resumed

__all__ = ["process_group"]
NEEDED = 8 * 4 * 4 + 3 * 2 + 4 * 8 * 8 + 4  # of make_state


def checked(folder, **settings):
    """A manager that has looked for room, and what it has said."""
    log = []
    manager = begun(folder, log=log, **settings)
    log.clear()
    manager.check_memory(make_state())
    return manager, log


def test_enough(tmp_path):
    manager, log = checked(tmp_path, mode="async")
    assert log == []
    manager.close()


def test_a_small_host_saves_while_training_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "free_memory", lambda: NEEDED)
    staged = []
    monkeypatch.setattr(Stager, "stage", lambda *arguments: staged.append(1))
    manager, log = checked(tmp_path, mode="async")
    assert f"has {NEEDED:,} of {NEEDED:,} bytes. Training will wait for each save of this launch" in log[0]
    manager.save(1, make_state(1), {"tokens": 1})
    assert steps_in(tmp_path) == [1]
    assert manager.under_way is None
    assert not staged
    manager.close()
    assert_equal(resumed(tmp_path)[1], make_state(1))


def test_staged_memory_is_as_large_as_what_it_holds():
    """Bit for bit, no storage larger than its tensor, and all of it in one piece."""
    state = {
        "odd": torch.randn(7, 3),
        "half": torch.randn(5).bfloat16(),
        "none": torch.empty(0, 4),
        "one": torch.ones(()),
    }
    stager = Stager(pytest.fail)
    for _ in range(2):
        state["odd"] += 1
        staged = stager.stage(shards_of(state))
        assert_equal({name: shard.local for name, shard in staged.items()}, state)
        for shard in staged.values():
            assert shard.local.untyped_storage().nbytes() == shard.local.numel() * shard.local.element_size()
    places = [shard.local.data_ptr() for shard in staged.values() if shard.local.numel()]
    assert max(places) - min(places) < 4 * staging.ALIGNMENT


def test_memory_is_there_before_the_first_save(tmp_path, monkeypatch):
    """Only what was prepared is used, in pieces that hold whole tensors."""
    monkeypatch.setattr(staging, "PIECE_BYTES", 64)
    manager, log = checked(tmp_path, mode="async")
    buffers = manager._stager._buffers.result(60)
    assert {name: (each.shape, each.dtype) for name, each in buffers.items()} == {
        name: (shard.local.shape, shard.local.dtype) for name, shard in shards_of(make_state()).items()
    }
    state = make_state(1)
    staged = manager._stager.stage(shards_of(state))
    assert all(staged[name].local.data_ptr() == buffers[name].data_ptr() for name in buffers)
    assert_equal({name: shard.local for name, shard in staged.items()}, state)
    assert log == []
    manager.close()


def test_memory_that_cannot_be_had_is_an_error_of_the_save(tmp_path, monkeypatch):
    def none_left(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(staging.mmap, "mmap", none_left)
    manager, _ = checked(tmp_path, mode="async")
    with pytest.raises(OSError, match="Cannot allocate memory"):
        manager.save(1, make_state(1), {"tokens": 1})
    assert steps_in(tmp_path) == []
