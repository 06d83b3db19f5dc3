"""Ranks with CUDA devices that compute nothing (device.c), where torch's CUDA build is installed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from parallelisms.nccl import KNOWN_BACKEND
from tests.null_gpu.device import Unavailable, environment

RANKS = 4


@pytest.fixture(scope="session")
def null_gpus() -> dict[str, str]:
    """What a process needs in its environment to see the devices; without a CUDA build of torch the tests skip."""
    try:
        return environment(RANKS)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def null_ranks(null_gpus: dict[str, str]) -> Iterator[Callable]:
    """`null_ranks(n, function, *arguments)`: as the fixture `ranks`, on a device each."""
    yield from _pool(null_gpus, RANKS)


@pytest.fixture
def fresh_null_rank(null_gpus: dict[str, str]) -> Iterator[Callable]:
    """The same with one rank, in whose process no other test has left anything, such as memory of the device."""
    yield from _pool(null_gpus, 1)


def _pool(null_gpus: dict[str, str], size: int) -> Iterator[Callable]:
    from scripts.rank_pool import RankPool

    pool = RankPool(size, timeout_seconds=300, backend="cpu:gloo,cuda:nccl")

    def run(ranks: int, function: Callable, *arguments: Any) -> list[Any]:
        # A process takes the device when it starts: workers that start now have it, this process has not.
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (KNOWN_BACKEND | null_gpus).items():
                patch.setenv(name, value)
            return pool.run(ranks, function, *arguments)

    yield run
    pool.close()
