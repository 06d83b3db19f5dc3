"""The command `keel`: each word is a script's own main function, with the rest of the line."""

import subprocess
import sys
import tomllib

import pytest

import train
from scripts import checkpoint, keel, plan
from tests.conftest import ROOT


def test_every_script_with_a_command_line_is_a_command(capsys):
    """But the one that renews a file of this repository."""
    programs = {file.stem for file in (ROOT / "scripts").glob("*.py") if "__main__" in file.read_text()}
    assert programs - {"keel", "config_schema"} == {module for module, _ in keel._SCRIPTS.values()}
    assert keel.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"\n  {name} " in told for name in ("train", *keel._SCRIPTS))
    assert keel.main([]) == 0
    assert capsys.readouterr().out == told


def test_a_word_that_is_no_command_names_the_nearest(capsys):
    assert keel.main(["exprot-hf"]) == 2
    assert capsys.readouterr().err == "keel exprot-hf: no such command; did you mean keel export-hf?\n"
    assert keel.main(["qqq"]) == 2
    assert capsys.readouterr().err == "keel qqq: no such command; keel --help lists all commands\n"


@pytest.mark.parametrize(("name", "module"), [("plan", plan), ("checkpoint", checkpoint)])
def test_the_rest_of_the_line_is_the_scripts_own(monkeypatch, name, module):
    monkeypatch.setattr(module, "main", lambda: (sys.argv, 7)[1])
    monkeypatch.setattr(sys, "argv", ["keel", name, "--ranks", "8", "--config=x"])
    assert keel.main() == 7
    assert sys.argv == [f"keel {name}", "--ranks", "8", "--config=x"]


class Replaced(Exception):
    """In the place of this process's end."""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["debug", "--training.steps", "5"], ["--config", "debug", "--training.steps", "5"]),
        (["--training.steps", "5", "--config", "debug"], ["--training.steps", "5", "--config", "debug"]),
        (["debug", "--mesh.dp_shard", "-1"], ["--config", "debug", "--mesh.dp_shard", "-1"]),
    ],
)
def test_training_in_one_process_is_what_train_py_does(monkeypatch, words, expected):
    def ended(code):
        assert code == 3
        raise Replaced

    monkeypatch.setattr(sys, "argv", ["keel"])
    monkeypatch.setattr(train, "main", lambda: 3)
    monkeypatch.setattr(train, "end_process", ended)
    with pytest.raises(Replaced):
        keel.main(["train", *words])
    assert sys.argv == ["keel train", *expected]


def test_training_on_several_ranks_is_torchruns(monkeypatch):
    def replaced(program, words):
        assert program == sys.executable
        assert words[1:] == [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "4",
            train.__file__,
            "--config",
            "debug",
        ]
        raise Replaced

    monkeypatch.setattr(sys, "argv", ["keel"])
    monkeypatch.setattr("os.execv", replaced)
    with pytest.raises(Replaced):
        keel.main(["train", "debug", "--ranks", "4"])


@pytest.mark.parametrize(("ranks", "said"), [("many", "invalid int value: 'many'"), ("0", "0 is not at least 1")])
def test_a_number_of_ranks_that_is_none_is_a_message(capsys, monkeypatch, ranks, said):
    monkeypatch.setattr(sys, "argv", ["keel"])
    with pytest.raises(SystemExit):
        keel.main(["train", "debug", "--ranks", ranks])
    assert f"argument --ranks: {said}" in capsys.readouterr().err


def test_the_version_is_that_of_the_package():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "scripts.keel.VERSION"
    }
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "keel.py", "--version"], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"keel {keel.VERSION}\n"
