"""`keel runs`: what it lists, how it compares, and that it removes what it has shown and nothing else."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoint.incarnation import claim
from scripts import runs
from scripts.page.cleaning import removable
from tests.conftest import ROOT
from tests.end_to_end.launch import launch_here, snapshot
from tests.unit.scripts.test_flags import write_run


def keel_runs(*words) -> int:
    return runs.main([str(word) for word in words])


class Terminal:
    def isatty(self):
        return True


@pytest.fixture
def folder(tmp_path):
    """Two runs with everything in them that Keel writes, and some files that it does not."""
    for name, lr in (("a", 1), ("b", 2)):
        columns = {"tokens_per_second": [100.0 * lr] * 3, "validation_loss": [None, None, 3.25]}
        run = write_run(tmp_path / name, [5.0, 4.0, 3.0 / lr], config=f"[optimizer]\nlr = {lr}e-3\n", **columns).folder
        for path in (
            *(f"checkpoints/step-0000000{n}/weights" for n in (1, 2, 3)),
            "checkpoints/step-00000004.tmp/weights",
            "checkpoints/abandoned-001/step-00000002/weights",
            *("after_save/export/step-00000002/model.safetensors", "after_save/export/step-00000002.log"),
            "tensorboard/events.out.tfevents.1.host.2.0",
            "profile/step-00000002-rank-0.json.gz",
            "hangs/step-00000002/rank-0.txt",
            "crashes/rank-00000-host-1.txt",
            ".shared-0123456789abcdef",
            "incarnations/000001.json",
            *("tokenizer.model", "tokenizer-01234567.json"),
            *("run.log", ".lock", "notes.txt", "checkpoints/mine.txt", "tensorboard/mine", "step-00000001/mine"),
        ):
            (run / path).parent.mkdir(parents=True, exist_ok=True)
            (run / path).write_text("x" * 100)
    (tmp_path / "no run").mkdir()
    (tmp_path / "no run" / "metrics.jsonl").write_text("")
    return tmp_path


def test_incarnations_are_counted(folder, capsys):
    for run in ("a", "a", "b"):  # each has been launched once before
        claim(folder / run, {})
    assert keel_runs("compare", folder / "a", folder / "b") == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("launches")]
    assert line.split() == ["launches", *["-", "of", "3", "incarnations"], *["-", "of", "2", "incarnations"]]


def test_a_list(folder, capsys):
    assert keel_runs(folder) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "loss", "tokens/s", "age"]
    assert sorted(line.split()[:5] for line in lines) == [
        [str(folder / "a"), "done", "3", "3.0000", "100"],
        [str(folder / "b"), "done", "3", "1.5000", "200"],
    ]


def test_a_comparison(folder, capsys):
    assert keel_runs("compare", folder / "a", folder / "b") == 0
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["run", "a", "b"] in told
    assert ["step", "3", "3"] in told
    assert ["loss", "3.0000", "1.5000"] in told
    assert ["validation", "loss", "3.2500", "3.2500"] in told
    assert ["tokens/s", "100", "200"] in told
    assert told[-1] == ["optimizer.lr", "0.001", "0.002"]
    assert keel_runs("compare", folder / "a", folder / "no") == 1
    assert "no is not a run folder: it has no metrics.jsonl" in capsys.readouterr().err


def test_nothing_is_removed_unless_it_is_asked_for(folder, capsys, monkeypatch):
    before = snapshot(folder)
    for what in ("leftovers", "checkpoints", "everything"):
        assert keel_runs("clean", folder / "a", "--what", what) == 0
        assert "nothing was removed; with --remove it is, after a question" in capsys.readouterr().out
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert keel_runs("clean", folder, "--remove") == 1
    assert "no terminal; add --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda question: (capsys.readouterr(), "")[1])
    assert keel_runs("clean", folder, "--remove") == 0
    assert "nothing was removed" in capsys.readouterr().out
    for run in "ab":
        (folder / run / ".lock").write_bytes(before[f"{run}/.lock"])  # it says who had it last
    assert snapshot(folder) == before


def test_an_answer_removes_what_was_shown_and_nothing_else(folder, capsys, monkeypatch):
    before = snapshot(folder)
    shown = []

    def answer(question):
        shown.append((question, capsys.readouterr().out))
        return "y"

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", answer)
    assert keel_runs("clean", folder / "a", "--remove") == 0
    ((question, listed),) = shown
    assert question == "Remove these 2? [y/N] "
    root = folder / "a" / "checkpoints"
    assert [line.split()[-1] for line in listed.splitlines()[:-1]] == [
        str(root / "step-00000004.tmp"),
        str(root / "abandoned-001"),
    ]
    gone = before.keys() - snapshot(folder).keys()
    assert gone == {
        "a/checkpoints/step-00000004.tmp/weights",
        "a/checkpoints/abandoned-001/step-00000002/weights",
    }


def test_all_checkpoints_but_the_newest(folder):
    before = snapshot(folder)
    assert keel_runs("clean", folder, "--what", "checkpoints", "--remove", "--yes") == 0
    gone = before.keys() - snapshot(folder).keys()
    assert gone == {
        f"{run}/checkpoints/{name}/weights"
        for run in "ab"
        for name in ("step-00000001", "step-00000002", "step-00000004.tmp", "abandoned-001/step-00000002")
    }


def test_everything_that_keel_wrote_but_no_other_file(folder, capsys):
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "weights").write_text("x")
    (folder / "b" / "checkpoints" / "step-00000005").symlink_to(folder / "elsewhere")
    assert keel_runs("clean", folder / "b", "--what", "everything", "--remove", "--yes") == 0
    left = {name for name in snapshot(folder) if name.startswith("b/")}
    assert left == {"b/notes.txt", "b/checkpoints/mine.txt", "b/tensorboard/mine", "b/step-00000001/mine"}
    assert f"kept {folder / 'b' / 'notes.txt'}" in capsys.readouterr().out
    assert not (folder / "b" / "checkpoints" / "step-00000005").is_symlink()
    assert (folder / "elsewhere" / "weights").exists()
    assert (folder / "a" / "status.json").exists()


def test_everything_takes_runs_by_name(folder, capsys):
    before = snapshot(folder)
    for place in (folder, folder / "no run"):
        assert keel_runs("clean", place, "--what", "everything", "--remove", "--yes") == 1
        assert "takes runs by name" in capsys.readouterr().err
    assert snapshot(folder) == before


def test_what_a_link_leads_to_is_not_listed(folder):
    (folder / "a" / "tensorboard").rename(folder / "far")
    (folder / "a" / "tensorboard").symlink_to(folder / "far")
    assert not any("tensorboard" in str(each.path) for each in removable(folder / "a", "everything"))


def test_a_run_in_use_is_left_alone(folder, capsys):
    program = (
        "import sys, time; from pathlib import Path; from checkpoint.lock import lock; lock(Path(sys.argv[1]), print)"
    )
    program += "; print('locked', flush=True); time.sleep(600)"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, folder / "a"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        before = snapshot(folder / "a")
        assert keel_runs("clean", folder, "--remove", "--yes") == 0
        assert "is in use by process" in capsys.readouterr().err
        assert snapshot(folder / "a") == before
        assert not (folder / "b" / "checkpoints" / "abandoned-001").exists()
    finally:
        holder.kill()
        holder.wait()


def clean_elsewhere(run: Path, what: str) -> None:
    """In a process of its own, with which its lock ends."""
    words = [run, "--what", what, "--remove", "--yes"]
    subprocess.run([sys.executable, "scripts/runs.py", "clean", *words], cwd=ROOT, check=True, timeout=300)


def test_a_run_that_was_cleaned_resumes_and_one_that_was_removed_leaves_nothing(tmp_path):
    """With a real run: the names that Keel writes are those that are removed."""
    words = ("--checkpoint.interval", "5", "--metrics.tensorboard", "true")
    assert launch_here(tmp_path / "first", "--training.steps", "10", "--elastic.enable", "true", *words) == 0
    run = tmp_path / "second" / "run"
    shutil.copytree(tmp_path / "first" / "run", run)  # the lock that the run took lasts as long as this process
    clean_elsewhere(run, "checkpoints")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000010"]
    assert launch_here(tmp_path / "second", *words) == 0
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [*range(1, 21)]
    shutil.copytree(run, tmp_path / "ended")
    clean_elsewhere(tmp_path / "ended", "everything")
    assert not (tmp_path / "ended").exists()


def test_a_silent_run_is_listed_as_such(folder, capsys):
    status = {"state": "running", "step": 3, "reason": "", "time": time.time() - 300}
    (folder / "a" / "status.json").write_text(json.dumps(status))
    assert keel_runs(Path(folder)) == 0
    assert " silent " in capsys.readouterr().out


def test_a_run_that_may_not_be_read_is_a_row(folder, capsys, monkeypatch):
    is_file = Path.is_file

    def refuse(path):
        if path == folder / "a" / "status.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)  # not by chmod, which does not stop root
    assert keel_runs(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{folder}/a  unreadable: Permission denied" in lines
    assert any(line.startswith(f"{folder}/b  done") for line in lines)
    assert keel_runs("clean", folder) == 0
    assert f"{folder}/a/" not in capsys.readouterr().out
