"""Fixtures for all tests: the repository as the current folder, and gloo ranks that are started once."""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from configs.machine import available_cores, free_memory

pytest_plugins = ["tests.bucket.server", "tests.cpu_time", "tests.time_budget"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
# No deadline, since a busy machine is no error. The same examples each time, apart from those with constants of the
# source, so that whether a change may land does not depend on luck; `pytest --hypothesis-profile=search` looks for new
# ones.
settings.register_profile("keel", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("keel")

ROOT = Path(__file__).parent.parent
BYTES_OF_A_WORKER = 4 << 30
"""What a worker takes with eight ranks, each of which has imported torch."""
MOST_WORKERS = 9
"""With more, the longest cases decide when the session ends."""


def pytest_configure(config: pytest.Config) -> None:
    """Hide this machine's GPUs, which are fewer than some cases have ranks, unless the session asks for `-m gpu`."""
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_xdist_auto_num_workers() -> int:
    """A worker for each core and one more, since many cases wait; as many as there is memory for, with their ranks."""
    return max(1, min(available_cores() + 1, free_memory() // BYTES_OF_A_WORKER, MOST_WORKERS))


def repeating_once(run: Callable) -> Callable:
    """`RankPool.run`, which repeats one of all its calls if that call loses a rank."""
    from scripts.rank_pool import RankLost

    lost: list[RankLost] = []

    def run_again(n: int, function: Callable, *arguments: Any) -> list[Any]:
        try:
            return run(n, function, *arguments)
        except RankLost as error:
            if lost:
                raise
            lost.append(error)
            warnings.warn(f"tried once more: {error}", stacklevel=2)
            return run(n, function, *arguments)

    return run_again


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable]:
    """`ranks(n, function, *arguments)`: call it on n ranks, return the list of their results.

    Once a session, a call that loses a rank is repeated, with a warning that says where the ranks were.
    """
    from scripts.rank_pool import RankPool

    pool = RankPool(size=8, timeout_seconds=300)  # ranks of a busy machine compile one after the other
    yield repeating_once(pool.run)
    pool.close()
