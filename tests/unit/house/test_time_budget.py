"""A session in a limited time skips what has not begun, says so, and draws the order of files."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

CASES = """
import time

import pytest


@pytest.mark.parametrize("number", range(4))
def test_of_a_file(number):
    time.sleep(0.4)
"""


def session(folder: Path, *words: str) -> tuple[list[str], str]:
    """Names of the files in the order of their first case, and what a session printed."""
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-n", "0", "-vv", "-p", "tests.time_budget"]
    done = subprocess.run([*command, *words, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False)
    files = [Path(line.partition("::")[0]).stem for line in done.stdout.splitlines() if "::test_of_a_file" in line]
    return list(dict.fromkeys(files)), done.stdout


def test_what_has_no_time_is_skipped_and_counted(tmp_path):
    (tmp_path / "test_one.py").write_text(CASES)
    _, printed = session(tmp_path, "--minutes", "0.01")
    passed, skipped = printed.count(" PASSED"), printed.count(" SKIPPED")
    assert (passed + skipped, 1 <= passed <= 3) == (4, True), printed
    assert f"{skipped} cases were skipped, since their session had no time left (--minutes 0.01)" in printed


def test_a_seed_draws_the_order_of_files(tmp_path):
    """Each seed its own order, and cases of a file stay together."""
    for name in "abcdef":
        (tmp_path / f"test_{name}.py").write_text("def test_of_a_file():\n    pass\n")
    given, _ = session(tmp_path)
    drawn = [session(tmp_path, "--draw", seed)[0] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert given == sorted(drawn[0]) == sorted(drawn[2]) != drawn[0]


def test_what_takes_minutes_begins(tmp_path):
    for name in "abcdef":
        (tmp_path / f"test_{name}.py").write_text("def test_of_a_file():\n    pass\n")
    (tmp_path / "test_d.py").write_text("import pytest\n\n\n@pytest.mark.begins\ndef test_of_a_file():\n    pass\n")
    drawn = [session(tmp_path, "--draw", str(seed))[0] for seed in range(2)]
    assert [order[0] for order in drawn] == ["test_d"] * 2
    assert drawn[0] != drawn[1]
