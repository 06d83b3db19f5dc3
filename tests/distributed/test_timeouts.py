"""`job.timeout_seconds` holds for every process group of a job, and a save does not last forever."""

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint import manager as checkpoint_manager
from checkpoint import store
from checkpoint.manager import CheckpointManager
from checkpoint.reader import Description, Log
from configs.errors import UserError
from configs.layout import MeshSizes
from configs.load import load
from parallelisms.mesh import build_mesh, groups_of_axes
from parallelisms.torch_internals import process_groups, timeouts_of
from tests.end_to_end.launch import TINY
from trainer.guards.watchdog import Watchdog

RANKS_TIMEOUT = 300
"""Of tests/conftest.py's ranks."""


def manager(folder: str, *words: str) -> CheckpointManager:
    settings = load(str(TINY), words, dist.get_world_size()).config.checkpoint
    return CheckpointManager(Path(folder), settings, Description({}, {}), Log())


def timeouts(folder: str) -> tuple[dict[str, set[float]], list[set[float]]]:
    """Of this rank's groups, by what they are for, and of all that torch knows; the seconds of all their backends."""
    mesh = build_mesh(MeshSizes(dp_replicate=2, dp_shard=1, tp=2), torch.device("cpu"))
    checkpoints = manager(folder, "--checkpoint.timeout_seconds", "77")
    groups = groups_of_axes(mesh) | {"writers": checkpoints._group}
    return {name: _seconds(group) for name, group in groups.items()}, [_seconds(group) for group in process_groups()]


def _seconds(group: dist.ProcessGroup) -> set[float]:
    return {limit.total_seconds() for limit in timeouts_of(group).values()}


def test_all_groups_have_the_timeout_of_the_job(ranks, tmp_path):
    for by_name, every in ranks(4, timeouts, str(tmp_path)):
        assert by_name.pop("writers") == {77}
        assert len(by_name) >= 8
        assert set(map(tuple, by_name.values())) == {(RANKS_TIMEOUT,)}
        assert set(map(tuple, every)) == {(77,), (RANKS_TIMEOUT,)}


def wait_for_a_save_that_hangs(folder: str) -> str:
    disk_answers, grace = threading.Event(), checkpoint_manager.GRACE_SECONDS
    checkpoint_manager.GRACE_SECONDS, write, store.write = 0, store.write, lambda *_: disk_answers.wait()
    try:
        checkpoints = manager(folder, "--checkpoint.timeout_seconds", "1")
        checkpoints.resume({"model.w": torch.ones(3)})
        checkpoints.begin_lineage()
        checkpoints.save(5, {"model.w": torch.ones(3)}, {"tokens": 0})
        checkpoints.wait()
    except UserError as error:
        return str(error)
    finally:
        checkpoint_manager.GRACE_SECONDS, store.write = grace, write
        disk_answers.set()
    return ""


def test_a_save_that_hangs_is_not_waited_for_for_ever(ranks, tmp_path):
    [said] = ranks(1, wait_for_a_save_that_hangs, str(tmp_path))
    assert f"the save to {tmp_path}/step-00000005.tmp has not finished within 1 s (checkpoint.timeout_seconds)" in said
    assert "on rank 0" in said


def come_late(folder: str) -> None:
    """Rank 1 does not come to a collective until the hang has been reported."""
    watchdog = Watchdog(Path(folder), 8, print)
    watchdog.step(7)
    deadline = time.monotonic() + 60
    while dist.get_rank() == 1 and not (Path(folder) / "run.log").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    dist.all_reduce(torch.ones(1))
    watchdog.close()


def test_a_hang_names_the_rank_that_does_not_come_though_it_lives(ranks, tmp_path):
    ranks(2, come_late, str(tmp_path))
    [line] = (tmp_path / "run.log").read_text().splitlines()
    assert "step 8 (training) has not ended for " in line
    assert " s: rank 1 on host" in line
    assert "has not arrived at collective" in line
    assert "rank 0" not in line
    waiting, late = ((tmp_path / "hangs" / "step-00000007" / f"rank-0000{rank}.txt").read_text() for rank in (0, 1))
    assert "in all_reduce" in waiting
    assert "in all_reduce" not in late
    assert "come_late" in late
