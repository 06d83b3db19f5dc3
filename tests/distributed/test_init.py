"""Initial weights are the same bits on every mesh, and no rank draws a full copy."""

from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from configs.layout import MeshSizes
from configs.schema import Fsdp, Model, Training
from models import build_model
from parallelisms import init
from parallelisms.expert import apply_expert_parallel
from parallelisms.fsdp import apply_fsdp
from parallelisms.init import local_indices, materialize
from parallelisms.mesh import build_mesh
from parallelisms.tensor import apply_tensor_parallel

# Rows that neither 2 nor 4 divides, so that some shards are uneven and some ranks own nothing of the norms.
CONFIG = Model(dim=66, n_layers=2, n_heads=2, head_dim=34, ffn_dim=130, vocab_size=1002)
# Of 3 experts on an expert-parallel rank 2 ranks have halves each, since 2 does not divide 3 but their 10 rows; of 6
# experts 4 ranks have two, two, two and none, or quarters where they divide the rows.
EXPERTS = Model(
    dim=12, n_layers=2, n_heads=2, ffn_dim=20, vocab_size=30, n_experts=6, expert_dim=10, n_shared_experts=1
)


def sharded(sizes: MeshSizes, config: Model = CONFIG):
    mesh = build_mesh(sizes, torch.device("cpu"))
    with torch.device("meta"):
        model = build_model(config)
    if sizes.tp > 1:
        apply_tensor_parallel(model, mesh.tp)
    if sizes.ep > 1:
        apply_expert_parallel(model, mesh.ep)
    training = Training(steps=1, seq_len=8, global_batch_size=8)
    apply_fsdp(model, mesh, Fsdp(), training)
    materialize(model, torch.device("cpu"), seed=3)
    return model


def digest(sizes: MeshSizes, block_elements: int, config: Model = CONFIG) -> dict[str, torch.Tensor]:
    # Small blocks: several to a matrix, cut by the shards' borders.
    with patch.object(init, "BLOCK_ELEMENTS", block_elements):
        return {name: p.full_tensor().detach() for name, p in sharded(sizes, config).named_parameters()}


def test_the_same_bits_on_every_mesh(ranks):
    one = ranks(1, digest, MeshSizes(1, 1, 1), 1 << 10)[0]
    for sizes in (MeshSizes(1, 2, 1), MeshSizes(1, 4, 1), MeshSizes(2, 2, 1), MeshSizes(1, 1, 2), MeshSizes(1, 2, 2)):
        for found in ranks(sizes.world_size, digest, sizes, 1 << 10):
            assert found.keys() == one.keys()
            for name, value in one.items():
                assert torch.equal(found[name], value), (sizes, name)


@pytest.mark.long
def test_the_same_experts_on_every_mesh(ranks):
    one = ranks(1, digest, MeshSizes(1, 1, 1), 1 << 5, EXPERTS)[0]
    for sizes in (
        MeshSizes(1, 2, 1, ep=2),
        MeshSizes(1, 4, 1),
        MeshSizes(1, 4, 1, ep=2),
        MeshSizes(2, 2, 1, ep=2),
        MeshSizes(1, 2, 2, ep=2),
        MeshSizes(1, 1, 1, cp=3, ep=3),
    ):
        for found in ranks(sizes.world_size, digest, sizes, 1 << 5, EXPERTS):
            assert found.keys() == one.keys()
            for name, value in one.items():
                assert torch.equal(found[name], value), (sizes, name)


def drawn_elements(sizes: MeshSizes) -> tuple[int, int]:
    """Elements this rank draws, and elements of the whole model."""
    drawn = 0
    draw = init._truncated_normal

    def counting(shape, std, key):
        nonlocal drawn
        drawn += torch.Size(shape).numel()
        return draw(shape, std, key)

    with patch.multiple(init, BLOCK_ELEMENTS=1 << 8, _truncated_normal=counting):
        model = sharded(sizes)
    return drawn, sum(p.numel() for p in model.parameters())


def test_a_rank_draws_only_the_blocks_that_it_owns(ranks):
    for drawn, total in ranks(4, drawn_elements, MeshSizes(1, 4, 1)):
        assert drawn < 0.3 * total  # a quarter, and the blocks at its borders


def indices_by_dtensor(placements: list) -> bool:
    """Whether local_indices agrees with torch's own sharding of a table of coordinates."""
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    table = torch.stack(torch.meshgrid(torch.arange(7), torch.arange(10), indexing="ij"), dim=-1)
    for dim in range(2):
        cut = distribute_tensor(table[..., dim].contiguous(), mesh, placements, src_data_rank=None)
        rows, columns = local_indices(cut)
        expected = (rows[:, None] if dim == 0 else columns[None]).expand(cut.to_local().shape)
        if not torch.equal(cut.to_local(), expected):
            return False
    return isinstance(cut, DTensor)


@pytest.mark.parametrize(
    "placements", [[Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Replicate()], [Replicate(), Replicate()]]
)
def test_local_indices_are_those_of_the_shard(ranks, placements):
    assert all(ranks(4, indices_by_dtensor, placements))
