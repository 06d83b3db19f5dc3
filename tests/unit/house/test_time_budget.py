"""A session in a limited time skips what has not begun, says so, and draws the order of files."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from tests.time_budget import in_drawn_order, with_beginnings

CASES = """
import time

import pytest


@pytest.mark.parametrize("number", range(4))
def test_of_a_file(number):
    time.sleep(0.4)
"""


def test_what_has_no_time_is_skipped_and_counted(tmp_path):
    (tmp_path / "test_one.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-n", "0", "-vv", "-p", "tests.time_budget"]
    done = subprocess.run(
        [*command, "--minutes", "0.01", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    printed = done.stdout
    passed, skipped = printed.count(" PASSED"), printed.count(" SKIPPED")
    assert (passed + skipped, 1 <= passed <= 3) == (4, True), printed
    assert f"{skipped} cases were skipped, since their session had no time left (--minutes 0.01)" in printed


def cases(names):
    """A case for each letter, of the file with that name; those in capitals begin."""
    return [
        SimpleNamespace(
            path=Path(f"test_{name.lower()}.py"), name=name, get_closest_marker=lambda _, n=name: n.isupper()
        )
        for name in names
    ]


def drawn(seed):
    return "".join(item.name for item in in_drawn_order(cases("abcdef" * 2), seed))


def test_a_seed_draws_the_order_of_files():
    """Each seed its own order, and cases of a file stay together."""
    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1)[::2] == drawn(1)[1::2]
    assert sorted(drawn(1)) == sorted(drawn(2)) == list("aabbccddeeff")


@pytest.mark.parametrize(
    ("names", "workers", "expected"),
    [
        ("abcd", 2, "abcd"),
        ("abXcd", 1, "Xabcd"),
        ("abXcYd", 1, "XYabcd"),
        ("abXcYd", 2, "XabYcd"),  # shares of three
        ("abXcYde", 2, "XabYcde"),  # of three and four
        ("XYabZ", 2, "XZYab"),
        ("X", 3, "X"),
    ],
)
def test_what_takes_minutes_begins_on_workers_of_their_own(names, workers, expected):
    assert "".join(item.name for item in with_beginnings(cases(names), workers)) == expected
