"""The folder of a run's checkpoints: choosing, what is kept, and the lock on it."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.folder import choose, set_aside, superfluous
from checkpoint.lock import FolderInUse, lock
from checkpoint.manifest import step_folder, steps_in
from checkpoint.verify import shares


def make_steps(root, *steps):
    for step in steps:
        step_folder(root, step).mkdir(parents=True)


def test_latest_takes_the_newest_and_falls_back_in_order(tmp_path):
    make_steps(tmp_path, 3, 100_000_000, 20)
    assert choose(tmp_path, "latest").candidates == [step_folder(tmp_path, step) for step in (100_000_000, 20, 3)]
    assert choose(tmp_path, 20).candidates == [step_folder(tmp_path, step) for step in (100_000_000, 20)]
    assert choose(tmp_path, 19).candidates == [step_folder(tmp_path, step) for step in (100_000_000, 20)]
    assert choose(tmp_path, 20, go_back=1).candidates == [step_folder(tmp_path, 20)]
    assert choose(tmp_path, 100_000_000).candidates == [step_folder(tmp_path, 100_000_000)]
    assert choose(tmp_path, "none").candidates == []
    assert choose(tmp_path / "nothing", "latest").candidates == []
    assert not (tmp_path / "nothing").exists()


def test_each_abandoned_line_has_a_folder_of_its_own(tmp_path):
    make_steps(tmp_path, 1, 2, 3)
    assert set_aside(tmp_path, 2).name == "abandoned-001"
    (tmp_path / "abandoned-001").rename(tmp_path / "abandoned-007")
    assert set_aside(tmp_path, 1).name == "abandoned-008"
    assert steps_in(tmp_path) == [1]
    assert set_aside(tmp_path, 1) is None


def test_superfluous():
    losses = {10: 5.0, 20: 3.0, 30: 4.0, 40: None, 50: 3.0, 60: 6.0}
    assert superfluous(losses, keep_last=0, keep_every=0, keep_best=0) == []
    assert superfluous(losses, keep_last=2, keep_every=0, keep_best=0) == [10, 20, 30, 40]
    assert superfluous(losses, keep_last=1, keep_every=20, keep_best=0) == [10, 30, 50]
    assert superfluous(losses, keep_last=1, keep_every=0, keep_best=1) == [10, 20, 30, 40]
    assert superfluous(losses, keep_last=1, keep_every=0, keep_best=3) == [10, 40]
    assert superfluous({}, keep_last=1, keep_every=2, keep_best=3) == []
    assert superfluous(losses, keep_last=1, keep_every=0, keep_best=0, rewind_interval=20) == [10, 20, 30, 40, 50]
    assert superfluous(losses, keep_last=1, keep_every=0, keep_best=0, rewind_interval=25) == [10, 20, 30, 40]


@given(
    losses=st.dictionaries(st.integers(1, 60), st.none() | st.floats(0, 10), min_size=1),
    keep_last=st.integers(1, 5),
    keep_every=st.integers(0, 7),
    keep_best=st.integers(0, 4),
)
def test_saving_step_by_step_keeps_what_one_look_at_the_end_would(losses, keep_last, keep_every, keep_best):
    """Except that of the best only those are left that were among the best all along, which are the best."""
    kept = {}
    for step in sorted(losses):
        kept[step] = losses[step]
        for gone in superfluous(kept, keep_last, keep_every, keep_best):
            del kept[gone]
    assert sorted(losses.keys() - kept.keys()) == superfluous(losses, keep_last, keep_every, keep_best)
    assert max(losses) in kept


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 5))
def test_every_file_is_hashed_by_one_rank(sizes, n):
    files = {f"file{number}": size for number, size in enumerate(sizes)}
    parts = shares(files, n)
    assert sorted(name for part in parts for name in part) == sorted(files)
    loads = [sum(files[name] for name in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes, default=0)


HOLDER = """
    import os, sys, time
    from pathlib import Path
    from checkpoint.lock import lock
    lock(Path(sys.argv[1]), print)
    if os.fork() == 0:  # as a data worker that outlives the run
        time.sleep(60)
    print("locked", flush=True)
    time.sleep(60)
"""


def test_the_lock_ends_with_its_process(tmp_path):
    def refuse(line):
        raise AssertionError(line)

    command = [sys.executable, "-c", textwrap.dedent(HOLDER), tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(FolderInUse, match=f"is in use by process {holder.pid} on .*job.output_dir"):
            lock(tmp_path, refuse)
        holder.kill()
        holder.wait()
        lock(tmp_path, refuse)
        assert f"process {os.getpid()} " in (tmp_path / ".lock").read_text()
        os.killpg(holder.pid, signal.SIGKILL)  # its child


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.lockf", unsupported)
    said = []
    lock(tmp_path, said.append)
    assert "can't be locked (Operation not supported)" in said[0]


def test_a_folder_copied_by_hard_links_has_a_lock_of_its_own(tmp_path):
    """As `cp -al` makes it: the file of the lock is one, the runs are two; and a run that has it is not disturbed."""
    for name in ("run", "copy"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / ".lock").write_text("process 1 on elsewhere\n")
    (tmp_path / "copy" / ".lock").hardlink_to(tmp_path / "run" / ".lock")
    lock(tmp_path / "copy", pytest.fail)
    assert f"process {os.getpid()} " in (tmp_path / "copy" / ".lock").read_text()
    assert (tmp_path / "run" / ".lock").read_text() == "process 1 on elsewhere\n"
    assert not (tmp_path / "copy" / ".lock").samefile(tmp_path / "run" / ".lock")
