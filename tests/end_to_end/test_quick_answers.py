"""Questions about a job are answered at once, without torch."""

import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.launch import ENVIRONMENT, ROOT


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
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')")
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, str(ROOT / "train.py"), *words.split()]
        environment = ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
        answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert answer.returncode == code, answer.stderr
        assert expected in (answer.stderr if code else answer.stdout)
    assert statistics.median(seconds) < 1  # of the processor: it waits for nothing, and a machine that tests is busy
