"""A step traced over fake ranks communicates what the same step does over real ones."""

import pytest
import torch
import torch.distributed as dist

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from tests.marked import marked
from trainer.planning.traffic import Collective, record_step, trace_step
from trainer.step import build_learner

MESHES = {
    "FSDP 2 x TP 2": ("--mesh.tp", "2", "--activation_checkpoint.mode", "selective"),
    "PP 2 x CP 2": ("--mesh.pp", "2", "--mesh.cp", "2"),
}


def config_of(name):
    return load("parity.toml", ("--training.micro_batch_size", "1", *MESHES[name]), 4).config


def real(name):
    config = config_of(name)
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    record_step(learner)  # a pipeline's ranks also vote before their first step
    return record_step(learner)


@pytest.mark.parametrize("name", marked(MESHES, slow=["PP 2 x CP 2"], long=["FSDP 2 x TP 2"]))
def test_as_over_real_ranks(ranks, name):
    found = ranks(4, real, name)
    assert [found[0], found[3]] == [trace_step(config_of(name), 4, rank) for rank in (0, 3)]


@pytest.mark.parametrize(("mode", "repeated"), [("none", 0), pytest.param("full", 2, marks=pytest.mark.slow)])
def test_rows_travel_to_experts_and_back_and_so_do_their_gradients(mode, repeated):
    words = ("--mesh.ep", "2", "--model.n_experts", "8", "--activation_checkpoint.mode", mode)
    traffic = trace_step(load("parity.toml", words, 4).config, 4, 0)
    n_layers, micro_batches, rows_of_64_float64 = 4, 2, 32 * 2 * 64 * 8
    exchanges = traffic[Collective("all_to_all", "ep")]
    assert exchanges.calls == n_layers * micro_batches * (4 + repeated)
    assert exchanges.n_bytes == exchanges.calls * rows_of_64_float64
    # Experts are gathered with their block: not once more for what is recomputed.
    assert traffic[Collective("all_gather", "expert_shard")].calls == n_layers * micro_batches * 2
