"""Saving and resuming in one process: what is chosen, what is refused, and what a failure leaves behind."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist

from checkpoint import manager as managers
from checkpoint import manifest as manifests
from checkpoint import store
from checkpoint.manager import CheckpointManager, find, set_aside
from checkpoint.manifest import read_manifest, step_folder, steps_in
from configs.errors import ConfigError, UserError
from configs.schema import Checkpoint

CONFIG = {"model": {"dim": 8}, "training": {"max_norm": float("inf"), "seed": 0}}


@pytest.fixture(autouse=True)
def process_group():
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_state(seed=0, dim=8):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(dim, 4, generator=generator)
    return {
        "model.weight": weight,
        "model.bias": torch.randn(3, generator=generator).bfloat16(),
        "optimizer.weight.exp_avg": torch.randn(4, dim, generator=generator).double().t(),  # not contiguous
        "optimizer.weight.step": torch.tensor(float(seed)),
    }


def key_diff(old, new):
    return [f"{key}: {old[key]} -> {new[key]}" for key in old if old[key] != new[key]]


def make_manager(folder, log=None, config=CONFIG, allow_run_change=False, **settings):
    settings = Checkpoint(**{"mode": "sync", "interval": 10, **settings})
    lines = [] if log is None else log
    return CheckpointManager(folder, settings, config, {"dp_shard": 1}, key_diff, allow_run_change, lines.append)


def assert_equal(state, expected):
    assert state.keys() == expected.keys()
    for name in state:
        torch.testing.assert_close(state[name], expected[name], rtol=0, atol=0)


def save_steps(folder, *steps, **options):
    """A run that saves at `steps`; the state at step n is make_state(n)."""
    manager = make_manager(folder, **options)
    manager.resume(make_state(99))
    for step in steps:
        manager.save(step, make_state(step), {"tokens": step * 100, "step": step})
    manager.close()


def poll_until_over(manager):
    for _ in range(1000):
        manager.poll()
        time.sleep(0.01)


def save_and_wait(manager, *arguments):
    manager.save(*arguments)
    manager.wait()


def resumed(folder, **options):
    """What a start finds: (trainer state, state)."""
    manager = make_manager(folder, **options)
    state = make_state(99)
    trainer_state = manager.resume(state)
    manager.close()
    return trainer_state, state


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_state_comes_back_bit_for_bit(tmp_path, mode):
    trainer_state = {"tokens": 800, "loss": 0.1 + 0.2, "data": {"next_sample": 2**40}, "skipped": [3, 4]}
    manager = make_manager(tmp_path / "run" / "checkpoints", mode=mode)
    assert manager.resume(make_state(99)) is None
    assert manager.latest_step() is None
    assert manager.save(8, make_state(8), trainer_state) > 0
    manager.close()
    assert manager.latest_step() == 8
    found, state = resumed(tmp_path / "run" / "checkpoints")
    assert found == trainer_state
    assert_equal(state, make_state(8))


def test_interval(tmp_path):
    manager = make_manager(tmp_path, interval=10)
    assert [step for step in range(1, 31) if manager.should_save(step)] == [10, 20, 30]
    assert not any(make_manager(tmp_path, interval=0).should_save(step) for step in range(1, 31))


def test_async_save_holds_the_state_of_its_step(tmp_path, monkeypatch):
    may_write, write = threading.Event(), store.write
    monkeypatch.setattr(store, "write", lambda *arguments: may_write.wait(10) and write(*arguments))
    manager = make_manager(tmp_path, mode="async")
    state, trainer_state = make_state(1), {"tokens": 5, "skipped": [1]}
    manager.resume(state)
    state = make_state(1)
    manager.save(1, state, trainer_state)
    for tensor in state.values():
        tensor.fill_(7)
    trainer_state["skipped"].append(2)
    manager.poll()
    may_write.set()
    manager.wait()
    for tensor in state.values():
        tensor.fill_(8)
    manager.save(2, state, trainer_state)  # the staging memory is used again
    manager.close()
    found, loaded = resumed(tmp_path, load=1)
    assert found == {"tokens": 5, "skipped": [1]}
    assert_equal(loaded, make_state(1))


def test_one_save_in_flight(tmp_path, monkeypatch):
    in_flight, write = [], store.write

    def slow_write(*arguments):
        in_flight.append(1)
        assert len(in_flight) == 1
        time.sleep(0.2)
        names = write(*arguments)
        in_flight.clear()
        return names

    monkeypatch.setattr(store, "write", slow_write)
    manager = make_manager(tmp_path, mode="async")
    manager.resume(make_state())
    first = manager.save(1, make_state(1), {"tokens": 1})
    second = manager.save(2, make_state(2), {"tokens": 2})
    manager.close()
    assert first < 0.2 <= second
    assert steps_in(tmp_path) == [1, 2]


def test_error_in_the_background_surfaces_at_a_poll(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    save_steps(tmp_path, 1)
    manager = make_manager(tmp_path, mode="async")
    manager.resume(make_state(99))
    monkeypatch.setattr(managers.manifests, "commit", full)
    manager.save(2, make_state(2), {"tokens": 2})
    with pytest.raises(UserError, match=r"step-00000002 could not be written.*No space left"):
        poll_until_over(manager)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_full_disk_leaves_the_checkpoint_before(tmp_path, mode):
    save_steps(tmp_path, 1)
    manager = make_manager(tmp_path, mode=mode)
    state = make_state(99)
    manager.resume(state)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(UserError, match=r"step-00000002 could not be written: rank 0: .*File too large.*__0_0"):
            save_and_wait(manager, 2, {"big": torch.zeros(300_000)}, {"tokens": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    assert_equal(resumed(tmp_path)[1], make_state(1))


@pytest.mark.parametrize("moment", ["data", "manifest", "rename"])
def test_kill_in_a_save_leaves_the_checkpoint_before(tmp_path, moment):
    save_steps(tmp_path, 1)
    script = """
        import os, signal, sys
        from pathlib import Path
        import torch.distributed as dist
        from checkpoint import manifest, store
        from tests.unit.test_checkpoint_manager import make_manager, make_state
        def kill(*_):
            os.kill(os.getpid(), signal.SIGKILL)
        folder, moment = Path(sys.argv[1]), sys.argv[2]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        manager = make_manager(folder, mode="async")
        manager.resume(make_state(99))
        if moment == "data":
            store._SyncedStream.close = kill
        elif moment == "manifest":
            manifest.asdict = kill
        else:
            Path.rename = kill
        manager.save(2, make_state(2), {"tokens": 2})
        manager.wait()
    """
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(script), tmp_path, moment], timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002.tmp"]
    log = []
    assert_equal(resumed(tmp_path, log=log)[1], make_state(1))
    assert any("removed" in line and "step-00000002.tmp" in line for line in log)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match=r"folder for checkpoints, .*can't be written.*job.output_dir"):
        make_manager(tmp_path / "checkpoints").resume(make_state())


def test_a_committed_checkpoint_is_never_overwritten(tmp_path):
    save_steps(tmp_path, 5)
    manager = make_manager(tmp_path)
    manager.resume(make_state())
    manager.save(5, make_state(6), {"tokens": 1})  # loaded from it: nothing new to save
    assert_equal(resumed(tmp_path)[1], make_state(5))
    step_folder(tmp_path, 7).mkdir()
    with pytest.raises(UserError, match="step-00000007 exists, but not by this run"):
        manager.save(7, make_state(7), {"tokens": 1})


def test_choices(tmp_path):
    save_steps(tmp_path / "run", 1, 2, 30)
    log = []
    assert resumed(tmp_path / "run", log=log)[0]["step"] == 30
    assert any("going on from" in line and "latest" in line for line in log)
    assert resumed(tmp_path / "other", load=str(step_folder(tmp_path / "run", 2)))[0]["step"] == 2
    assert find(tmp_path / "run", 2) == step_folder(tmp_path / "run", 2)
    with pytest.raises(ConfigError, match=r"= 3: no such step in .*; steps there: 1, 2, 30"):
        resumed(tmp_path / "run", load=3)
    with pytest.raises(ConfigError, match="steps there: none"):
        resumed(tmp_path / "empty", load=3)
    with pytest.raises(ConfigError, match=r"lately.*no such folder"):
        resumed(tmp_path / "run", load="lately")
    with pytest.raises(UserError, match="is no checkpoint"):
        resumed(tmp_path / "run", load=str(tmp_path))
    assert steps_in(tmp_path / "run") == [1, 2, 30]
    state = make_state(4)
    assert make_manager(tmp_path / "run", load="none").resume(state) is None
    assert_equal(state, make_state(4))


def test_lineage(tmp_path):
    save_steps(tmp_path, 1, 2, 3)
    first, second, third = (read_manifest(step_folder(tmp_path, step)) for step in (1, 2, 3))
    assert first.parent is None
    assert second.parent == manifests.Origin(first.run_id, 1)
    assert third.run_id == second.run_id == first.run_id
    assert (third.step, third.tokens, third.mesh) == (3, 300, {"dp_shard": 1})
    assert third.config == json.loads(json.dumps(CONFIG))
    save_steps(tmp_path, 4)
    assert read_manifest(step_folder(tmp_path, 4)).run_id == first.run_id
    log = []
    save_steps(tmp_path, 3, load=2, log=log)  # another branch
    assert steps_in(tmp_path) == [1, 2, 3]
    assert steps_in(tmp_path / "abandoned-001") == [3, 4]
    assert any("moved to" in line and "abandoned-001" in line for line in log)
    branch = read_manifest(step_folder(tmp_path, 3))
    assert branch.parent == manifests.Origin(first.run_id, 2)
    assert branch.run_id != first.run_id
    save_steps(tmp_path, 1, load="none")
    assert steps_in(tmp_path) == [1]
    assert steps_in(tmp_path / "abandoned-002") == [1, 2, 3]
    assert set_aside(tmp_path, 1) is None


def test_another_model_is_refused_and_nothing_is_loaded(tmp_path):
    save_steps(tmp_path, 1)
    state = make_state(5, dim=16)
    state["model.extra"] = torch.zeros(2)
    state["model.bias"] = state["model.bias"].float()
    del state["optimizer.weight.step"]
    before = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(ConfigError) as caught:
        make_manager(tmp_path).resume(state)
    message = str(caught.value)
    assert "5 tensors differ" in message
    assert "model.weight: float32 [8, 4] in the checkpoint, float32 [16, 4] here" in message
    assert "model.bias: bfloat16 [3] in the checkpoint, float32 [3] here" in message
    assert "model.extra: not in the checkpoint" in message
    assert "optimizer.weight.step: only in the checkpoint" in message
    assert_equal(state, before)


def test_changed_run_keys(tmp_path):
    save_steps(tmp_path, 1)
    changed = {**CONFIG, "model": {"dim": 9}}
    state = make_state(5)
    with pytest.raises(ConfigError, match=r"model: \{'dim': 8\} -> \{'dim': 9\}\n.*allow_run_change"):
        make_manager(tmp_path, config=changed).resume(state)
    assert_equal(state, make_state(5))
    save_steps(tmp_path, 2, config=changed, allow_run_change=True)
    save_steps(tmp_path, 3, config=changed)
    [change] = read_manifest(step_folder(tmp_path, 3)).run_changes
    assert change.step == 1
    assert "'dim': 9" in change.changes[0]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "trainer.json"])
@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_damaged_file_is_named_and_nothing_is_loaded(tmp_path, name, damage):
    save_steps(tmp_path, 1, 2)
    path = step_folder(tmp_path, 2) / name
    if damage == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size + (1 if damage == "long" else -1))
    state = make_state(5)
    with pytest.raises(UserError, match=f"step-00000002 is damaged: {name} (is missing|has .* bytes)") as caught:
        make_manager(tmp_path).resume(state)
    assert not isinstance(caught.value, ConfigError)
    assert_equal(state, make_state(5))
    assert resumed(tmp_path, load=1)[0]["step"] == 1


def test_content_that_torch_cannot_read(tmp_path):
    save_steps(tmp_path, 1)
    path = step_folder(tmp_path, 1) / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(UserError, match="step-00000001 is damaged: rank 0: "):
        make_manager(tmp_path).resume(make_state())


def test_equal_states_make_equal_files(tmp_path):
    save_steps(tmp_path / "a", 1)
    save_steps(tmp_path / "b" / "c", 1)
    for name in read_manifest(step_folder(tmp_path / "a", 1)).files:
        files = [step_folder(root, 1) / name for root in (tmp_path / "a", tmp_path / "b" / "c")]
        assert files[0].read_bytes() == files[1].read_bytes()
