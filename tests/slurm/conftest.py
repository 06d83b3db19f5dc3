"""One Slurm for all tests of a process, skipped with its reason where this machine can't have one."""

from collections.abc import Iterator

import pytest

from tests.debian import Unavailable, unpacked
from tests.slurm.cluster import PACKAGES, Cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes, so that a job of two can move when one is lost."""
    try:
        cluster = Cluster(unpacked("slurm", *PACKAGES), tmp_path_factory.mktemp("slurm"), nodes=3)
    except Unavailable as error:
        pytest.skip(str(error))
    try:
        cluster.start()
        yield cluster
    except Unavailable as error:
        pytest.skip(str(error))
    finally:
        cluster.stop()
