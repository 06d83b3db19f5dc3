"""What several ranks on several hosts stage for a checkpoint: what is held twice is staged twice."""

import socket
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from checkpoint import staging
from checkpoint.manager import CheckpointManager
from checkpoint.reader import Description, Log
from checkpoint.shards import Shard
from checkpoint.staging import crowded_hosts, measure_memory
from configs.schema import Checkpoint

FREE = 10_000


def two_stages_on_two_hosts():
    """Ranks 0 and 1 have one stage of a pipeline, cut by rows; 2 and 3 the other; even ranks are on one host."""
    rank = dist.get_rank()
    shape, none = torch.Size([6, 5]), torch.Size([0, 0])
    rows = (4, 2)[rank % 2]
    shards = {
        f"model.{rank // 2}.w": Shard(torch.zeros(rows, 5), shape, torch.Size([4 * (rank % 2), 0])),
        f"optimizer.{rank // 2}.m": Shard(torch.zeros(rows, 5), shape, torch.Size([4 * (rank % 2), 0])),
        "model.shared": Shard(torch.zeros(1, 2), torch.Size([1, 2]), none),
    }
    with (
        mock.patch.object(socket, "gethostname", return_value=f"host {rank % 2}"),
        mock.patch.object(staging, "free_memory", return_value=FREE + rank),
    ):
        return measure_memory(shards, dist.group.WORLD)


def test_memory_of_all_ranks(ranks):
    found = ranks(4, two_stages_on_two_hosts)
    staged = {"host 0": 2 * (20 * 8 + 8), "host 1": 2 * (10 * 8 + 8)}
    assert found == [found[0]] * 4
    assert found[0] == {"host 0": (staged["host 0"], FREE), "host 1": (staged["host 1"], FREE + 1)}
    assert not crowded_hosts(found[0])
    assert crowded_hosts({"a": (95, 100), "b": (96, 100)}) == {"b": (96, 100)}


def warnings_of_a_host_that_pins_nothing(folder):
    said = []
    manager = CheckpointManager(Path(folder), Checkpoint(), Description({}, {}), Log(warning=said.append))
    with mock.patch.object(staging, "free_memory", return_value=0):
        manager._stager._pin(torch.zeros(8, dtype=torch.uint8))
    manager.close()
    return said


def test_any_rank_warns_that_it_cannot_pin_its_memory(ranks, tmp_path):
    for said in ranks(2, warnings_of_a_host_that_pins_nothing, str(tmp_path)):
        assert len(said) == 1
        assert said[0].startswith("this host cannot pin 8 bytes of those that a checkpoint is copied to")
