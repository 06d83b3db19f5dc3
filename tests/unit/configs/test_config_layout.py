"""Mesh and batch arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.layout import (
    MeshSizes,
    accumulation_steps,
    layer_numbers,
    mesh_sizes,
    smallest_world_size,
)
from configs.load import load
from configs.schema import Mesh

DEBUG = load("debug.toml").config
SIZES = st.integers(1, 6)


def config_with(mesh, **training):
    return DEBUG.model_copy(update={"mesh": mesh, "training": DEBUG.training.model_copy(update=training)})


@given(SIZES, st.one_of(SIZES, st.just(-1)), SIZES, st.integers(1, 64))
def test_sizes_multiply_to_the_world_size_or_are_refused(dp_replicate, dp_shard, tp, world_size):
    mesh = Mesh(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)
    possible = [s for s in ([dp_shard] if dp_shard > 0 else range(1, 65)) if dp_replicate * s * tp == world_size]
    if possible:
        sizes = mesh_sizes(config_with(mesh), world_size)
        assert sizes == MeshSizes(dp_replicate, possible[0], tp)
        assert (sizes.world_size, sizes.dp) == (world_size, world_size // tp)
        assert world_size >= smallest_world_size(config_with(mesh))
    else:
        with pytest.raises(ConfigError, match="cannot form the mesh"):
            mesh_sizes(config_with(mesh), world_size)


@given(st.integers(1, 100), st.integers(1, 5), SIZES)
def test_a_step_is_the_whole_global_batch_or_refused(global_batch, micro_batch, dp):
    config = config_with(Mesh(), global_batch_size=global_batch, micro_batch_size=micro_batch)
    sizes = MeshSizes(1, dp, 1)
    try:
        assert accumulation_steps(config, sizes) * dp * micro_batch == global_batch
    except ConfigError:
        assert all(n * dp * micro_batch != global_batch for n in range(1, global_batch + 1))


def test_layer_numbers():
    assert layer_numbers("0-2, 5", 6) == [0, 1, 2, 5]
    assert layer_numbers("3", 4) == [3]
    assert layer_numbers("0-7", 8) == list(range(8))


@given(SIZES, SIZES, SIZES, st.integers(1, 4))
def test_the_smallest_mesh_can_share_the_experts_out(cp, tp, ep, multiple):
    mesh = Mesh(cp=cp, tp=tp, ep=ep)
    smallest = smallest_world_size(config_with(mesh))
    fewer = [shards * cp * tp for shards in range(1, smallest // (cp * tp)) if shards * cp % ep == 0]
    assert not fewer
    sizes = mesh_sizes(config_with(mesh), multiple * smallest)
    assert sizes.ep * sizes.expert_shard == sizes.dp_shard * cp
    assert sizes.world_size == multiple * smallest


@given(SIZES, SIZES, SIZES, SIZES)
def test_owners_share_the_experts_out_over_all_ranks_with_different_tokens(owners, cp, tp, ep):
    config = config_with(Mesh(dp_replicate=owners * ep, cp=cp, tp=tp, ep=ep))
    config = config.model_copy(update={"fsdp": config.fsdp.model_copy(update={"partition": "owner"})})
    sizes = mesh_sizes(config, smallest_world_size(config))
    assert sizes.world_size == owners * ep * cp * tp
    assert (sizes.fsdp_shard, sizes.expert_shard) == (1, 1)
    assert (sizes.replicas, sizes.expert_replicas) == (owners * ep * cp, owners * cp)
