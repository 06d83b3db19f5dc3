"""The short form of `python -m tests.bucket.kill`."""

from pathlib import Path

import pytest

from tests.bucket.ceph import Ceph
from tests.bucket.kill import torture

KILLS = 12


@pytest.mark.long
@pytest.mark.parametrize("elastic", [False, True])
def test_kills_at_random_moments_cost_no_bit_and_leave_nothing(server: Ceph, tmp_path: Path, elastic: bool):
    assert torture(server, tmp_path, KILLS, steps=30, elastic=elastic)["runs"]
