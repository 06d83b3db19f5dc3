"""A session of tests in a limited time: pytest --minutes 15 --draw SEED

Files come in an order that SEED draws, and a case that has not begun when the minutes are over is skipped; the session
ends with their number. On a quiet machine all have time, and on a slow one another part of them each time. Cases that
take minutes (`pytest.mark.begins`) begin the session, each on a worker of its own: they might begin in its last minute.
"""

import os
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
    """The cases by file, in an order of the files that the seed draws."""
    by_file = defaultdict(list)
    for item in items:
        by_file[item.path].append(item)
    files = sorted(by_file)
    random.Random(seed).shuffle(files)
    return [item for file in files for item in by_file[file]]


def with_beginnings(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The cases in their order, but for those that begin: one after the other, they are the first of a worker's share.

    pytest-xdist (`--dist worksteal`) gives each worker an equal share of the list to begin with.
    """
    beginning = [item for item in items if item.get_closest_marker("begins")]
    ordered = [item for item in items if item not in beginning]
    starts = []
    start = 0
    for left in range(workers, 0, -1):
        starts.append(start)
        start += (len(items) - start) // left
    places = [starts[number % workers] + number // workers for number in range(len(beginning))]
    for place, item in sorted(zip(places, beginning, strict=True), key=lambda placed: placed[0]):
        ordered.insert(place, item)
    return ordered


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw the order of the cases that are left."""
    if (seed := config.getoption("draw")) is not None:
        items[:] = in_drawn_order(items, seed)
    items[:] = with_beginnings(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


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
