"""A run folder that is a stranger's, or goes away during a run: links, pipes, removed, read-only."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from configs import files
from tests.end_to_end.launch import curve, launch_here, status
from tests.torture.full_disk import RUN_DISK_BYTES, small_disk
from trainer.trainer import Trainer

TWO_STEPS = ("--training.steps", "2")


def link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "precious")


def pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("name", [".lock", "run.log", "metrics.jsonl"])
@pytest.mark.parametrize("make", [link, pipe])
def test_what_is_appended_to_must_be_a_plain_file(tmp_path: Path, capsys, name: str, make):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("precious")
    make(tmp_path / "run" / name)
    assert launch_here(tmp_path, *TWO_STEPS) == 78
    (message,) = capsys.readouterr().err.splitlines()
    assert f"error: the run folder {tmp_path}/run can't be written ({tmp_path}/run/{name}: it is " in message
    assert "; remove it)" in message
    assert (tmp_path / "precious").read_text() == "precious"


def test_what_is_replaced_takes_the_place_of_links_and_pipes(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("precious")
    names = ("config.toml", ".config.toml.tmp", ".status.json.tmp")
    for name in names:
        link(tmp_path / "run" / name)
    pipe(tmp_path / "run" / "status.json")
    assert launch_here(tmp_path, *TWO_STEPS) == 0
    assert (tmp_path / "precious").read_text() == "precious"
    assert status(tmp_path / "run")["state"] == "done"
    assert not [path for path in (tmp_path / "run").iterdir() if path.is_symlink()]


@pytest.mark.slow
def test_a_persons_own_links_to_larger_disks_and_copies_by_hard_links_work(tmp_path: Path):
    """The run folder and `checkpoints` may be links; a copy made by `cp -al` is a run of its own."""
    for name in ("disk", "large"):
        (tmp_path / name).mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "checkpoints").symlink_to(tmp_path / "large")
    assert launch_here(tmp_path, *TWO_STEPS) == 0
    assert [path.name for path in (tmp_path / "large").iterdir()] == ["step-00000002"]
    subprocess.run(["cp", "-al", f"{tmp_path}/disk/.", f"{tmp_path}/copy"], check=True)
    kept = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir() if path.is_file()}
    assert launch_here(tmp_path, "--training.steps", "4", "--metrics.interval", "1") == 0
    assert {name: (tmp_path / "copy" / name).read_bytes() for name in kept} == kept
    assert [step for step, _, _ in curve(tmp_path / "run")] == [1, 2, 3, 4]


def break_after(monkeypatch, step: int, harm) -> None:
    log = Trainer._log

    def break_and_log(self, *arguments):
        if self.run.step == step:
            self.checkpoints.wait()
            harm()
        log(self, *arguments)

    monkeypatch.setattr(Trainer, "_log", break_and_log)


SAVE_EACH_STEP = ("--checkpoint.interval", "1", "--metrics.interval", "1")


def test_a_removed_run_folder_ends_the_run_by_its_checkpoints(tmp_path: Path, monkeypatch, capsys):
    break_after(monkeypatch, 4, lambda: shutil.rmtree(tmp_path / "run"))
    assert launch_here(tmp_path, *SAVE_EACH_STEP) == 1
    err = capsys.readouterr().err
    for name in ("metrics.jsonl", "status.json", "run.log"):
        assert err.count(f"{tmp_path}/run/{name} can't be written: No such file or directory; training continues") == 1
    assert err.count("error: ") == 1
    assert f"the folder {tmp_path}/run/checkpoints is gone; failed saves in a row: 3" in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()  # a network disk may be back under that name: nothing is made in its place


def make_read_only(folder: Path) -> None:
    """As when the kernel makes a faulty disk read-only; a plain remount refuses while the run has its lock open."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)


def test_a_folder_that_becomes_read_only_likewise(monkeypatch, capsys):
    try:
        with small_disk(RUN_DISK_BYTES, 1000) as disk:
            break_after(monkeypatch, 4, lambda: make_read_only(disk / "run"))
            try:
                assert launch_here(disk, *SAVE_EACH_STEP) == 1
            finally:
                subprocess.run(["umount", str(disk / "run")], check=False)
            assert status(disk / "run")["step"] == 3  # as true as can be
            assert (disk / "run" / "checkpoints" / "step-00000003").is_dir()
    except PermissionError as error:
        pytest.skip(f"this process may not mount a disk: {error}")
    err = capsys.readouterr().err
    assert err.count("metrics.jsonl can't be written: Read-only file system; training continues") == 1
    assert err.count("error: ") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(("refusals", "state"), [(1, "done"), (1000, "running")])
def test_the_last_status_is_written_or_a_warning_says_that_it_is_not(
    tmp_path: Path, capsys, monkeypatch, refusals, state
):
    """The file system refuses to give status.json its name, from the end of training on."""
    left, replace, end = [], Path.replace, Trainer.train

    def refusing(path, target):
        if Path(target).name == "status.json" and left:
            left.pop()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return replace(path, target)

    def train(trainer):
        state = end(trainer)
        left.extend([None] * refusals)
        return state

    monkeypatch.setattr(Path, "replace", refusing)
    monkeypatch.setattr(Trainer, "train", train)
    monkeypatch.setattr(files, "_PAUSES", (0.1, 0.1))
    assert launch_here(tmp_path, *TWO_STEPS) == 0
    assert status(tmp_path / "run")["state"] == state
    warning = f"{tmp_path}/run/status.json could not be written: Stale file handle; it is out of date"
    assert (warning in capsys.readouterr().err) == (state == "running")
