"""Cases that take too long without a mark fail."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.cpu_time import takes_a_second_at_most

CASES = """
import multiprocessing
import subprocess
import sys
import time

import pytest

from tests import cpu_time

cpu_time.LIMIT_SECONDS = 0.1
cpu_time.TOLERANCE = 2.0
WORK = "import time\\nwhile time.process_time() < 0.5: pass"


def work(*_):
    exec(WORK)


@pytest.fixture(scope="module")
def helper():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(abs, [1])
        yield pool


def test_quick():
    time.sleep(0.5)


def test_here():
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass


@pytest.mark.slow
def test_marked():
    test_here()


def test_a_child():
    subprocess.run([sys.executable, "-c", WORK], check=True)


def test_a_process_that_goes_on(helper):
    helper.map(work, [1])


def test_that_fails_says_why():
    test_here()
    raise ValueError("its own reason")
"""


def test_who_fails(tmp_path):
    """CPU time counts, wherever it is spent, and the clock on the wall does not."""
    (tmp_path / "test_cases.py").write_text(CASES)
    words = ["-m", "pytest", "-c", "pyproject.toml", "-n", "0", "-m", "", "-p", "tests.cpu_time", "-rA"]
    done = subprocess.run(
        [sys.executable, *words, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    outcomes = dict(line.split(" - ")[0].split(" ", 1)[::-1] for line in done.stdout.splitlines() if "::test" in line)
    found = {name.rpartition("::")[2]: outcome for name, outcome in outcomes.items()}
    assert found == {
        "test_quick": "PASSED",
        "test_here": "FAILED",
        "test_marked": "PASSED",
        "test_a_child": "FAILED",
        "test_a_process_that_goes_on": "FAILED",
        "test_that_fails_says_why": "FAILED",
    }, done.stdout
    assert "0.5 s of CPU time, and a case without a mark may take 0.1: make it cheaper" in done.stdout
    assert "ValueError: its own reason" in done.stdout


@pytest.mark.slow  # it imports torch twice
@pytest.mark.parametrize(("program", "is_quick"), [("pass", True), ("import torch", False)])
def test_what_takes_a_second_at_most(program, is_quick):
    command = [sys.executable, "-c", program]
    assert takes_a_second_at_most(lambda: subprocess.run(command, check=True), tries=1) is is_quick
