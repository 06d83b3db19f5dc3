"""How many connections a rank opens: groups of thousands of ranks must not connect everybody with everybody."""

import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from checkpoint import manager as checkpoint_manager
from checkpoint.reader import Description, Log
from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import allow_open_files, build_mesh
from trainer.guards import grace

LIMIT = 200
OF_BOTH = "cpu:gloo,cuda:nccl"


def speaks_to(ranks: int) -> int:
    """Ranks that gloo connects one with, lazily: neighbors in a ring, and those at distances of powers of two."""
    return min(ranks - 1, 2 + 2 * math.ceil(math.log2(ranks))) if ranks > 1 else 0


@pytest.fixture
def gloo_groups(monkeypatch):
    """Sizes of the groups of a rank that have gloo, as they are made: all are fakes, whatever they ask for."""
    sizes = []
    make = dist.distributed_c10d._new_group_with_tag

    def note(ranks=None, timeout=None, backend=None, *args, **kwargs):
        ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        if dist.get_rank() in ranks and "gloo" in (backend or OF_BOTH):
            sizes.append(len(ranks))
        return make(ranks, timeout, "fake", *args, **kwargs)

    monkeypatch.setattr(dist.distributed_c10d, "_new_group_with_tag", note)
    return sizes


@pytest.mark.parametrize(("job", "ranks"), [("llama_405b.toml", 512), ("llama_405b.toml", 16384)])
def test_a_rank_opens_few_connections(gloo_groups, monkeypatch, tmp_path, job, ranks):
    config = load(job, ("--training.global_batch_size", str(ranks)), ranks).config
    sizes = mesh_sizes(config, ranks)
    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 2 + 1, world_size=ranks)
    try:
        mesh = build_mesh(sizes, torch.device("cuda"))
        assert mesh.tp.size() == sizes.tp
        checkpoint_manager.CheckpointManager(tmp_path, config.checkpoint, Description({}, {}), Log())
        # The watch over the grace time, whose other collectives need real ranks.
        monkeypatch.setattr(grace, "on_rank_zero", lambda *_: "name")
        grace.Grace(None, 30, None, torch.device("cpu"), 600)
    finally:
        dist.destroy_process_group()
    assert gloo_groups == [ranks, ranks]  # a thread each for writing and for the grace time
    # Beside the group of all ranks; each listens for others, too.
    assert sum(1 + speaks_to(size) for size in (ranks, *gloo_groups)) < LIMIT


def test_nothing_else_makes_groups():
    """The test above counts those of these two."""
    root = Path(checkpoint_manager.__file__).parents[1]
    makes = {
        path.relative_to(root).as_posix(): path.read_text().count("new_group(")
        for folder in ("checkpoint", "models", "parallelisms", "trainer")
        for path in (root / folder).rglob("*.py")
    }
    assert {path: count for path, count in makes.items() if count} == {
        "checkpoint/manager.py": 1,
        "trainer/guards/grace.py": 1,
    }


CONNECTS = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from parallelisms import mesh

mesh._RANKS_CONNECTED_AT_ONCE = 4

def connections():
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            found += str(file.readlink()).startswith("socket:")
        except OSError:
            pass
    return found

mesh.start_process_group("cpu", timeout_seconds=300)
before = connections()
groups = [dist.new_group(backend="gloo") for _ in range(4)]
dist.barrier()
idle = connections() - before
for group in groups:
    dist.all_reduce(torch.ones(3), group=group)
dist.barrier()
if dist.get_rank() == 0:
    print(idle, connections() - before)
"""


@pytest.mark.long  # what gloo does, whatever Keel does
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="connections are counted in /proc")
def test_gloo_connects_only_ranks_that_speak_to_each_other():
    """Real ranks: 6 in a group would be 5 connections each, at once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "6", "--no-python"]
    program = [sys.executable, "-c", CONNECTS]
    root = Path(checkpoint_manager.__file__).parents[1]
    done = subprocess.run(
        [*command, *program],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    idle, spoken = map(int, done.stdout.split())
    assert idle <= 4 * 1 + 6  # each group listens; the barrier's are of the group of all ranks
    assert spoken <= idle + 4 * 2 + 6


def test_the_limit_on_open_files_is_raised():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
