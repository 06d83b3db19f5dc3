"""Questions about a job are answered at once, without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu_time import takes_a_second_at_most
from tests.end_to_end.launch import ENVIRONMENT, ROOT
from tests.marked import marked


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        ("--help", 0, "training.global_batch_size"),
        ("--config llama_7b.toml --validate", 0, "6.74B parameters"),
        ("--config llama_7b.toml --print-config", 0, "global_batch_size"),
        ("--config llama_7b.toml --training.sed 1", 78, "did you mean training.seed?"),
        ("--config lama_7b.toml", 78, "did you mean llama_7b.toml?"),
    ],
)
def test_under_a_second_and_without_torch(tmp_path: Path, words: str, code: int, expected: str):
    answer_quickly(tmp_path, "train.py", words, code, expected)


SCRIPTS = [file.name for file in (ROOT / "scripts").glob("*.py") if "__main__" in file.read_text()]
TRIED_FIRST = ("keel.py", "plan.py", "sample.py")


@pytest.mark.parametrize("script", marked(SCRIPTS, slow=[name for name in SCRIPTS if name not in TRIED_FIRST]))
def test_help_of_a_script(tmp_path: Path, script: str):
    """From another folder, without Keel installed."""
    answer_quickly(tmp_path, f"scripts/{script}", "--help", 0, "usage: ")


@pytest.mark.parametrize(
    "command",
    ["plan", "checkpoint show", "benchmark bare", "parity", "prove", "train", "export"],
)
def test_help_of_a_command(tmp_path: Path, command: str):
    answer_quickly(
        tmp_path, "scripts/keel.py", f"{command} --help", 0, "--config" if command == "train" else "usage: keel"
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("sample nowhere hi", 1),
        ("evaluate nowhere --tasks a", 1),
        ("export nowhere out", 1),
        ("import nowhere out", 1),
        ("export nowhere out --optimizer", 1),
        ("checkpoint show nowhere", 1),
        ("checkpoint verify nowhere", 1),
        ("checkpoint diff nowhere b", 1),
        ("score nowhere", 1),
        ("replay nowhere --step 3", 1),
        ("reproduce nowhere", 1),
        ("compare nowhere b", 78),
        ("data step nowhere 3", 1),
        ("plan nowhere --ranks 2", 78),
        ("benchmark nowhere", 78),
        ("parity nowhere", 78),
        ("prove nowhere", 78),
        ("runs nowhere", 1),
        ("report nowhere", 1),
    ],
)
def test_a_wrong_path_is_told_whole(tmp_path: Path, words: str, code: int):
    answer_quickly(tmp_path, "scripts/keel.py", words, code, f"{tmp_path}/nowhere")


@pytest.mark.parametrize("command", ["plan --ranks 2", "parity", "prove", "benchmark", "benchmark bare"])
def test_a_job_is_given_once(tmp_path: Path, command: str):
    expected = "the job is given twice: debug.toml and --config parity.toml; leave one out"
    answer_quickly(tmp_path, "scripts/keel.py", f"{command} debug.toml --config parity.toml", 78, expected)


def answer_quickly(tmp_path: Path, program: str, words: str, code: int, expected: str) -> None:
    """Run a program where torch cannot be imported."""
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')")
    command = [sys.executable, str(ROOT / program), *words.split()]
    environment = ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}

    def ask() -> None:
        answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert answer.returncode == code, answer.stderr
        assert expected in (answer.stderr if code else answer.stdout)

    # Of the processor: it waits for nothing, and a machine that tests is busy.
    assert takes_a_second_at_most(ask)
