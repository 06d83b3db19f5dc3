"""Experts on their own mesh: the exchange of rows against the same experts on one rank, and who holds what."""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from checkpoint.index import read_metadata
from checkpoint.plan import Plans
from checkpoint.shards import shards_of
from checkpoint.storage import FolderStorage
from checkpoint.store import write
from configs.layout import mesh_sizes, parameter_count
from configs.load import load
from configs.plan import routers_of
from parallelisms import expert
from parallelisms.expert import Buffers, apply_expert_parallel, buffer_rows
from parallelisms.mesh import build_mesh
from scripts.parity import dtype_overrides
from scripts.parity_compare import bits
from scripts.parity_rows import MOE, Row, expert_rows, words
from tests.distributed.test_parity import assert_parity
from tests.hf_families import NEEDS_TRANSFORMERS, write_config
from tests.hf_families import words as hf_words
from trainer.data.loader import build_loader
from trainer.planning.memory import estimate_memory
from trainer.step import Learner, build_learner, build_stages

_c10d = torch.ops._c10d_functional
ROWS_BY_NAME = {row.name: row for row in expert_rows()}
N_EXPERTS, DIM, ROWS = 8, 4, 6  # rows of each rank


class Experts(nn.Module):
    """Each expert a matrix of its own, applied by a loop."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(N_EXPERTS, DIM, DIM, generator=generator, dtype=torch.float64))

    def forward(self, rows, counts):
        *parts, rest = rows.split([*counts.tolist(), len(rows) - int(counts.sum())])
        weights = self.local(self.weight)
        assert len(parts) == len(weights)
        # What fills a buffer up is undefined, as after torch's grouped matmul.
        done = [part @ weight for part, weight in zip(parts, weights, strict=True)]
        return torch.cat([*done, torch.full_like(rest, torch.nan)]).tanh()


class Model(nn.Module):
    class plan:
        experts = ("experts",)

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.experts.local = lambda parameter: parameter


def rows_of(rank: int) -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.float64)


def counts_of(choices: list[list[int]], rank: int) -> torch.Tensor:
    return torch.tensor(choices[rank]).bincount(minlength=N_EXPERTS)


def exchanged(choices: list[list[int]], buffer_factor: float | None = None):
    """This rank's results, gradient of its rows, and of its experts."""
    rank = dist.get_rank()
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    apply_expert_parallel(model, mesh, buffer_factor)
    model.experts.in_buffers = buffer_factor is not None
    rows = rows_of(rank).requires_grad_()
    out = model.experts(rows, counts_of(choices, rank))
    out.pow(2).sum().backward()
    weight = model.experts.weight
    assert isinstance(weight, DTensor)
    assert (weight.placements, weight.shape[0]) == ((Shard(0),), N_EXPERTS)
    return out.detach(), rows.grad, weight.grad.full_tensor()


CHOICES = {  # experts of each rank's rows, ascending
    "some experts get nothing": [[0, 0, 1, 3, 6, 6], [0, 1, 1, 1, 3, 7], [1, 1, 3, 3, 3, 3], [0, 0, 6, 6, 6, 7]],
    "one rank gets everything": [[2, 2, 2, 2, 2, 2]] * 4,
    "only the last expert, and each its own": [[7] * 6, [0] * 6, [2] * 6, [7] * 6],
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("is_in_buffers", [False, True])
def test_rows_come_back_from_their_experts(ranks, name, n_ranks, is_in_buffers):
    """A buffer of `n_ranks` times an even load is never too small."""
    choices = CHOICES[name]
    factor = float(n_ranks) if is_in_buffers else None
    model = Model()
    whole = [rows_of(rank).requires_grad_() for rank in range(n_ranks)]
    expected = [model.experts(rows, counts_of(choices, rank)) for rank, rows in enumerate(whole)]
    torch.stack(expected).pow(2).sum().backward()
    for rank, (out, by_rows, by_weight) in enumerate(ranks(n_ranks, exchanged, choices, factor)):
        torch.testing.assert_close(out, expected[rank].detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(by_rows, whole[rank].grad, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(by_weight, model.experts.weight.grad, rtol=1e-13, atol=1e-13)


# --------------------------------------------------------------------------- in buffers


ODD = MOE | {"model.n_experts": 8, "model.n_dense_layers": 1, "model.expert_dim": 12, "training.reduction": "exact"}
ODD |= {f"training.{key}": "float32" for key in ("dtype", "compute_dtype", "reduce_dtype")}


@pytest.mark.slow
def test_buffers_have_the_bits_of_uneven_splits_at_any_width(ranks):
    """Experts whose elements fill no whole vectors of a CPU, which computes a tensor's last elements otherwise."""
    mesh = {"mesh.ep": 2, "mesh.dp_shard": 2}
    uneven, *buffers = (
        ranks(2, bits, "parity.toml", words(ODD | mesh | further))
        for further in ({}, *({"expert.exchange": "buffers", "expert.buffer_factor": factor} for factor in (1.3, 2.0)))
    )
    assert buffers == [uneven, uneven]


def missing_rows(choices: list[list[int]], factor: float):
    """Rows of this rank for which a buffer has no place, after two micro-batches: by `Buffers`, and counted."""
    n_ranks = dist.get_world_size()
    config = load("parity.toml", words(MOE | {"mesh.ep": n_ranks, "mesh.dp_shard": n_ranks}), n_ranks).config
    stages, _ = build_stages(config, build_mesh(mesh_sizes(config, n_ranks), torch.device("cpu")))
    buffers = Buffers(stages.values(), n_ranks, factor, torch.device("cpu"))
    router = next(iter(routers_of(stages[0]).values()))
    micro_batches = [counts_of(choices, dist.get_rank()), counts_of(choices, (dist.get_rank() + 1) % n_ranks)]
    with buffers.used(True):
        for tokens in micro_batches:
            router.note(tokens)
        found = buffers.missing()
    assert router.note is None
    size = buffer_rows(ROWS, factor, n_ranks)
    return found.item(), max(0, max(int(part.sum()) for each in micro_batches for part in each.chunk(n_ranks)) - size)


@pytest.mark.parametrize("factor", [1.0, 1.3, 2.0, 4.0])
def test_missing_rows_are_noticed(ranks, factor):
    choices = CHOICES["some experts get nothing"]
    for found, counted in ranks(4, missing_rows, choices, factor):
        assert found == counted
    assert any(counted for _, counted in ranks(4, missing_rows, choices, factor)) == (factor < 4)


# --------------------------------------------------------------------------- on a mesh of their own


def learner_of(row: Row) -> Learner:
    config = load("parity.toml", dtype_overrides("float64") + row.run_overrides + row.overrides, row.ranks).config
    return build_learner(config, build_mesh(mesh_sizes(config, row.ranks), torch.device("cpu")))


def expert_rows_received(row: Row) -> list[list[int]]:
    """Rows that each expert of this rank gets, for each exchange of a step."""
    received: list[list[int]] = []
    route = expert._route

    def watched(counts, n, group):
        own_counts, *rest = route(counts, n, group)
        received.append(own_counts.tolist())
        return own_counts, *rest

    with patch.object(expert, "_route", watched):
        learner = learner_of(row)
        loader = build_loader(learner.config, learner.mesh.dp_rank, learner.mesh.sizes.dp, start_sample=0)
        learner.step(next(loader), lr=1e-3)
        loader.close()
    return received


@pytest.mark.parametrize(
    "name",
    ["EP 2, eager", "EP 4, eager", pytest.param("EP 2 x FSDP 2, eager", marks=pytest.mark.slow), "EP 2 x PP 2, eager"],
)
def test_in_the_parity_rows_some_experts_get_nothing(ranks, name):
    received = ranks(ROWS_BY_NAME[name].ranks, expert_rows_received, ROWS_BY_NAME[name])
    exchanges = [counts for of_rank in received for counts in of_rank]
    assert any(0 in counts for counts in exchanges)
    assert all(len(set(counts)) > 1 for counts in exchanges)  # uneven


def order_beside_shared_experts() -> list[str]:
    """What this rank does in turn in a layer's forward and backward pass: exchanges begin and end, shared experts."""
    one_layer = MOE | {"model.n_layers": 2, "model.n_dense_layers": 1, "model.n_shared_experts": 1}
    in_buffers = {"mesh.ep": 2, "expert.exchange": "buffers", "training.micro_batch_size": 1}
    row = Row("shared experts", 2, words(in_buffers), words(one_layer))
    done: list[str] = []
    learner = learner_of(row)
    (stage,) = learner.stages.values()
    (shared,) = (module for name, module in stage.named_modules() if name.endswith(".shared_experts"))
    shared.register_forward_hook(lambda *given: done.append("shared"))
    shared.register_full_backward_hook(lambda *given: done.append("shared"))
    c10d = SimpleNamespace(
        all_to_all_single=lambda x, *given: done.append("begin") or _c10d.all_to_all_single(x, *given),
        wait_tensor=lambda x: done.append("end") or _c10d.wait_tensor(x),
    )
    loader = build_loader(learner.config, learner.mesh.dp_rank, learner.mesh.sizes.dp, start_sample=0)
    with patch.object(expert, "_c10d", c10d):
        learner.gradients(next(loader)[:1], in_buffers=True)
    loader.close()
    return done


def test_shared_experts_are_computed_while_rows_travel(ranks):
    counts = ["begin", "end"]  # how many rows each expert gets
    there, back = ["begin", "shared", "end"], ["begin", "end"]
    for done in ranks(2, order_beside_shared_experts):
        assert done == [*counts, *there, *back, *back, *there]


def bytes_held(row: Row) -> tuple[int, int, int, int]:
    """Of this rank: experts, other parameters, optimizer state; and the parameters by estimate."""
    learner = learner_of(row)
    sizes: Counter[bool] = Counter()
    for name, parameter in learner.parameters.items():
        sizes[".experts." in name] += parameter.to_local().nbytes
    states = [t for p in learner.parameters.values() for t in learner.optimizer.state[p].values() if t.dim()]
    optimizer = sum(t.to_local().nbytes for t in states)
    estimate = estimate_memory(learner.config, learner.mesh.sizes, "cpu", learner.mesh)
    return sizes[True], sizes[False], optimizer, estimate.parameters


@pytest.mark.parametrize("name", ["EP 2, eager", "EP 2 x FSDP 2, eager", "EP 4, eager", "EP 2 x DDP 2, eager"])
def test_bytes_follow_the_formula(ranks, name):
    """Experts: all of their elements / (ep x expert_shard); the rest / (dp_shard x cp)."""
    row = ROWS_BY_NAME[name]
    config = load("parity.toml", row.run_overrides + row.overrides, row.ranks).config
    model, sizes = config.model, mesh_sizes(config, row.ranks)
    experts = 8 * 3 * model.n_experts * model.expert_dim * model.dim * (model.n_layers - model.n_dense_layers)
    others = 8 * parameter_count(model) - experts
    for held, other, optimizer, estimated in ranks(row.ranks, bytes_held, row):
        assert held == experts // (sizes.ep * sizes.expert_shard)
        assert other == others // sizes.fsdp_shard
        assert optimizer == 2 * (held + other)
        assert estimated == held + other


def saved_chunks(row: Row, folder: str) -> dict[str, tuple]:
    """Save this rank's state without any gather; returns where its shards of experts begin, by name."""

    def no_gather(*_: object, **__: object) -> None:
        raise AssertionError("a save gathers nothing")

    def gathers_names(outputs: list[Tensor], *arguments: object, **named: object) -> object:
        assert not outputs[0].is_floating_point(), "a save gathers nothing but the names of files"
        return all_gather(outputs, *arguments, **named)

    learner, all_gather = learner_of(row), dist.all_gather
    forbidden = ("all_gather_into_tensor", "all_gather_single", "all_to_all_single")
    with ExitStack() as stack:
        for owner, names in ((dist, forbidden), (DTensor, ("full_tensor", "redistribute"))):
            for name in names:
                if hasattr(owner, name):
                    stack.enter_context(patch.object(owner, name, no_gather))
        stack.enter_context(patch.object(dist, "all_gather", gathers_names))
        shards = shards_of(learner.state())
        write(FolderStorage(), Path(folder), shards, dist.group.WORLD, Plans())
    return {name: tuple(shard.offsets) for name, shard in shards.items() if ".experts." in name and shard.local.dim()}


@pytest.mark.parametrize("name", ["EP 2 x FSDP 2, eager", "EP 4, eager"])
def test_each_rank_writes_its_own_experts(ranks, name, tmp_path):
    assert_own_experts_written(ranks, ROWS_BY_NAME[name], tmp_path, {"gate_proj", "up_proj", "down_proj"})


def row_of_hf(folder: Path) -> Row:
    """EP 2 x FSDP 2 of a model of Hugging Face."""
    machine = {"mesh.dp_shard": 4, "mesh.ep": 2, "training.micro_batch_size": 1}
    return Row("EP 2 x FSDP 2", 4, words(machine), hf_words(write_config(folder / "config", "qwen3_moe")))


@pytest.mark.slow
@NEEDS_TRANSFORMERS
def test_each_rank_writes_its_own_experts_of_hugging_face(ranks, tmp_path):
    assert_own_experts_written(ranks, row_of_hf(tmp_path), tmp_path / "saved", {"gate_up_proj", "down_proj"})


@pytest.mark.slow
@NEEDS_TRANSFORMERS
def test_bytes_of_hugging_faces_experts(ranks, tmp_path):
    """Two layers of four experts with three matrices of 64 x 32, on four ranks."""
    for held, other, optimizer, estimated in ranks(4, bytes_held, row_of_hf(tmp_path)):
        assert held == 8 * 2 * 4 * 3 * 64 * 32 // 4
        assert optimizer == 2 * (held + other)
        assert estimated == held + other


def assert_own_experts_written(ranks, row: Row, folder: Path, matrices: set[str]) -> None:
    folder.mkdir(exist_ok=True)
    by_rank = ranks(row.ranks, saved_chunks, row, str(folder))
    metadata = read_metadata(folder)
    files = {(index.fqn, tuple(index.offset)): info.relative_path for index, info in metadata.storage_data.items()}
    names = set(by_rank[0])
    assert {n.rpartition(".")[2] for n in names} == {*matrices, "exp_avg", "exp_avg_sq"}
    for rank, offsets in enumerate(by_rank):
        for name, offset in offsets.items():
            assert files[name, offset].startswith(f"__{rank}_"), (name, offset)
    assert all(len({offsets[name] for offsets in by_rank}) == row.ranks for name in names)


# --------------------------------------------------------------------------- the same run


CHOSEN = [  # `scripts/parity.py --rows "*EP *"` runs all
    "EP 2, compiled",
    "EP 2 x FSDP 2, eager",
    "EP 4 over CP 2, eager",
]
MORE_OF_THEM = ["EP 2 x TP 2, eager", "EP 2 x PP 2, eager"]
MORE = {
    # name: (ranks, overrides of the run, overrides of the machine)
    "inf norm": (4, {"training.norm_type": "inf", "training.max_norm": 0.01}, {"mesh.ep": 2}),
    "full checkpointing, always reshard": (
        4,
        {},
        {"mesh.ep": 2, "activation_checkpoint.mode": "full", "fsdp.reshard_after_forward": "always"},
    ),
}
THE_REST = {
    "experts that the ranks cannot share": (4, {"model.n_experts": 6}, {"mesh.ep": 2}),
    "3-norm": (4, {"training.norm_type": 3.0}, {"mesh.ep": 2}),
    "ZeRO 1": (4, {}, {"mesh.ep": 2, "fsdp.zero_stage": 1}),
    "exchange kept": (
        4,
        {},
        {
            "mesh.ep": 2,
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.save_ops": '["aten.topk", "keel.grouped_mm", "keel.*_experts"]',
        },
    ),
    "zero-bubble": (4, {}, {"mesh.ep": 2, "mesh.pp": 2, "pipeline.schedule": "zero_bubble_v"}),
}


@pytest.mark.long
@pytest.mark.parametrize("names", [CHOSEN, MORE_OF_THEM], ids=["few", "more"])
def test_experts_apart_do_not_change_the_run(ranks, names):
    assert_parity(ranks, [ROWS_BY_NAME[name] for name in names])


@pytest.mark.long
@pytest.mark.parametrize("options", [MORE, THE_REST], ids=["few", "the rest"])
def test_other_options(ranks, options):
    rows = [
        Row(name, n_ranks, words({"training.micro_batch_size": 1} | machine), words(MOE | run))
        for name, (n_ranks, run, machine) in options.items()
    ]
    assert_parity(ranks, rows)
