"""What sessions of pytest see of a machine's GPUs."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

CASE = """
import pytest
import torch


def test_cpu():
    assert not torch.cuda.is_available()


@pytest.mark.gpu
def test_gpu():
    assert torch.cuda.is_available()
"""


@pytest.mark.parametrize("words", [(), ("-m", "not gpu"), ("-m", "gpu")])
def test_the_quick_tests_run_on_the_cpu_and_those_of_a_gpu_on_it(null_gpus, tmp_path, words):
    """On a machine with one GPU, a case with two ranks ended with "each rank needs its own GPU"."""
    file = tmp_path / "test_of_a_session.py"
    file.write_text(CASE)
    session = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest", "-n", "0"]
    told = subprocess.run(
        [*session, *words, str(file)], cwd=ROOT, env=os.environ | null_gpus, capture_output=True, text=True
    )
    assert "1 passed, 1 deselected" in told.stdout, told.stdout
