"""A session of tests in a limited time: pytest --minutes 15 --draw SEED

Files come in an order that SEED draws, and a case that has not begun when the minutes are over is skipped; the session
ends with their number. On a quiet machine all have time, and on a slow one another part of them each time. A case that
takes minutes (`pytest.mark.begins`) begins the session, or it might begin in its last minute.
"""

import random
import time
from collections import defaultdict
from typing import Any

import pytest

_DEADLINE = pytest.StashKey[float]()
_REASON = "its session has no time left"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("time budget")
    group.addoption("--minutes", type=float, help="skip the cases that have not begun after so many minutes")
    group.addoption("--draw", type=int, metavar="SEED", help="draw the order of the test files by this seed")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the clock; each worker of pytest-xdist has its own."""
    if minutes := session.config.getoption("minutes"):
        session.config.stash[_DEADLINE] = time.monotonic() + 60 * minutes


def in_drawn_order(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """The cases by file: first the files that begin, then the others, each in an order that the seed draws."""
    by_file = defaultdict(list)
    for item in items:
        by_file[item.path].append(item)
    files = sorted(by_file)
    random.Random(seed).shuffle(files)
    files.sort(key=lambda file: not any(item.get_closest_marker("begins") for item in by_file[file]))
    return [item for file in files for item in by_file[file]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw the order."""
    if (seed := config.getoption("draw")) is not None:
        items[:] = in_drawn_order(items, seed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a case for which there is no time, before its fixtures cost any."""
    if time.monotonic() > item.config.stash.get(_DEADLINE, float("inf")):
        pytest.skip(_REASON)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many cases had no time. pytest 8.0 has no public name for the reporter's class."""
    skipped = terminalreporter.getreports("skipped")
    if late := sum(_REASON in str(report.longrepr) for report in skipped):
        minutes = config.getoption("minutes")
        terminalreporter.line(
            f"{late} cases were skipped, since their session had no time left (--minutes {minutes:g})"
        )
