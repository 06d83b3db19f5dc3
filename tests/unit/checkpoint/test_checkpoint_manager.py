"""Saving and resuming in one process: what is chosen, what is refused, and what a failure leaves behind."""

import errno
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpoint import manifest as manifests
from checkpoint import reader, store
from checkpoint import storage as storages
from checkpoint.folder import set_aside
from checkpoint.incarnation import Alone
from checkpoint.manager import CheckpointManager
from checkpoint.manifest import Damaged, read_manifest, step_folder, steps_in
from checkpoint.reader import Description, Log
from checkpoint.staging import Stager
from checkpoint.storage import FolderStorage
from checkpoint.store import SaveFailed
from configs.errors import ConfigError, UserError
from configs.schema import Checkpoint
from tests.unit.hf_support import TINY, make_model
from tests.unit.hf_support import save as save_model

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


def make_manager(
    folder,
    log=None,
    config=CONFIG,
    allow_run_change=False,
    tokenizer_hash=None,
    incarnation=None,
    max_save_failures=1,
    **settings,
):
    settings = Checkpoint(**{"mode": "sync", "interval": 10, **settings})
    log = [] if log is None else log
    run = Description(config, {"dp_shard": 1}, tokenizer_hash, allow_run_change=allow_run_change)
    manager = CheckpointManager(folder, settings, run, Log(log.append, log.append), incarnation)
    manager.max_save_failures = max_save_failures
    return manager


def begun(folder, state=None, **options):
    """A manager that is ready to save."""
    manager = make_manager(folder, **options)
    manager.resume(make_state(99) if state is None else state)
    manager.begin_lineage()
    return manager


def assert_equal(state, expected):
    assert state.keys() == expected.keys()
    for name in state:
        torch.testing.assert_close(state[name], expected[name], rtol=0, atol=0)


def save_steps(folder, *steps, **options):
    """A run that saves at `steps`; the state at step n is make_state(n)."""
    manager = begun(folder, **options)
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
    manager.begin_lineage()
    manager.close()
    return trainer_state, state


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_state_comes_back_bit_for_bit(tmp_path, mode):
    trainer_state = {"tokens": 800, "loss": 0.1 + 0.2, "data": {"next_sample": 2**40}, "skipped": [3, 4]}
    manager = make_manager(tmp_path / "run" / "checkpoints", mode=mode)
    assert manager.resume(make_state(99)) is None
    assert manager.latest_step() is None
    manager.begin_lineage()
    assert manager.save(8, make_state(8), trainer_state) > 0
    manager.close()
    assert manager.latest_step() == 8
    found, state = resumed(tmp_path / "run" / "checkpoints")
    assert found == trainer_state
    assert_equal(state, make_state(8))


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And the name, too, before the checkpoint counts as saved: the order of what the kernel is asked."""
    done, fsync, rename = [], os.fsync, Path.rename

    def synced(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(path, target):
        done.append(f"{path.name} -> {Path(target).name}")
        return rename(path, target)

    manager = begun(tmp_path / "checkpoints", mode="sync")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    manager.save(1, make_state(1), {"tokens": 1})
    *files, unfinished, named, parent = done
    assert unfinished == "step-00000001.tmp"
    assert named == "step-00000001.tmp -> step-00000001"
    assert parent == "checkpoints"
    written = {path.name for path in step_folder(tmp_path / "checkpoints", 1).iterdir()}
    assert {name.removesuffix(".tmp") for name in files if "->" not in name} == written


def test_interval(tmp_path):
    manager = make_manager(tmp_path, interval=10)
    assert [step for step in range(1, 31) if manager.should_save(step)] == [10, 20, 30]
    assert not any(make_manager(tmp_path, interval=0).should_save(step) for step in range(1, 31))


def test_async_save_holds_the_state_of_its_step(tmp_path, monkeypatch):
    may_write, write = threading.Event(), store.write
    monkeypatch.setattr(store, "write", lambda *arguments: may_write.wait(10) and write(*arguments))
    manager = begun(tmp_path, mode="async")
    state, trainer_state = make_state(1), {"tokens": 5, "skipped": [1]}
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
    found, loaded = resumed(tmp_path, load=1, go_back=1)
    assert found == {"tokens": 5, "skipped": [1]}
    assert_equal(loaded, make_state(1))


@pytest.mark.parametrize("when", ["before", "after"])
def test_memory_that_changes_while_it_is_written(tmp_path, monkeypatch, when):
    """A bit flips in what is staged: the files' hashes are of the wrong bytes, so they cannot show it."""
    write = store.write

    def flipping(storage, folder, shards, *arguments):
        files = write(storage, folder, shards, *arguments) if when == "after" else None
        shards["model.weight"].local.view(torch.int32)[0, 0] ^= 1 << 22
        return files or write(storage, folder, shards, *arguments)

    save_steps(tmp_path, 1)
    log = []
    manager = begun(tmp_path, mode="async", max_save_failures=2, log=log)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write", flipping)
        save_and_wait(manager, 2, make_state(2), {"tokens": 2})
    assert any("step-00000002 is not kept" in line and "model.weight of rank 0 on" in line for line in log), log
    assert steps_in(tmp_path) == [1]
    save_and_wait(manager, 3, make_state(3), {"tokens": 3})
    manager.close()
    assert_equal(resumed(tmp_path)[1], make_state(3))


def test_one_save_in_flight(tmp_path, monkeypatch):
    in_flight, write = [], store.write

    def slow_write(*arguments):
        in_flight.append(1)
        assert len(in_flight) == 1
        time.sleep(0.3)
        names = write(*arguments)
        in_flight.clear()
        return names

    monkeypatch.setattr(store, "write", slow_write)
    log = []
    manager = begun(tmp_path, mode="async", log=log)
    first = manager.save(1, make_state(1), {"tokens": 1})
    second = manager.save(2, make_state(2), {"tokens": 2})
    manager.close()
    assert first < 0.2 <= second
    saved = [line for line in log if line.startswith("checkpoint ")]
    for line, step, stall in zip(saved, (1, 2), (first, second), strict=True):  # one line each
        assert line.startswith(f"checkpoint step-0000000{step}: committed, ")
        assert line.endswith(f" s; training waited {stall:.3f} s")
    assert steps_in(tmp_path) == [1, 2]


def test_error_in_the_background_surfaces_at_a_poll(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    save_steps(tmp_path, 1)
    manager = begun(tmp_path, mode="async")
    monkeypatch.setattr(FolderStorage, "commit", full)
    manager.save(2, make_state(2), {"tokens": 2})
    with pytest.raises(UserError, match=r"step-00000002 could not be written.*No space left"):
        poll_until_over(manager)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_full_disk_leaves_the_checkpoint_before(tmp_path, mode):
    save_steps(tmp_path, 1)
    manager = begun(tmp_path, mode=mode)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(UserError, match=r"step-00000002 could not be written: rank 0: .*File too large.*__0_0"):
            save_and_wait(manager, 2, {"big": torch.zeros(300_000)}, {"tokens": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    assert_equal(resumed(tmp_path)[1], make_state(1))


def refuse_late(monkeypatch, times, name="step-00000002"):
    """Let renames to `name` be done, and then reported as failed, so often."""
    rename, left = os.rename, [None] * times

    def late(source, target, **options):
        rename(source, target, **options)
        if Path(target).name == name and left:
            left.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source), None, str(target))

    monkeypatch.setattr(os, "rename", late)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_checkpoint_counts_that_is_there_in_spite_of_an_error(tmp_path, monkeypatch, mode):
    log = []
    manager = begun(tmp_path, mode=mode, log=log, keep_last=1)
    save_and_wait(manager, 1, make_state(1), {"tokens": 1})
    refuse_late(monkeypatch, times=1)
    save_and_wait(manager, 2, make_state(2), {"tokens": 2})
    assert manager.latest_step() == 2
    assert any("step-00000002 is complete, although the file system reported" in line for line in log), log
    assert steps_in(tmp_path) == [1, 2]  # the rename may not survive a power cut
    save_and_wait(manager, 2, make_state(2), {"tokens": 2})
    save_and_wait(manager, 3, make_state(3), {"tokens": 3})
    manager.close()
    assert steps_in(tmp_path) == [3]
    assert read_manifest(step_folder(tmp_path, 3)).parent.step == 2


def test_a_checkpoint_counts_whose_name_could_not_be_synced(tmp_path, monkeypatch):
    fsync = os.fsync

    def refusing(descriptor):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")) == tmp_path and steps_in(tmp_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)
    save_steps(tmp_path, 1, 1)
    assert resumed(tmp_path)[0]["step"] == 1


def test_saving_the_step_again_finds_the_checkpoint_that_was_taken_for_failed(tmp_path, monkeypatch):
    """The file system does not even let the checkpoint be read when it is looked for."""
    log = []
    manager = begun(tmp_path, max_save_failures=2, log=log)
    with monkeypatch.context() as patch:
        refuse_late(patch, times=1)
        patch.setattr(storages, "_is_there", lambda *_: False)
        manager.save(2, make_state(2), {"tokens": 2})
    assert manager.latest_step() is None
    assert any("failed saves in a row: 1" in line for line in log), log
    manager.save(2, make_state(2), {"tokens": 2})
    assert manager.latest_step() == 2
    manager.close()
    assert_equal(resumed(tmp_path)[1], make_state(2))


def test_a_checkpoint_of_another_run_is_not_taken_for_a_late_one(tmp_path):
    save_steps(tmp_path / "other", 7)
    manager = begun(tmp_path)
    shutil.copytree(step_folder(tmp_path / "other", 7), step_folder(tmp_path, 7))
    with pytest.raises(UserError, match="step-00000007 exists, but not by this run"):
        manager.save(7, make_state(7), {"tokens": 1})


def test_a_checkpoint_that_is_there_but_cannot_be_read_is_a_failed_save(tmp_path):
    log = []
    manager = begun(tmp_path, max_save_failures=2, log=log)
    step_folder(tmp_path, 7).mkdir()
    (step_folder(tmp_path, 7) / "MANIFEST.json").write_text("{")
    manager.save(7, make_state(7), {"tokens": 1})
    assert any("step-00000007 could not be written" in line and "is damaged" in line for line in log), log


def refuse(*_, **__):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_ends_whatever_its_clean_up_raises(tmp_path, monkeypatch, mode):
    """shutil.rmtree raises in spite of ignore_errors if the file system refuses to close a folder."""

    def fail(*_):
        monkeypatch.setattr(shutil, "rmtree", refuse)
        monkeypatch.setattr(Alone, "require_current", refuse)
        raise SaveFailed("the disk refuses")

    log = []
    manager = begun(tmp_path, mode=mode, max_save_failures=2, log=log, timeout_seconds=20)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write", fail)
        save_and_wait(manager, 1, make_state(1), {"tokens": 1})
    assert any("the disk refuses; training continues" in line for line in log), log


def test_a_save_that_cannot_begin_keeps_nobody_waiting(tmp_path, monkeypatch):
    """The thread of the grace time goes on after the error, and the main thread waits for the save."""

    def refuse(*_):
        raise MemoryError("no room to stage")

    monkeypatch.setattr(Stager, "stage", refuse)
    manager = begun(tmp_path, mode="async", timeout_seconds=20)
    for action in (lambda: manager.save(1, make_state(1), {"tokens": 1}), manager.wait):
        with pytest.raises(MemoryError):
            action()


def test_an_error_after_a_save_does_not_make_it_fail(tmp_path, monkeypatch):
    log = []
    manager = begun(tmp_path, keep_last=1, log=log)
    manager.save(1, make_state(1), {"tokens": 1})
    looks = iter([None, OSError(errno.EIO, "no answer")])  # before the commit, and after it

    def look(_):
        if error := next(looks):
            raise error

    monkeypatch.setattr(Alone, "require_current", look)
    manager.save(2, make_state(2), {"tokens": 2})
    manager.close()
    assert any("can't look for checkpoints to remove" in line for line in log), log


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["data", pytest.param("manifest", marks=pytest.mark.slow), pytest.param("rename", marks=pytest.mark.slow)]
)
def test_kill_in_a_save_leaves_the_checkpoint_before(tmp_path, moment):
    save_steps(tmp_path, 1)
    script = """
        import os, signal, sys
        from pathlib import Path
        import torch.distributed as dist
        from checkpoint import storage
        from tests.unit.checkpoint.test_checkpoint_manager import begun, make_state
        def kill(*_):
            os.kill(os.getpid(), signal.SIGKILL)
        folder, moment = Path(sys.argv[1]), sys.argv[2]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        manager = begun(folder, mode="async")
        if moment == "data":
            os.fsync = kill
        elif moment == "manifest":
            storage.asdict = kill
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
        begun(tmp_path / "checkpoints")


def test_a_committed_checkpoint_is_never_overwritten(tmp_path):
    save_steps(tmp_path, 5)
    manager = begun(tmp_path)
    manager.save(5, make_state(6), {"tokens": 1})  # loaded from it: nothing new to save
    assert_equal(resumed(tmp_path)[1], make_state(5))
    step_folder(tmp_path, 7).mkdir()
    with pytest.raises(UserError, match="step-00000007 exists, but not by this run"):
        manager.save(7, make_state(7), {"tokens": 1})


def test_choices(tmp_path):
    save_steps(tmp_path / "run", 1, 2, 30)
    log = []
    assert resumed(tmp_path / "run", log=log)[0]["step"] == 30
    assert any("resuming from" in line and "latest" in line for line in log)
    assert resumed(tmp_path / "other", load=str(step_folder(tmp_path / "run", 2)))[0]["step"] == 2
    with pytest.raises(ConfigError, match=r"= 31: no such step in .*; steps there: 1, 2, 30"):
        resumed(tmp_path / "run", load=31)
    with pytest.raises(ConfigError, match=r"= 3: no such step in .*; steps there: 1, 2, 30"):
        resumed(tmp_path / "run", load=3, go_back=1)
    with pytest.raises(ConfigError, match="steps there: none"):
        resumed(tmp_path / "empty", load=3)
    with pytest.raises(ConfigError, match=r"lately.*no such folder"):
        resumed(tmp_path / "run", load="lately")
    with pytest.raises(UserError, match="is not a checkpoint"):
        resumed(tmp_path / "run", load=str(tmp_path))
    assert steps_in(tmp_path / "run") == [1, 2, 30]
    state, log = make_state(4), []
    assert make_manager(tmp_path / "run", log=log, load="none").resume(state) is None
    assert_equal(state, make_state(4))
    assert log == ["starting from random weights (checkpoint.load is none)"]
    make_manager(tmp_path / "empty", log=log).resume(state)
    assert f"starting from random weights (no checkpoint in {tmp_path / 'empty'} yet)" == log[-1]


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
    save_steps(tmp_path, 3, load=2, go_back=1, log=log)  # another branch
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


@pytest.mark.parametrize("of", ["step", "folder", "own folder"])
def test_a_run_is_not_thrown_back_by_the_command_that_began_it(tmp_path, of):
    save_steps(tmp_path / "base", 1, 2)
    run, log = tmp_path / "run", []
    if of != "folder":
        save_steps(run, 1, 2)
    load = {"step": 2, "folder": str(tmp_path / "base/step-00000002"), "own folder": f"{run}/./step-00000002"}[of]
    save_steps(run, 4, 6, load=load)
    state, saved = make_state(99), resumed(run, load=load, log=log)[0]
    assert saved["step"] == 6
    assert f"resuming from {run}/step-00000006: checkpoint.load is {load}, but this run has its own" in "\n".join(log)
    assert "set checkpoint.go_back = 1" in log[-1]
    flip_a_bit(run / "step-00000006" / "trainer.json", 10)
    assert resumed(run, load=load)[0]["step"] == 4
    assert steps_in(run / "abandoned-001") == [6]
    (run / "step-00000004" / "trainer.json").unlink()
    make_manager(run, load=load).resume(state)
    assert_equal(state, make_state(2))


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path):
    save_steps(tmp_path / "base/checkpoints", 1, 2)
    run, base, log = tmp_path / "run", str(tmp_path / "base"), []
    assert resumed(run, load=base, log=log)[0]["step"] == 2
    assert f"resuming from {base}/checkpoints/step-00000002: checkpoint.load is {base}" in log
    save_steps(run, 3, load=base)
    save_steps(tmp_path / "base/checkpoints", 9)  # the other run goes on, and this one does not jump there
    assert resumed(run, load=base)[0]["step"] == 3
    assert resumed(run, load=base, go_back=1)[0]["step"] == 9
    assert steps_in(run / "abandoned-001") == [3]


def test_weights_may_come_from_a_run_folder(tmp_path):
    save_steps(tmp_path / "base/checkpoints", 1, 2)
    log = []
    state = make_state(5)
    make_manager(tmp_path / "new", log=log, init_from=str(tmp_path / "base")).resume(state)
    assert torch.equal(state["model.weight"], make_state(2)["model.weight"])
    assert f"starting from the weights of {tmp_path}/base/checkpoints/step-00000002" in log[-1]


def test_where_a_run_began_may_be_gone_or_damaged_since(tmp_path):
    base, run = tmp_path / "base", tmp_path / "run"
    save_steps(base, 2)
    load = step_folder(base, 2)
    save_steps(run, 4, load=str(load))
    (load / "trainer.json").unlink()
    assert resumed(run, load=str(load))[0]["step"] == 4
    with pytest.raises(Damaged, match=r"step-00000002 is damaged: trainer.json is missing"):
        resumed(run, load=str(load), go_back=1)
    shutil.rmtree(load)
    assert resumed(run, load=str(load))[0]["step"] == 4
    with pytest.raises(ConfigError, match=r"step-00000002.: no such folder"):
        resumed(run, load=str(load), go_back=1)
    assert steps_in(run) == [4]


def test_going_back_takes_a_word_that_counts_once(tmp_path):
    base = tmp_path / "base"
    save_steps(base, 1, 2)
    load = str(step_folder(base, 2))
    for begin in (2, load):
        run, log = tmp_path / f"run-{begin == load}", []
        save_steps(run, 2)
        save_steps(run, 4, load=2)
        assert resumed(run, load=begin, go_back=1)[0]["step"] == 2  # and is killed before its first save
        assert steps_in(run / "abandoned-001")[-1] == 4
        save_steps(run, 3, 4, load=begin, go_back=1)
        assert read_manifest(step_folder(run, 3)).times_gone_back == 1
        save_steps(run, 5, load=begin, go_back=1)  # the same command, after a preemption
        save_steps(run, 6)
        assert resumed(run, load=begin, go_back=1, log=log)[0]["step"] == 6
        assert "set checkpoint.go_back = 2" in log[-1]
        assert [path.name for path in run.glob("abandoned-*")] == ["abandoned-001"]
        assert resumed(run, load=begin, go_back=2)[0]["step"] == 2
        assert steps_in(run / "abandoned-002") == [3, 4, 5, 6]


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
    assert "Change [model] and [optimizer] back" in message  # no key has changed that would say more
    assert_equal(state, before)


@pytest.mark.parametrize(
    ("before", "after", "what", "changed"),
    [
        ({"model": {"dim": 8}}, {"model": {"dim": 9}}, "another model", "model.dim: 8 -> 9"),
        (
            {"optimizer": {"name": "adamw", "lr": 1.0}},
            {"optimizer": {"name": "lion", "lr": 0.5}},
            "another optimizer.name",
            'optimizer.name: "adamw" -> "lion"',
        ),
        (
            {"optimizer": {"name": "muon", "rounding": "nearest"}},
            {"optimizer": {"name": "muon", "rounding": "stochastic"}},
            "another optimizer.rounding",
            'optimizer.rounding: "nearest" -> "stochastic"',
        ),
        (
            {"training": {"dtype": "float32"}, "optimizer": {"lr": 1.0}},
            {"training": {"dtype": "bfloat16"}, "optimizer": {"lr": 0.5}},
            "another training.dtype",
            'training.dtype: "float32" -> "bfloat16"',
        ),
    ],
)
def test_tensors_that_do_not_fit_are_explained_by_the_keys_that_have_changed(tmp_path, before, after, what, changed):
    save_steps(tmp_path, 1, config=before)
    state = {name: tensor.half() for name, tensor in make_state(5).items()}
    with pytest.raises(ConfigError) as caught:
        make_manager(tmp_path, config=after, allow_run_change=True).resume(state)
    message = str(caught.value)
    assert f"is of {what}; 2 tensors differ" in message
    assert message.endswith(f"\nChange it back, or choose another checkpoint.load or job.output_dir:\n  {changed}")


def test_changed_run_keys(tmp_path):
    save_steps(tmp_path, 1)
    changed = {**CONFIG, "model": {"dim": 9}}
    state = make_state(5)
    with pytest.raises(ConfigError, match=r"model\.dim: 8 -> 9\n.*allow_run_change"):
        make_manager(tmp_path, config=changed).resume(state)
    assert_equal(state, make_state(5))
    save_steps(tmp_path, 2, config=changed, allow_run_change=True)
    save_steps(tmp_path, 3, config=changed)
    [change] = read_manifest(step_folder(tmp_path, 3)).run_changes
    assert change.step == 1
    assert change.changes == ["model.dim: 8 -> 9"]


def test_a_rewind_to_before_run_keys_were_changed_needs_no_second_permission(tmp_path):
    """The launch that changed them has allowed it, and said so; this one resumes a checkpoint with the new keys."""
    save_steps(tmp_path, 1)
    changed = {**CONFIG, "model": {"dim": 9}}
    save_steps(tmp_path, 2, config=changed, allow_run_change=True)
    log: list[str] = []
    manager = begun(tmp_path, log=log, config=changed)
    state = make_state(5)
    assert manager.rewind(1, state)["step"] == 1
    assert_equal(state, make_state(1))
    assert not [line for line in log if "run keys have changed" in line]
    save_and_wait(manager, 2, make_state(3), {"tokens": 200, "step": 2})
    [change] = read_manifest(step_folder(tmp_path, 2)).run_changes
    assert (change.step, change.changes) == (1, ["model.dim: 8 -> 9"])
    manager.close()


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
        make_manager(tmp_path, load=2).resume(state)
    assert not isinstance(caught.value, ConfigError)
    assert_equal(state, make_state(5))
    assert resumed(tmp_path, load=1, go_back=1)[0]["step"] == 1


def test_content_that_torch_cannot_read(tmp_path, monkeypatch):
    save_steps(tmp_path, 1)
    path = step_folder(tmp_path, 1) / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(UserError, match=r"step-00000001 is damaged: __0_0.distcp has changed"):
        make_manager(tmp_path).resume(make_state())
    monkeypatch.setattr(reader, "content_damages", lambda *_: [])
    with pytest.raises(UserError, match="step-00000001 is damaged: rank 0: "):
        make_manager(tmp_path).resume(make_state())


def flip_a_bit(path, position=100):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["MANIFEST.json", ".metadata", "__0_0.distcp", "trainer.json"])
def test_the_checkpoint_before_a_damaged_one_is_taken(tmp_path, name):
    save_steps(tmp_path, 1, 2, 3)
    flip_a_bit(step_folder(tmp_path, 3) / name, 10)
    (step_folder(tmp_path, 2) / name).unlink()
    log, state = [], make_state(99)
    with pytest.raises(Damaged, match=f"step-00000003 is damaged: {name} (has changed|can't be read: .)"):
        make_manager(tmp_path, load=3).resume(state)
    assert_equal(state, make_state(99))
    manager = begun(tmp_path, state, log=log)
    assert_equal(state, make_state(1))
    text = "\n".join(log)
    assert f"step-00000003 is damaged: {name} " in text
    assert name in text.split("step-00000002 is")[1]
    assert "resuming from " + str(step_folder(tmp_path, 1)) in text
    manager.save(2, make_state(20), {"tokens": 2, "step": 20})
    manager.close()
    assert steps_in(tmp_path / "abandoned-001") == [2, 3]
    assert resumed(tmp_path)[0]["step"] == 20


def test_nothing_is_left_to_fall_back_to(tmp_path):
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        flip_a_bit(step_folder(tmp_path, step) / "trainer.json", 1)
    with pytest.raises(Damaged, match=r"(?s)step-00000002 is damaged.*step-00000001 is damaged"):
        make_manager(tmp_path).resume(make_state(99))


def test_a_file_that_does_not_belong_there(tmp_path):
    save_steps(tmp_path, 1)
    (step_folder(tmp_path, 1) / "__9_0.distcp").touch()
    with pytest.raises(Damaged, match=r"__9_0.distcp is in the folder, but not in MANIFEST"):
        make_manager(tmp_path).resume(make_state(99))


def test_a_file_elsewhere_is_not_read(tmp_path):
    save_steps(tmp_path, 1)
    path = step_folder(tmp_path, 1) / "trainer.json"
    path.symlink_to(path.rename(tmp_path / "elsewhere"))
    with pytest.raises(Damaged, match=r"trainer.json is no plain file"):
        make_manager(tmp_path).resume(make_state(99))


def test_resuming_changes_nothing_on_the_disk(tmp_path):
    save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000004.tmp").mkdir()
    before = sorted(tmp_path.rglob("*"))
    make_manager(tmp_path, load=2).resume(make_state(99))
    assert sorted(tmp_path.rglob("*")) == before


def test_another_tokenizer(tmp_path):
    save_steps(tmp_path, 1, tokenizer_hash="a")
    with pytest.raises(ConfigError, match="content of the tokenizer: a -> b"):
        make_manager(tmp_path, tokenizer_hash="b").resume(make_state(99))
    with pytest.raises(ConfigError, match=r"init_from.*another tokenizer"):
        init_from(tmp_path / "new", step_folder(tmp_path, 1), make_state(99), tokenizer_hash="b")
    save_steps(tmp_path, 2, tokenizer_hash="b", allow_run_change=True)
    manifest = read_manifest(step_folder(tmp_path, 2))
    assert manifest.tokenizer_hash == "b"
    assert manifest.run_changes == [manifests.RunChange(1, ["content of the tokenizer: a -> b"])]


def init_from(folder, source, state, **options):
    manager = make_manager(folder, init_from=str(source), **options)
    assert manager.resume(state) is None
    manager.begin_lineage()
    return manager


def test_weights_of_another_run(tmp_path):
    save_steps(tmp_path / "old", 7)
    source = step_folder(tmp_path / "old", 7)
    log, state = [], make_state(99)
    state["model.bias"] = state["model.bias"].double()  # the other run's weights may be of another type
    manager = init_from(tmp_path / "new", source, state, config={"other": 1}, log=log)
    torch.testing.assert_close(state["model.weight"], make_state(7)["model.weight"], rtol=0, atol=0)
    torch.testing.assert_close(state["model.bias"], make_state(7)["model.bias"].double(), rtol=0, atol=0)
    assert torch.equal(state["optimizer.weight.exp_avg"], make_state(99)["optimizer.weight.exp_avg"])
    assert any(f"starting from the weights of {source} (checkpoint.init_from)" in line for line in log)
    manager.save(1, make_state(1), {"tokens": 1})
    manager.close()
    # The run has begun now: it goes on from its own checkpoint.
    state = make_state(99)
    manager = begun(tmp_path / "new", state, init_from=str(source), config={"other": 1})
    assert_equal(state, make_state(1))
    manager.save(2, make_state(2), {"tokens": 2})
    manager.close()
    manifest = read_manifest(step_folder(tmp_path / "new", 2))
    assert manifest.initialized_from == manifests.Origin(read_manifest(source).run_id, 7)
    assert manifest.parent == manifests.Origin(manifest.run_id, 1)


def test_weights_alone_are_nothing_to_go_on_from(tmp_path):
    source = save_model(tmp_path / "imported", make_model(TINY["tied"]))  # as scripts/import_hf.py does
    state = make_state(5)
    with pytest.raises(
        ConfigError, match=r'imported holds only a model.*no run.*set checkpoint.init_from = ".*imported"'
    ):
        make_manager(tmp_path / "run", load=str(source)).resume(state)
    assert_equal(state, make_state(5))


def test_weights_of_another_model_are_refused(tmp_path):
    save_steps(tmp_path / "old", 7)
    source = step_folder(tmp_path / "old", 7)
    state = make_state(5, dim=16)
    state["model.more"] = torch.zeros(1)
    with pytest.raises(ConfigError, match=r"(?s)2 tensors differ.*model.more: not in the checkpoint.*model.weight"):
        init_from(tmp_path / "new", source, state)
    flip_a_bit(source / "__0_0.distcp")
    with pytest.raises(Damaged, match=r"__0_0.distcp has changed"):
        init_from(tmp_path / "new", source, make_state())
    with pytest.raises(UserError, match=rf"{tmp_path}/nowhere: no such folder"):
        init_from(tmp_path / "new", tmp_path / "nowhere", make_state())


def test_what_is_kept(tmp_path):
    manager = begun(tmp_path, keep_last=2, keep_every=4, keep_best=1)
    for step, loss in enumerate([9, 8, 1, 7, math.nan, 6, 5, 4, 3, 2], start=1):
        manager.save(step, make_state(step), {"tokens": step}, validation_loss=float(loss))
    manager.close()
    assert steps_in(tmp_path) == [3, 4, 8, 9, 10]
    assert read_manifest(step_folder(tmp_path, 3)).validation_loss == 1.0
    # Another branch: what the abandoned line holds is neither counted nor removed.
    manager = begun(tmp_path, load=8, go_back=1, keep_last=2)
    manager.save(9, make_state(9), {"tokens": 9})
    manager.close()
    assert steps_in(tmp_path) == [8, 9]
    assert steps_in(tmp_path / "abandoned-001") == [9, 10]
    assert not list(tmp_path.glob("*.tmp"))


def test_nothing_is_removed_for_a_checkpoint_that_went_wrong(tmp_path, monkeypatch):
    save_steps(tmp_path, 1)
    log = []
    manager = begun(tmp_path, keep_last=1, max_save_failures=2, log=log)
    write = store.write

    def write_badly(storage, folder, *arguments):
        files = write(storage, folder, *arguments)
        flip_a_bit(folder / "__0_0.distcp")
        return files

    monkeypatch.setattr(store, "write", write_badly)
    manager.save(2, make_state(2), {"tokens": 2})
    assert any("read again, __0_0.distcp has changed" in line for line in log)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    monkeypatch.setattr(store, "write", write)
    manager.save(3, make_state(3), {"tokens": 3})
    manager.close()
    assert steps_in(tmp_path) == [3]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_training_goes_on_while_the_disk_is_full(tmp_path, monkeypatch, mode):
    log = []
    manager = begun(tmp_path, mode=mode, max_save_failures=3, log=log)
    save_and_wait(manager, 1, make_state(1), {"tokens": 1})

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    fsync = os.fsync
    for step in (2, 3):
        monkeypatch.setattr(os, "fsync", full)
        save_and_wait(manager, step, make_state(step), {"tokens": step})
    n_bytes = sum(tensor.nbytes for tensor in make_state().values())
    first, second = [line for line in log if "could not be written" in line]
    assert f"the checkpoint takes {n_bytes:,} bytes, and " in first
    assert "bytes are free there" in first
    assert "training continues, the newest checkpoint is step 1; failed saves in a row: 2, the run ends at 3" in second
    monkeypatch.setattr(os, "fsync", fsync)
    save_and_wait(manager, 4, make_state(4), {"tokens": 4})
    monkeypatch.setattr(os, "fsync", full)
    for step in (5, 6):
        save_and_wait(manager, step, make_state(step), {"tokens": step})
    with pytest.raises(SaveFailed, match=r"failed saves in a row: 3$"):
        save_and_wait(manager, 7, make_state(7), {"tokens": 7})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000004"]


def test_a_run_whose_last_save_failed_does_not_end_well(tmp_path, monkeypatch):
    manager = begun(tmp_path, max_save_failures=3)
    monkeypatch.setattr(FolderStorage, "begin", lambda *_: os.open("/proc/nothing", os.O_RDONLY))
    manager.save(1, make_state(1), {"tokens": 1})
    with pytest.raises(SaveFailed, match=r"step-00000001 could not be written: .*No such file"):
        manager.close()


def test_equal_states_make_equal_files(tmp_path):
    save_steps(tmp_path / "a", 1)
    save_steps(tmp_path / "b" / "c", 1)
    for name in read_manifest(step_folder(tmp_path / "a", 1)).files:
        files = [step_folder(root, 1) / name for root in (tmp_path / "a", tmp_path / "b" / "c")]
        assert files[0].read_bytes() == files[1].read_bytes()
