"""Which arrangements of ranks torch builds: all that the config can ask for. No ranks are needed to see it."""

import itertools
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from configs.layout import MeshSizes, mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh, groups_of_axes
from parallelisms.torch_internals import process_groups
from trainer.planning.memory import count_communicators, estimate_memory


@pytest.mark.slow
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


def test_owners_hold_the_experts_of_their_rank_of_ep():
    sizes = MeshSizes(dp_replicate=4, dp_shard=1, tp=2, cp=2, pp=2, ep=4, by_owner=True)
    with on_gpus(sizes, rank=5) as mesh:
        ranks = {axis: dist.get_process_group_ranks(group) for axis, group in groups_of_axes(mesh).items()}
        assert mesh.place(5) == {"replicas": 2, "shard": 0, "expert_replicas": 0, "expert_shard": 0, "ep": 2, "tp": 1}
    assert ranks["ep"] == [1, 3, 5, 7]
    assert ranks["expert_replicas"] == [5, 13]
    assert ranks["replicas"] == ranks["tokens"] == list(range(1, 16, 2))
    used = {tuple(ranks[axis]) for axis in ("pp", "tokens", "tp", "cp", "ep", "expert_replicas")}
    assert count_communicators(sizes) == len(used) + 1  # and all ranks
    alone = MeshSizes(dp_replicate=4, dp_shard=1, tp=1, ep=4, by_owner=True)
    with on_gpus(alone, rank=2) as mesh:
        assert mesh.expert_fsdp.get_group(0).size() == 1
    assert count_communicators(alone) == 2


@contextmanager
def on_gpus(sizes, rank):
    """The mesh of one rank of GPUs that do not exist: every group is a fake, whatever backend it asks for."""
    make = dist.distributed_c10d._new_group_with_tag

    def fake(ranks=None, timeout=None, backend=None, *args, **kwargs):
        return make(ranks, timeout, "fake", *args, **kwargs)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sizes.world_size)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist.distributed_c10d, "_new_group_with_tag", fake)
            yield build_mesh(sizes, torch.device("cuda"))
    finally:
        dist.destroy_process_group()


def sets_of_ranks():
    """How many groups this rank has, by their ranks."""
    return Counter(tuple(dist.get_process_group_ranks(group)) for group in process_groups())


@pytest.mark.parametrize(
    ("job", "ranks", "of_several"),
    [
        ("llama_405b.toml", 512, 3),  # all, those that hold different tokens, tensor-parallel ones
        ("llama_70b.toml", 256, 3),
        ("qwen3_235b_a22b.toml", 512, 3),  # all, ep, the shards of experts
        ("llama_8b.toml", 8, 1),
    ],
)
def test_a_job_has_one_group_for_each_set_of_ranks(job, ranks, of_several):
    """A group for each axis, used or not, was 12 groups of a rank of 405B, of which 5 had the same ranks."""
    config = load(job, ("--training.global_batch_size", "2048"), ranks).config
    sizes = mesh_sizes(config, ranks)
    with on_gpus(sizes, ranks // 2 + 1):
        found = sets_of_ranks()
    assert set(found.values()) == {1}
    assert len(found) == of_several + 1  # and the group of this rank alone, for all axes of one rank
    assert count_communicators(sizes) == of_several


def test_every_axis_of_a_large_mesh_has_its_ranks():
    sizes = MeshSizes(dp_replicate=2, dp_shard=4, tp=4, cp=2, pp=2, ep=4)
    with on_gpus(sizes, rank=65) as mesh:
        ranks = {axis: dist.get_process_group_ranks(group) for axis, group in groups_of_axes(mesh).items()}
        found = sets_of_ranks()
    assert set(found.values()) == {1}
    assert len(found) == 11  # 13 with groups for dp_replicate and dp_shard, which nothing uses
    assert ranks["pp"] == [1, 65]
    assert ranks["tp"] == [64, 65, 66, 67]
    assert ranks["cp"] == [65, 69]
    assert ranks["ep"] == [65, 69, 73, 77]
    assert ranks["expert_shard"] == [65, 81]
    assert ranks["shard"] == list(range(65, 97, 4))
    assert ranks["replicas"] == [65, 97]
    assert ranks["tokens"] == list(range(65, 128, 4))
    # But for the data-parallel ranks and the stage's, which exchange nothing on GPUs.
    assert count_communicators(sizes) == len(found) - 2
    assert count_communicators(sizes, by_whole_matrices=True) == len(found) - 1


@pytest.mark.parametrize(
    "sizes",
    [
        MeshSizes(dp_replicate=1, dp_shard=8, tp=1, ep=8),
        MeshSizes(dp_replicate=2, dp_shard=4, tp=2, ep=4),
        MeshSizes(dp_replicate=1, dp_shard=1, tp=1, cp=8),
        MeshSizes(dp_replicate=2, dp_shard=1, tp=1, cp=4),
    ],
    ids=str,
)
def test_the_layers_own_collectives_do_not_queue_behind_gathers(sizes):
    """FSDP issues the next layers' gathers first: in one communicator, a layer would wait for them."""
    with on_gpus(sizes, rank=1) as mesh:
        groups = groups_of_axes(mesh)
        inside = groups["cp" if sizes.cp > 1 else "ep"]
        assert dist.get_process_group_ranks(inside) == dist.get_process_group_ranks(groups["shard"])
        assert inside.group_name != groups["shard"].group_name
        assert sorted(sets_of_ranks().values())[-2:] == [1, 2]


def test_experts_and_context_of_the_same_ranks_share_a_group():
    sizes = MeshSizes(dp_replicate=1, dp_shard=2, tp=1, cp=4, ep=4)
    with on_gpus(sizes, rank=1) as mesh:
        assert mesh.cp.get_group().group_name == mesh.ep.get_group().group_name
        assert mesh.cp.get_group().group_name != mesh.fsdp.get_group().group_name
    assert count_communicators(sizes) == 3  # all (FSDP's, too), cp and ep, the shards of experts


@pytest.mark.slow
def test_communicators_are_in_the_estimate_of_gpus_only():
    config = load("debug.toml", (), 4).config
    of_mesh = MeshSizes(dp_replicate=1, dp_shard=2, tp=2)
    assert estimate_memory(config, of_mesh, "cuda").communicators == 3 * 2**29
    assert estimate_memory(config, MeshSizes(1, 1, 1), "cuda").communicators == 0
    assert estimate_memory(config, of_mesh, "cpu").communicators == 0
