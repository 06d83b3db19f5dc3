"""A pool's workers, over many cases."""

import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from scripts import rank_pool
from scripts.parity import dtype_overrides, run_rows
from scripts.parity_rows import table
from scripts.rank_pool import MANY_THREADS, RankLost, RankPool
from tests.conftest import repeating_once

CONFIG = "parity.toml"
CHOSEN = ("FSDP 2, full, compiled, accumulation 2", "TP 2, none, eager, accumulation 1")


def threads() -> int:
    """Of this process, those of gloo included, which Python does not know."""
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_process_groups_that_are_gone_leave_no_threads(ranks):
    rows = [row for row in table() if row.name in CHOSEN]

    class Pool:
        run = staticmethod(ranks)

    counts = []
    for _ in range(2):
        list(run_rows(Pool(), CONFIG, rows, (*dtype_overrides("float64"), "--training.steps", "2")))
        counts.append(max(ranks(2, threads)))
    assert counts[1] == counts[0]


WORKER = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a session in the background ignores it
from scripts.rank_pool import RankPool
pool = RankPool(size=1)
[handler] = pool.run(1, signal.getsignal, signal.SIGINT)
pool.close()
assert handler is signal.SIG_DFL, handler
"""


def test_ctrl_c_ends_a_worker_without_a_traceback():
    subprocess.run([sys.executable, "-c", WORKER], check=True)


def test_ctrl_c_ends_busy_ranks_at_once(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_pool, "wait", interrupted)
    pool = RankPool(size=1)
    with pytest.raises(KeyboardInterrupt):
        pool.run(1, time.sleep, 60)
    assert pool._workers == []


def test_a_worker_that_begins_after_its_pools_end_leaves_no_file(tmp_path):
    here, there = multiprocessing.Pipe()
    here.close()
    rank_pool._work(there, str(tmp_path / "crash"))
    assert list(tmp_path.iterdir()) == []


def process_with(n_threads: int) -> int:
    for _ in range(n_threads):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def test_a_worker_with_many_threads_makes_room_for_another():
    pool = RankPool(size=2)
    try:
        first = pool.run(2, process_with, 0)
        assert pool.run(2, process_with, MANY_THREADS) == first
        after = pool.run(2, process_with, 0)
        assert not set(after) & set(first)
        assert pool.run(2, process_with, 0) == after
    finally:
        pool.close()


def tensor_of_process_with(n_threads: int) -> torch.Tensor:
    process_with(n_threads)
    return torch.full((1000,), float(os.environ["RANK"]))


def test_what_a_worker_that_makes_room_has_returned_can_be_read(monkeypatch):
    """A tensor is taken from its process when the result is read, which may be later."""
    wait = rank_pool.wait
    monkeypatch.setattr(rank_pool, "wait", lambda ready: (time.sleep(1), wait(ready))[1])
    pool = RankPool(size=2)
    try:
        for rank, tensor in enumerate(pool.run(2, tensor_of_process_with, MANY_THREADS)):
            assert (tensor == rank).all()
    finally:
        pool.close()


def end_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        os.abort()


def test_a_rank_that_dies_ends_the_others_and_says_where():
    pool = RankPool(size=2)
    try:
        with pytest.raises(
            RankLost, match=r"(?s)rank 1 of 2: .* in end_on_rank_one.*the process died \(exit code -6\)$"
        ):
            pool.run(2, end_on_rank_one)
    finally:
        pool.close()


def wait_for_rank_one() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(60)
    torch.distributed.all_reduce(torch.ones(1))


@pytest.mark.slow
def test_a_time_out_says_where_the_other_ranks_are():
    pool = RankPool(size=2, timeout_seconds=3)
    try:
        with pytest.raises(RankLost) as error:
            pool.run(2, wait_for_rank_one)
        assert re.search(r'(?s)^meanwhile, rank 1 of 2: .*", line \d+ in wait_for_rank_one', str(error.value))
        assert re.search(r"(?s)\nrank 0 of 2: .*Timed out waiting 3000ms", str(error.value))
    finally:
        pool.close()


def test_one_call_that_loses_a_rank_is_repeated_with_a_warning():
    calls = []

    def losing(n, function, number):
        calls.append(number)
        if calls.count(number) <= function:
            raise RankLost(f"rank 0 of {n} in call {number}")
        return [number] * n

    run = repeating_once(losing)
    with pytest.warns(UserWarning, match="tried once more: rank 0 of 2 in call 1"):
        assert run(2, 1, 1) == [1, 1]
    with pytest.raises(RankLost):
        run(2, 1, 2)
    with pytest.warns(UserWarning, match="in call 3"), pytest.raises(RankLost):
        repeating_once(losing)(2, 2, 3)
    assert calls == [1, 1, 2, 3, 3]
