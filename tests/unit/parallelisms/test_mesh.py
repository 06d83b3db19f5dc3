"""Which arrangements of ranks torch builds: all that the config can ask for. No ranks are needed to see it."""

import itertools

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from configs.layout import MeshSizes
from parallelisms.mesh import build_mesh


def test_every_small_mesh_is_built():
    """Torch 2.11 refuses some ways of naming the dimensions of a mesh, so that no job would start on it."""
    built = 0
    for pp, replicas, shard, cp, tp, ep in itertools.product((1, 2), (1, 2), (1, 2, 4), (1, 2), (1, 2), (1, 2)):
        if (shard * cp) % ep:
            continue
        sizes = MeshSizes(dp_replicate=replicas, dp_shard=shard, tp=tp, cp=cp, pp=pp, ep=ep)
        for rank in {0, sizes.world_size - 1}:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sizes.world_size)
            try:
                mesh = build_mesh(sizes, torch.device("cpu"))
                shape = mesh.pp.size(), mesh.dp.size(), mesh.cp.size(), mesh.tp.size(), mesh.tokens.size()
                assert shape == (pp, replicas * shard, cp, tp, replicas * shard * cp), sizes
                assert mesh.ep["ep"].size() == ep, sizes
                assert mesh.expert_fsdp["expert_shard"].size() == shard * cp // ep, sizes
                built += 1
            finally:
                dist.destroy_process_group()
    assert built == 175
