"""Compiled blocks: one graph for all of them, no graph break, nothing compiled after the second step."""

from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms import compile as compiling
from parallelisms.mesh import build_mesh
from scripts.parity_compare import attention_that_compiles
from tests.end_to_end.launch import ROOT
from tests.marked import marked
from trainer.data.loader import build_loader
from trainer.step import build_learner

CASES = {
    "plain": (1, ()),
    "FSDP, full": (2, ("--activation_checkpoint.mode", "full")),
    "FSDP, selective": (2, ("--activation_checkpoint.mode", "selective")),
    "FSDP, every second matmul": (
        2,
        ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.save_every_nth_matmul", "2"),
    ),
    "FSDP, budget": (2, ("--activation_checkpoint.mode", "budget")),
    "HSDP, bfloat16": (
        4,
        (
            "--mesh.dp_replicate",
            "2",
            "--training.dtype",
            "float32",
            "--training.compute_dtype",
            "bfloat16",
            "--training.reduce_dtype",
            "float32",
        ),
    ),
    "TP, selective": (2, ("--mesh.tp", "2", "--activation_checkpoint.mode", "selective")),
    "FSDP x TP": (4, ("--mesh.tp", "2")),
    "CP by gather, selective": (2, ("--mesh.cp", "2", "--activation_checkpoint.mode", "selective")),
    "CP by ring": (2, ("--mesh.cp", "2", "--context.method", "ring")),
    "CP x TP by all_to_all, full": (
        4,
        ("--mesh.cp", "2", "--mesh.tp", "2", "--context.method", "all_to_all", "--activation_checkpoint.mode", "full"),
    ),
    "ZeRO 1": (2, ("--fsdp.zero_stage", "1")),
}


def compile_counts(overrides: tuple[str, ...]) -> tuple[int, int, int]:
    """(graph breaks, graphs after two steps, graphs after four steps) of this rank."""
    torch._dynamo.reset()
    counters.clear()
    config = load("parity.toml", ("--compile.enable", "true", *overrides), dist.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    graphs = []
    with attention_that_compiles():
        for _, micro_batches in zip(range(4), loader, strict=False):
            learner.step(micro_batches, lr=1e-3)
            graphs.append(counters["stats"]["unique_graphs"])
    loader.close()
    return sum(counters["graph_break"].values()), graphs[1], graphs[3]


@pytest.mark.parametrize(
    "name",
    marked(
        CASES,
        slow=[
            "TP, selective",
            "ZeRO 1",
        ],
        # "TP, selective" has collectives; a ring has the values of a gather in test_context.py and test_parity.py.
        long=[
            "plain",
            "FSDP, full",
            "FSDP, selective",
            "FSDP, every second matmul",
            "FSDP, budget",
            "HSDP, bfloat16",
            "FSDP x TP",
            "CP by gather, selective",
            "CP by ring",
            "CP x TP by all_to_all, full",
        ],
    ),
)
def test_no_graph_break_and_no_recompile(ranks, name):
    n_ranks, overrides = CASES[name]
    for breaks, after_two, after_four in ranks(n_ranks, compile_counts, overrides):
        assert breaks == 0
        assert after_four == after_two
        assert 1 <= after_two <= 3  # one graph serves all blocks; the loss has two


STAGES = """
base = "parity.toml"
[compile]
enable = true
[[stages]]
at_step = 2
training.seq_len = 16
training.max_norm = 0.4
model.rope_theta = 5000.0
[[stages]]
at_step = 4
training.seq_len = 32
training.global_batch_size = 4
optimizer.lr = 2e-3
[[stages]]
at_step = 6
training.seq_len = 16
optimizer.weight_decay = 0.3
model.rope_theta = 700.0
"""


def graphs_through_stages(file: str, overrides: tuple[str, ...]) -> list[int]:
    """The graphs of this rank after the two steps of each stage."""
    torch._dynamo.reset()
    counters.clear()
    job = load(file, overrides, dist.get_world_size())
    mesh = build_mesh(mesh_sizes(job.config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(job.config, mesh, [stage.config for stage in job.later_stages])
    graphs = []
    for stage in job.stages:
        if stage is not job.stages[0]:
            learner.begin_stage(stage.config)
        with attention_that_compiles(), closing(build_loader(stage.config, mesh.dp_rank, mesh.sizes.dp, 0)) as loader:
            for _, micro_batches in zip(range(2), loader, strict=False):
                learner.step(micro_batches, lr=1e-3)
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_ranks", "overrides"),
    [
        pytest.param(1, ("--activation_checkpoint.mode", "selective"), marks=pytest.mark.long),
        pytest.param(2, (), marks=pytest.mark.long),
        (2, ("--mesh.pp", "2")),
    ],
)
def test_a_length_that_returns_compiles_nothing(ranks, tmp_path, n_ranks, overrides):
    file = tmp_path / "job.toml"
    file.write_text(STAGES.replace("parity.toml", str(ROOT / "configs" / "parity.toml")))
    for first, second, third, fourth in ranks(n_ranks, graphs_through_stages, str(file), overrides):
        assert second > first
        assert third == second
        assert fourth == second


def with_one_graph_a_stage(file: str) -> list[int]:
    """On a rank: as if the same code could have one graph."""
    limits = {"recompile_limit": 1, "accumulated_recompile_limit": 1}
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(limits):
        patch.setattr(compiling, "MOST_GRAPHS", 1)
        return graphs_through_stages(file, ())


@pytest.mark.slow
def test_each_stage_may_have_as_many_graphs(ranks, tmp_path):
    """A run of many lengths would otherwise end at one of them."""
    file = tmp_path / "job.toml"
    file.write_text(STAGES.replace("parity.toml", str(ROOT / "configs" / "parity.toml")))
    [(first, second, _, last)] = ranks(1, with_one_graph_a_stage, str(file))
    assert last == second == 2 * first


def train(overrides: tuple[str, ...]) -> list[float]:
    """Loss and gradient norm of three steps."""
    torch._dynamo.reset()
    config = load("parity.toml", overrides, dist.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    numbers = []
    with attention_that_compiles():
        for _ in range(3):
            result = learner.step(next(loader), lr=1e-3).result()
            numbers += [result.loss, result.grad_norm]
    loader.close()
    return numbers


@pytest.mark.slow
def test_a_mode_keeps_the_values(ranks):
    eager = ranks(1, train, ())[0]
    for mode in ("max-autotune-no-cudagraphs", "reduce-overhead"):  # a CPU has no graphs
        found = ranks(1, train, ("--compile.enable", "true", "--compile.mode", mode))[0]
        assert found == pytest.approx(eager, rel=1e-10, abs=0)
