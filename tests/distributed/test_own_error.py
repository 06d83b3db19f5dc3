"""A rank that ends with an error of its own: the others end in seconds, wherever they wait, and leave a report."""

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer.guards import watchdog as watchdogs
from trainer.guards.peers import PERIOD_SECONDS, Loss
from trainer.guards.watchdog import Watchdog

GRACE_SECONDS = 1.0
"""In place of the watchdog's own."""


def wait_where_no_error_comes(folder: str, how: str) -> tuple[list[str], float]:
    """On a rank: whom the watchdog has named when it ended this rank, and after how long.

    Rank 1 ends in the manner of `how`; the others are stuck.
    """
    ended = threading.Event()
    named: list[str] = []

    def end(losses: list[Loss]) -> None:
        if not ended.is_set():
            named.extend(map(str, losses))
            ended.set()

    before = watchdogs.GRACE_SECONDS
    watchdogs.GRACE_SECONDS = GRACE_SECONDS
    watchdog = Watchdog(Path(folder), 600, end)
    watchdog.step(7)
    dist.all_reduce(torch.ones(5))
    began = time.monotonic()
    try:
        if dist.get_rank() == 1:
            watchdog.close("the device is out of order" if how == "error" else "")
            return [], 0.0
        ended.wait(60 if how == "error" else GRACE_SECONDS + 3 * PERIOD_SECONDS)
        return named, time.monotonic() - began
    finally:
        watchdog.close()
        watchdogs.GRACE_SECONDS = before


def test_the_others_are_ended_and_say_why(ranks, tmp_path):
    told = ranks(3, wait_where_no_error_comes, str(tmp_path), "error")
    for rank in (0, 2):
        [named], seconds = told[rank]
        assert named.startswith("rank 1 on host")
        assert named.endswith("has ended: the device is out of order; its last step was 7")
        assert seconds < 40  # job.timeout_seconds is 600
        report = (tmp_path / "hangs" / "step-00000007" / f"rank-0000{rank}.txt").read_text()
        assert "has ended: the device is out of order; its last step was 7; training after step 7 for" in report
        assert "wait_where_no_error_comes" in report
        assert "gloo:all_reduce [[5]], completed" in report
    assert not (tmp_path / "hangs" / "step-00000007" / "rank-00001.txt").exists()
    assert watchdogs.GRACE_SECONDS + 2 * PERIOD_SECONDS < 20


@pytest.mark.slow
def test_a_rank_that_ends_as_it_should_ends_no_other(ranks, tmp_path):
    told = ranks(3, wait_where_no_error_comes, str(tmp_path), "in time")
    assert [named for named, _ in told] == [[], [], []]
    assert not (tmp_path / "hangs").exists()
