"""The command `keel`: each word is a script's own main function, with the rest of the line."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from importlib import import_module
from tempfile import TemporaryDirectory

import pytest
from torch.distributed.run import parse_args

import train
from configs.load import load
from scripts import checkpoint, keel, plan
from scripts.command import end, run_command
from tests.conftest import ROOT
from trainer.lifecycle import LAUNCHER


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
    assert keel.main(["exprot"]) == 2
    assert capsys.readouterr().err == "keel exprot: no such command; did you mean keel export?\n"
    assert keel.main(["qqq"]) == 2
    assert capsys.readouterr().err == "keel qqq: no such command; keel --help lists all commands\n"


@pytest.fixture
def takes_stops():
    """Ctrl-C is that of a session in the foreground, and handlers are restored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_ctrl_c_during_the_imports_shows_no_traceback(monkeypatch, takes_stops):
    monkeypatch.delitem(sys.modules, "scripts.silent_interrupts", raising=False)
    import_module("scripts.silent_interrupts")
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    with pytest.raises(SystemExit, match=r"^7$"):
        end(lambda: signal.getsignal(signal.SIGINT) is not signal.SIG_DFL and 7)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_that_comes_twice_leaves_no_temporary_files(tmp_path, capsys, takes_stops, number):
    """A launcher passes on what the terminal, or the cluster, has sent to all processes."""

    def work(_):
        with TemporaryDirectory(dir=tmp_path):
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), number)

    with pytest.raises(SystemExit, match=rf"^{128 + number}$"):
        end(lambda: run_command(work, "stopped; nothing was written"))
    assert capsys.readouterr().err == "error: stopped; nothing was written\n"
    assert list(tmp_path.iterdir()) == []


def test_a_stop_in_an_import_is_no_error_of_the_library(capsys, takes_stops):
    """SentencePiece, for one, makes an ImportError of it."""

    def main():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None

    with pytest.raises(SystemExit, match=r"^130$"):
        end(main)
    assert capsys.readouterr().err == "error: stopped\n"


def test_help_is_a_command_too(monkeypatch, capsys):
    keel.main(["--help"])
    told = capsys.readouterr().out
    assert keel.main(["help"]) == 0
    assert capsys.readouterr().out == told
    monkeypatch.setattr(sys, "argv", ["keel"])
    with pytest.raises(SystemExit):
        keel.main(["help", "runs"])
    assert "keel runs" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "module"), [("plan", plan), ("checkpoint", checkpoint)])
def test_the_rest_of_the_line_is_the_scripts_own(monkeypatch, name, module):
    monkeypatch.setattr(module, "main", lambda: (sys.argv, 7)[1])
    monkeypatch.setattr(sys, "argv", ["keel", name, "--ranks", "8", "--config=x"])
    assert keel.main() == 7
    assert sys.argv == [f"keel {name}", "--ranks", "8", "--config=x"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What a command sets is unset afterwards."""
    for name in (LAUNCHER, "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


class Replaced(Exception):
    """In the place of this process's end."""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["debug", "--training.steps", "5"], ["--config", "debug", "--training.steps", "5"]),
        (["--training.steps", "5", "--config", "debug"], ["--training.steps", "5", "--config", "debug"]),
        (["--training.steps", "5", "debug"], ["--config", "debug", "--training.steps", "5"]),
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


def test_training_on_several_ranks(monkeypatch):
    def run_ranks(program, words, ranks):
        assert (program, words, ranks) == (train.__file__, ["--config", "debug"], 4)
        return 75

    def ended(code):
        assert code == 75
        raise Replaced

    monkeypatch.setattr(sys, "argv", ["keel"])
    monkeypatch.setattr(keel, "run_ranks", run_ranks)
    monkeypatch.setattr(train, "end_process", ended)
    with pytest.raises(Replaced):
        keel.main(["train", "debug", "--ranks", "4"])


def test_several_nodes_are_torchruns(monkeypatch, capsys):
    def ended(code):
        assert code == 0
        raise Replaced

    monkeypatch.setattr(train, "end_process", ended)
    with pytest.raises(Replaced):
        keel.main(["train", "debug", "--nodes", "2", "--ranks", "8", "--job.name", "a b"])
    told = capsys.readouterr()
    assert re.search("each host: export KEEL_SECRET=[0-9a-f]{64} ", told.err)
    line = shlex.split(told.out)
    options = parse_args(line[1:])  # torchrun's own
    assert (line[0], options.nnodes, options.nproc_per_node, options.rdzv_backend) == ("torchrun", "2", "8", "c10d")
    assert (ROOT / options.training_script).samefile(train.__file__)
    assert options.training_script_args == ["--config", "debug", "--job.name", "a b"]
    with pytest.raises(Replaced):
        keel.main(["train", "debug", "--nodes", "1:4", "--ranks", "8"])
    line = shlex.split(capsys.readouterr().out)
    assert line[:3] == ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun"]
    options = parse_args(line[3:])
    assert (options.nnodes, options.max_restarts, options.rdzv_id) == ("1:4", 1000, "JOB_ID")
    script = (ROOT / "scripts/launch/elastic.sh").read_text()
    assert f"KEEL_RENDEZVOUS_CONF:-{options.rdzv_conf}}}" in script
    assert load("debug", options.training_script_args[2:], 3).config.elastic.enable
    for hosts in ("4:1", "1:2:3", "1:"):
        with pytest.raises(SystemExit):
            keel.main(["train", "debug", "--nodes", hosts, "--ranks", "8"])
    with pytest.raises(SystemExit):
        keel.main(["train", "debug", "--nodes", "2"])
    assert "--nodes N needs --ranks R" in capsys.readouterr().err


@pytest.mark.parametrize(("hosts", "ranks"), [("2", 4), ("1:2", 4)])
def test_a_question_about_several_nodes_is_answered(monkeypatch, capsys, hosts, ranks):
    def ended(code):
        assert code == 0
        raise Replaced

    monkeypatch.setattr(sys, "argv", ["keel"])
    monkeypatch.setattr(train, "end_process", ended)
    monkeypatch.setattr(train, "main", lambda: print(os.environ["WORLD_SIZE"], *sys.argv[1:]) or 0)
    monkeypatch.setenv("WORLD_SIZE", "to be restored")
    with pytest.raises(Replaced):
        keel.main(["train", "debug", "--nodes", hosts, "--ranks", "2", "--validate"])
    assert capsys.readouterr().out == f"{ranks} --config debug --validate\n"


@pytest.mark.parametrize(("ranks", "said"), [("many", "many is not"), ("0", "0 is not")])
def test_a_number_of_ranks_that_is_none_is_a_message(capsys, monkeypatch, ranks, said):
    monkeypatch.setattr(sys, "argv", ["keel"])
    with pytest.raises(SystemExit):
        keel.main(["train", "debug", "--ranks", ranks])
    assert f"argument --ranks: {said} a whole number of at least 1" in capsys.readouterr().err


def test_the_version_is_that_of_the_package():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "scripts.keel.VERSION"
    }
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "keel.py", "--version"], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"keel {keel.VERSION}\n"


def test_help_imports_no_torch():
    """It takes seconds to import; without it, every command describes itself in less than half a second of CPU time."""
    program = """
import contextlib, io, sys
from scripts import keel
for name in ("train", *keel._SCRIPTS):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        sys.argv = ["keel", name, "--help"]
        import train
        train.end_process = sys.exit
        keel.main()
    assert len(said.getvalue()) > 100, name
    assert "torch" not in sys.modules, name
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
