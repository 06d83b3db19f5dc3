"""Gated DeltaNet by flash-linear-attention's kernels against Keel's recurrence, without a GPU."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytest.importorskip("triton", reason="this build of torch has no Triton")
pytest.importorskip("fla", reason="needs the package fla-core")


@pytest.fixture(scope="module")
def errors():
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.models.delta_by_kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("case", "most"),
    [
        ("None, zeros before", 2e-6),
        ("20, zeros before", 3e-5),
        ("3, zeros before", 1e-4),
        ("None, a memory before", 2e-6),
        ("20, a memory before", 3e-5),
    ],
)
def test_outputs_and_gradients_are_those_of_the_recurrence(errors, case, most):
    """Documents cost digits: the factor that ends one is a part of the sums of logarithms in its chunk."""
    assert {name: error for name, error in errors[case].items() if not error < most} == {}
