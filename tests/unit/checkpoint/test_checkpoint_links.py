"""Checkpoints that are links to another disk, and leftovers that can't be removed: a run goes on in its folder."""

import shutil
import subprocess

import pytest

from checkpoint.folder import is_own, prepare
from checkpoint.manifest import read_manifest, step_folder, steps_in
from checkpoint.storage import FolderStorage
from tests.unit.checkpoint.test_checkpoint_manager import (  # noqa: F401
    begun,
    make_manager,
    make_state,
    process_group,
    resumed,
    save_steps,
)


@pytest.fixture
def mount():
    """Mount a tmpfs on a folder until the end of the test, which makes it busy."""
    mounted = []

    def mount(folder):
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this process may not mount a disk")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def archive(root, step):
    """Move a checkpoint to another place, as to a larger disk, and leave a link."""
    target = root.parent / "archive" / f"step-{step}"
    target.parent.mkdir(exist_ok=True)
    shutil.move(step_folder(root, step), target)
    step_folder(root, step).symlink_to(target)
    return target


def test_an_archived_checkpoint_that_is_not_kept_leaves_only_its_link(tmp_path):
    root = tmp_path / "checkpoints"
    save_steps(root, 5, 10)
    target = archive(root, 5)
    log = []
    save_steps(root, 15, keep_last=2, log=log)
    assert steps_in(root) == [10, 15]
    assert "checkpoint step-00000005: removed, it is no longer kept" in log
    assert read_manifest(target).step == 5
    assert sorted(path.name for path in root.iterdir()) == ["step-00000010", "step-00000015"]
    assert resumed(root)[0]["step"] == 15


def test_a_link_that_a_removal_has_left_behind_is_unlinked(tmp_path):
    root = tmp_path / "checkpoints"
    save_steps(root, 5)
    target = archive(root, 5)
    step_folder(root, 5).rename(root / "step-00000005.removed.tmp")
    removed = []
    prepare(root, removed.append, pytest.fail)
    assert [line.split(",")[0] for line in removed] == [f"removed {root}/step-00000005.removed.tmp"]
    assert list(root.iterdir()) == []
    assert read_manifest(target).step == 5


def test_a_busy_leftover_is_a_warning_and_training_goes_on(tmp_path, mount):
    root = tmp_path / "checkpoints"
    save_steps(root, 5)
    busy = root / "step-00000003.removed.tmp" / "busy"
    busy.mkdir(parents=True)
    mount(busy)
    log = []
    save_steps(root, 10, log=log)
    assert [line for line in log if f"{busy.parent}, which" in line and "can't be removed: [Errno 16]" in line]
    assert steps_in(root) == [5, 10]
    assert resumed(root)[0]["step"] == 10


def test_a_checkpoint_that_is_a_mount_point_stays_and_that_is_said(tmp_path, mount):
    root, log = tmp_path / "checkpoints", []
    save_steps(root, 5)
    copy = shutil.copytree(step_folder(root, 5), tmp_path / "copy")
    mount(step_folder(root, 5))
    shutil.copytree(copy, step_folder(root, 5), dirs_exist_ok=True)
    save_steps(root, 10, keep_last=1, log=log)
    assert [line for line in log if "step-00000005 is no longer kept, but can't be removed: [Errno 16]" in line]
    assert steps_in(root) == [5, 10]
    assert resumed(root)[0]["step"] == 10


@pytest.mark.parametrize("given", ["latest", "step", "link", "target"])
def test_the_newest_as_a_link_counts_as_the_runs_own(tmp_path, given):
    root = tmp_path / "checkpoints"
    save_steps(root, 5, 10)
    run_id = read_manifest(step_folder(root, 10)).run_id
    target = archive(root, 10)
    load = {"latest": "latest", "step": 10, "link": str(step_folder(root, 10)), "target": str(target)}[given]
    manager = make_manager(root, load=load)
    assert manager.resume(make_state(99))["step"] == 10
    manager.begin_lineage()
    manager.save(15, make_state(15), {"tokens": 15, "step": 15})
    manager.close()
    assert steps_in(root) == [5, 10, 15]
    assert read_manifest(step_folder(root, 15)).run_id == run_id


def test_a_copy_elsewhere_is_not_the_runs_own(tmp_path):
    root = tmp_path / "checkpoints"
    save_steps(root, 5)
    copy = shutil.copytree(step_folder(root, 5), tmp_path / "elsewhere" / "step-00000005")
    assert is_own(root, step_folder(root, 5), 5)
    assert not is_own(root, copy, 5)
    assert not is_own(root, copy, 7)


def test_a_link_to_a_disk_that_is_not_there_is_not_passed_over_unsaid(tmp_path):
    root = tmp_path / "checkpoints"
    save_steps(root, 5, 10)
    shutil.move(archive(root, 10), tmp_path / "unmounted")
    log = []
    assert resumed(root, log=log)[0]["step"] == 5
    assert [
        line
        for line in log
        if f"{step_folder(root, 10)} is not a checkpoint" in line and "trying the one before" in line
    ]


def test_a_link_in_the_place_of_a_save_is_not_followed(tmp_path):
    root, precious = tmp_path / "checkpoints", tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("precious")
    root.mkdir()
    (root / "step-00000007.tmp").symlink_to(precious)
    assert not FolderStorage().begin(step_folder(root, 7)).is_symlink()
    (root / ".probe").symlink_to(precious / "probe")
    prepare(root, lambda line: None, pytest.fail)
    assert [path.name for path in precious.iterdir()] == ["file"]
