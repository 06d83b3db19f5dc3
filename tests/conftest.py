"""Fixtures for all tests: the repository as the current folder, and gloo ranks that are started once."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.cpu_time import pytest_runtest_call  # noqa: F401 - pytest finds it here

os.environ.setdefault("OMP_NUM_THREADS", "1")
# No deadline, since a busy machine is no error. The same examples each time, so that whether a change may land does not
# depend on luck; `pytest --hypothesis-profile=search` looks for new ones.
settings.register_profile("keel", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("keel")

ROOT = Path(__file__).parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the case that takes the longest, or one worker ends with it long after the others."""
    items.sort(key=lambda item: "test_documented_commands" not in item.nodeid)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable]:
    """`ranks(n, function, *arguments)`: call it on n ranks, return the list of their results."""
    from scripts.rank_pool import RankPool

    pool = RankPool(size=8, timeout_seconds=300)  # ranks of a busy machine compile one after the other
    yield pool.run
    pool.close()
