"""A run learns before its first save whether it has room in the hosts' memory."""

import pytest
import torch

from checkpoint import staging
from checkpoint.manifest import steps_in
from checkpoint.shards import shards_of
from checkpoint.staging import Stager, free_memory
from tests.unit.checkpoint.test_checkpoint_manager import assert_equal, begun, make_state, process_group, resumed

__all__ = ["process_group"]
NEEDED = 8 * 4 * 4 + 3 * 2 + 4 * 8 * 8 + 4  # of make_state


def test_what_is_free(tmp_path):
    """The least of the machine's memory and of what each group around the process leaves, without files' old pages."""
    job = "sys/fs/cgroup/job"
    step = f"{job}/step_0"

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    write({"proc/meminfo": "MemTotal:   900 kB\nMemAvailable:   500 kB\n", "proc/self/cgroup": "0::/job/step_0\n"})
    assert free_memory(tmp_path) == 500 * 1024
    write(
        {
            f"{step}/memory.max": "max\n",
            f"{step}/memory.current": "1000\n",
            f"{step}/memory.stat": "anon 1000\ninactive_file 0\n",
        }
    )
    assert free_memory(tmp_path) == 500 * 1024
    write({f"{step}/memory.max": "4000\n"})
    assert free_memory(tmp_path) == 3000
    write({f"{step}/memory.stat": "anon 300\nfile 700\ninactive_file 600\nactive_file 100\n"})
    assert free_memory(tmp_path) == 3600
    write(
        {f"{job}/memory.max": "5000\n", f"{job}/memory.current": "2500\n", f"{job}/memory.stat": "inactive_file 600\n"}
    )
    assert free_memory(tmp_path) == 3100
    assert free_memory() > 1 << 20


@pytest.mark.parametrize("name", ["/", "/of/the/host"])  # a container may see its own name, or that on the host
def test_what_is_free_in_control_groups_of_version_1(tmp_path, name):
    files = {
        "proc/meminfo": "MemTotal:   900 kB\nMemAvailable:   500 kB\n",
        "proc/self/cgroup": f"9:name=systemd:/\n8:pids:/\n3:memory:{name}\n0::{name}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 5\ntotal_inactive_file 400\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert free_memory(tmp_path) == 500 * 1024
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("4000\n")
    assert free_memory(tmp_path) == 1400


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
