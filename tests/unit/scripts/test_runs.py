"""`keel runs`: what it lists."""

import json
import os
import time
from pathlib import Path

import pytest

from scripts import runs
from tests.forbidden import refuse_in
from tests.unit.scripts.test_flags import write_run


def keel_runs(*words) -> int:
    return runs.main([str(word) for word in words])


@pytest.fixture
def folder(tmp_path):
    """Two runs, and a folder that is none."""
    for name, lr in (("a", 1), ("b", 2)):
        write_run(tmp_path / name, [5.0, 4.0, 3.0 / lr], tokens_per_second=[100.0 * lr] * 3)
    (tmp_path / "no run").mkdir()
    (tmp_path / "no run" / "metrics.jsonl").write_text("")
    return tmp_path


def test_a_list(folder, capsys):
    assert keel_runs(folder) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "loss", "tokens/s", "age"]
    assert sorted(line.split()[:5] for line in lines) == [
        [str(folder / "a"), "done", "3", "3.0000", "100"],
        [str(folder / "b"), "done", "3", "1.5000", "200"],
    ]


def test_a_line_break_in_a_name_does_not_break_the_line(folder, capsys):
    (folder / "a").rename(folder / "a\nb")
    assert keel_runs(folder) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert any(line.startswith(f"{folder}/a\\nb  done") for line in lines)
    assert {line.index(" done ") for line in lines} == {head.index(" state ")}


def test_a_silent_run_is_listed_as_such(folder, capsys):
    status = {"state": "running", "step": 3, "reason": "", "time": time.time() - 300}
    (folder / "a" / "status.json").write_text(json.dumps(status))
    assert keel_runs(Path(folder)) == 0
    assert " silent " in capsys.readouterr().out


def test_a_run_whose_status_is_damaged_is_a_row(folder, capsys):
    (folder / "a" / "status.json").write_text('{"state": "runn')
    assert keel_runs(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{folder}/a  unreadable: its status.json is damaged, or may not be read" in lines
    assert any(line.startswith(f"{folder}/b  done") for line in lines)


def test_a_run_that_may_not_be_read_is_a_row(folder, capsys, monkeypatch):
    refuse_in(folder / "a", monkeypatch)
    assert keel_runs(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{folder}/a  unreadable: Permission denied" in lines
    assert any(line.startswith(f"{folder}/b  done") for line in lines)


def test_the_last_record_is_found_whatever_its_length_and_what_is_behind_it(folder, capsys):
    """That of a mixture names the tokens of each expert of each layer: 100 KB at 58 layers of 256 experts."""
    path = folder / "a" / "metrics.jsonl"
    record = {"step": 4, "loss": 1.25, "tokens_per_second": 10**400}
    record["tokens_per_expert"] = {str(layer): [12345] * 256 for layer in range(58)}
    behind = ['{"step": 4, "evaluation": {}}', "[" * 9000, '{"step": 6, "lo']
    path.write_text(path.read_text() + "\n".join([json.dumps(record), *behind]))
    assert keel_runs(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:5] for line in lines if line.startswith(f"{folder}/a ")] == [["done", "3", "1.2500", "-"]]


def test_metrics_that_are_a_pipe_are_not_waited_for(folder, capsys):
    (folder / "a" / "metrics.jsonl").unlink()
    os.mkfifo(folder / "a" / "metrics.jsonl")
    assert keel_runs(folder) == 0
    assert "-" in capsys.readouterr().out
