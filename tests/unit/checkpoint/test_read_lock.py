"""A checkpoint that is being read is not removed; whoever dies while reading keeps nothing."""

import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from checkpoint import find, storage
from checkpoint.export import hf_export
from checkpoint.export.hf_export import TokenizerFiles, export_hf
from checkpoint.lock import BeingRead, Gone, ReadLock
from checkpoint.manifest import read_manifest, step_folder, steps_in
from checkpoint.reader import Log
from checkpoint.storage import FolderStorage
from configs.errors import UserError
from scripts import checkpoint as script
from scripts.checkpoint import main
from scripts.sampling import load
from tests.conftest import ROOT
from tests.torture.damage import make_manager, process_group, state
from tests.unit.hf_support import TINY, make_model
from tests.unit.hf_support import save as save_model


def save(root, *steps, **settings):
    """Checkpoints of a run; returns what its log says."""
    said = []
    with process_group():
        manager = make_manager(root, **settings)
        manager._log = Log(said.append, said.append)
        manager.resume(state())
        manager.begin_lineage()
        for step in steps:
            manager.save(step, state(), {"tokens": 7})
        manager.close()
    return "\n".join(said)


def test_retention_leaves_what_is_read_and_removes_it_later(tmp_path):
    save(tmp_path, 1)
    with ReadLock(step_folder(tmp_path, 1)), ReadLock(step_folder(tmp_path, 1)):
        said = save(tmp_path, 2, 3, keep_last=1)
        assert steps_in(tmp_path) == [1, 3]
        assert "step-00000001 is being read, and therefore kept for now; a later save removes it" in said
    save(tmp_path, 4, keep_last=1)
    assert steps_in(tmp_path) == [4]


@pytest.mark.parametrize(("may_prune", "left"), [(True, [2]), (False, [1, 2])])
def test_what_the_last_save_has_left_is_removed_once_nobody_reads_it(tmp_path, may_prune, left):
    with process_group():
        manager = make_manager(tmp_path, keep_last=1)
        manager.resume(state())
        manager.begin_lineage()
        manager.save(1, state(), {"tokens": 7})
        with ReadLock(step_folder(tmp_path, 1)):
            manager.save(2, state(), {"tokens": 7}, prune=may_prune)
            manager.close()
            manager.prune()
            assert steps_in(tmp_path) == [1, 2]
        manager.prune()
    assert steps_in(tmp_path) == left


@pytest.mark.parametrize("is_saved_again", [False, True])
def test_one_that_its_run_leaves_while_it_is_read_is_not_called_damaged(tmp_path, is_saved_again):
    """A rewind moves it, and saves another one of the same step, perhaps."""
    folder = step_folder(tmp_path, 1)

    def read_while_the_run_goes_back():
        with ReadLock(folder):
            folder.rename(tmp_path / "abandoned")
            if is_saved_again:
                save(tmp_path, 1)
                (folder / "trainer.json").unlink()
            read_manifest(folder)

    save(tmp_path, 1)
    with pytest.raises(Gone, match="step-00000001 is no longer there: its run has gone back"):
        read_while_the_run_goes_back()


def test_one_that_its_run_leaves_before_it_is_read_is_not_called_something_else(tmp_path, capsys, monkeypatch):
    """The folder was listed before a rewind."""
    save(tmp_path / "checkpoints", 1, 2)
    monkeypatch.setattr(script, "steps_in", lambda root: [1, 2, 3])
    monkeypatch.setattr(find, "steps_in", lambda root: [1, 2, 3])
    assert main(["list", str(tmp_path)]) == 0
    assert "step-00000003" not in capsys.readouterr().out
    assert main(["average", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "step-00000003 is no longer there: its run has gone back" in capsys.readouterr().err


def test_a_link_to_nowhere_is_not_taken_for_one_that_its_run_has_left(tmp_path, capsys):
    save(tmp_path / "checkpoints", 1)
    step_folder(tmp_path / "checkpoints", 2).symlink_to(tmp_path / "lost")
    assert main(["verify", str(tmp_path)]) == 1
    assert main(["list", str(tmp_path)]) == 0
    assert "step-00000002" in capsys.readouterr().out


def test_the_script_leaves_what_is_read_alone(tmp_path, capsys):
    save(tmp_path / "checkpoints", 1, 2, 3)
    aside = tmp_path / "checkpoints" / "abandoned-001"
    aside.mkdir()
    step_folder(tmp_path / "checkpoints", 1).rename(step_folder(aside, 1))
    words = ["prune", str(tmp_path), "--keep-last", "1", "--abandoned"]
    with ReadLock(step_folder(tmp_path / "checkpoints", 2)), ReadLock(step_folder(aside, 1)):
        assert main(words) == 0
        assert capsys.readouterr().err.count("is being read") == 2
        assert steps_in(tmp_path / "checkpoints") == [2, 3]
        assert steps_in(aside) == [1]
    assert main(words) == 0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


READER = """
    import sys, time
    from pathlib import Path
    from checkpoint.lock import ReadLock
    held = ReadLock(Path(sys.argv[1]))
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_read_lock_ends_with_its_process(tmp_path):
    save(tmp_path, 1)
    command = [sys.executable, "-c", textwrap.dedent(READER), step_folder(tmp_path, 1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as reader:
        assert reader.stdout.readline() == "locked\n"
        with pytest.raises(BeingRead, match="step-00000001 is being read"):
            FolderStorage().remove(step_folder(tmp_path, 1))
        assert steps_in(tmp_path) == [1]
        reader.send_signal(signal.SIGKILL)
        reader.wait()
        FolderStorage().remove(step_folder(tmp_path, 1))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_read_of_what_is_being_removed(tmp_path, monkeypatch):
    save(tmp_path, 1)
    removing, may_go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(Path, "rename", lambda *_: (removing.set(), may_go_on.wait(10)))
    monkeypatch.setattr(storage, "_remove_tree", lambda folder: None)
    thread = threading.Thread(target=FolderStorage().remove, args=(step_folder(tmp_path, 1),))
    thread.start()
    assert removing.wait(10)
    with pytest.raises(UserError, match="step-00000001 is being removed"):
        ReadLock(step_folder(tmp_path, 1))
    may_go_on.set()
    thread.join()
    ReadLock(step_folder(tmp_path, 1)).release()
    ReadLock(tmp_path / "nowhere").release()


def test_an_export_locks_what_it_reads(tmp_path, monkeypatch):
    checkpoint = save_model(tmp_path / "step-00000001", make_model(TINY["tied"]))
    read, refused = hf_export.read_tensor, []

    def read_while_another_prunes(*arguments):
        with pytest.raises(BeingRead):
            FolderStorage().remove(checkpoint)
        refused.append(1)
        return read(*arguments)

    monkeypatch.setattr(hf_export, "read_tensor", read_while_another_prunes)
    export_hf(checkpoint, tmp_path / "out", TokenizerFiles())
    assert len(refused) > 10
    FolderStorage().remove(checkpoint)


def test_a_model_that_is_sampled_from_is_kept_while_it_is_loaded(tmp_path, monkeypatch):
    checkpoint = save_model(tmp_path / "step-00000001", make_model(TINY["tied"]))
    monkeypatch.setattr(load, "_load", lambda folder, *_: FolderStorage().remove(folder))
    with pytest.raises(BeingRead, match="step-00000001 is being read"):
        load.load_trained(checkpoint, None, "cpu", None, None)
    FolderStorage().remove(checkpoint)
