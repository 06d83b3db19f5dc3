"""`training.reduction = "exact"`: every data-parallel mesh has the same bits, of losses, norms and weights.

In float32 or bfloat16, where any other order of a sum shows, with AdamW's small default eps, which amplifies it. The
whole table: `python scripts/parity.py --exact --dtype float32`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from configs.layout import mesh_sizes, parameter_count
from configs.load import load
from parallelisms.mesh import build_mesh
from parallelisms.torch_internals import has_zero_bubble
from scripts.parity import dtype_overrides
from scripts.parity_compare import bits
from scripts.parity_reference import batches
from scripts.parity_rows import words
from tests.distributed.test_moving_run import go_on
from tests.marked import marked
from trainer.step import build_learner

CONFIG = "parity.toml"
RUN: dict[str, object] = {"training.reduction": "exact", "training.steps": 8, "lr_schedule.total_steps": 8}
SMALL: dict[str, object] = {"model.dim": 32, "model.n_layers": 2, "model.ffn_dim": 72, "model.vocab_size": 200}
FOUR_LAYERS = {"model.n_layers": 4}
# 12 sequences a step on 1, 2, 3 and 6 ranks: trees that no power of two fills, and shards of uneven rows.
TWELVE = {"training.global_batch_size": 12, "model.ffn_dim": 70}
EXPERTS = {"model.n_experts": 8, "model.experts_per_token": 2, "model.n_shared_experts": 1}
EXPERTS |= {"model.n_dense_layers": 1, "model.expert_dim": 16, "model.router.auxiliary_loss_weight": 0.1}
COMPILED = {"compile.enable": "true", "training.steps": 4}
OWNER = {"fsdp.partition": "owner", "mesh.dp_shard": 1}
MUON = {"optimizer.name": "muon"}
NORMUON = MUON | {"optimizer.neuron_beta": 0.9}


@pytest.fixture(scope="module")
def sha(ranks: Callable) -> Callable[..., str]:
    """The digest of a run, which is the same on all of its ranks; each run is computed once."""
    known: dict[tuple[int, str, tuple[str, ...]], str] = {}

    def digest(n_ranks: int, overrides: Mapping[str, object], dtype: str = "float32") -> str:
        run = (n_ranks, dtype, words(RUN | SMALL | dict(overrides)))
        if run not in known:
            (known[run],) = set(ranks(n_ranks, bits, CONFIG, dtype_overrides(dtype) + run[2]))
        return known[run]

    return digest


@pytest.mark.slow
def test_ddp_and_fsdp_have_the_bits_of_one_rank(sha):
    one = sha(1, {})
    assert sha(2, {"mesh.dp_replicate": 2}) == one
    assert sha(2, {"mesh.dp_shard": 2}) == one
    assert sha(1, {"training.reduction": "fast"}) != one
    assert sha(1, {"training.micro_batch_size": 2}) != one


MESHES: dict[str, tuple[int, dict[str, object], dict[str, object], str]] = {
    # ranks, overrides of the machine, overrides of the run, dtype
    "FSDP 4": (4, {"mesh.dp_shard": 4}, {}, "float32"),
    "FSDP 8": (8, {"mesh.dp_shard": 8}, {}, "float32"),
    "HSDP 4x2": (8, {"mesh.dp_replicate": 4, "mesh.dp_shard": 2}, {}, "float32"),
    "HSDP 2x2, ZeRO 1": (4, {"mesh.dp_replicate": 2, "mesh.dp_shard": 2, "fsdp.zero_stage": 1}, {}, "float32"),
    "FSDP 2, ZeRO 2, full": (
        2,
        {"mesh.dp_shard": 2, "fsdp.zero_stage": 2, "activation_checkpoint.mode": "full"},
        {},
        "float32",
    ),
    "FSDP 2, selective": (2, {"mesh.dp_shard": 2, "activation_checkpoint.mode": "selective"}, {}, "float32"),
    "owner 4": (4, {"mesh.dp_replicate": 4, **OWNER}, {}, "float32"),
    "owner 2, Muon": (2, {"mesh.dp_replicate": 2, **OWNER}, MUON, "float32"),
    "FSDP 4, Muon": (4, {"mesh.dp_shard": 4}, MUON, "float32"),
    "PP 2 x FSDP 2, NorMuon": (4, {"mesh.pp": 2, "mesh.dp_shard": 2}, NORMUON | FOUR_LAYERS, "float32"),
    "HSDP 2x2, NorMuon": (4, {"mesh.dp_replicate": 2, "mesh.dp_shard": 2}, NORMUON, "float32"),
    "PP 2 x FSDP 2": (4, {"mesh.pp": 2, "mesh.dp_shard": 2}, FOUR_LAYERS, "float32"),
    "PP 2 x DDP 2, gpipe": (
        4,
        {"mesh.pp": 2, "mesh.dp_shard": 1, "mesh.dp_replicate": 2, "pipeline.schedule": "gpipe"},
        FOUR_LAYERS,
        "float32",
    ),
    "PP 2 interleaved": (2, {"mesh.pp": 2, "pipeline.schedule": "interleaved_1f1b"}, FOUR_LAYERS, "float32"),
    "PP 2 zero-bubble, bfloat16": (2, {"mesh.pp": 2, "pipeline.schedule": "zero_bubble_v"}, FOUR_LAYERS, "bfloat16"),
    "FSDP 3": (3, {"mesh.dp_shard": 3}, TWELVE, "float32"),
    "HSDP 2x3": (6, {"mesh.dp_replicate": 2, "mesh.dp_shard": 3}, TWELVE, "float32"),
    "HSDP 3x2": (6, {"mesh.dp_replicate": 3, "mesh.dp_shard": 2}, TWELVE, "float32"),
    "HSDP 2x2, bfloat16": (4, {"mesh.dp_replicate": 2, "mesh.dp_shard": 2}, {}, "bfloat16"),
    "PP 2, bfloat16": (2, {"mesh.pp": 2}, {}, "bfloat16"),
    "FSDP 2, all bfloat16": (
        2,
        {"mesh.dp_shard": 2},
        {"training.dtype": "bfloat16", "training.reduce_dtype": "bfloat16"},
        "bfloat16",
    ),
    "experts, FSDP 4": (4, {"mesh.dp_shard": 4}, EXPERTS, "float32"),
    "experts, DDP 2": (2, {"mesh.dp_replicate": 2}, EXPERTS, "float32"),
    "compiled, FSDP 2": (2, {"mesh.dp_shard": 2}, COMPILED, "float32"),
}


@pytest.mark.parametrize(
    "mesh",
    marked(
        MESHES,
        slow=[
            "FSDP 2, ZeRO 2, full",
            "owner 4",
            "owner 2, Muon",
            "FSDP 4, Muon",
            "PP 2 x FSDP 2, NorMuon",
            "HSDP 2x2, NorMuon",
            "PP 2 zero-bubble, bfloat16",
            "FSDP 3",
            "HSDP 2x2, bfloat16",
            "compiled, FSDP 2",
        ],
        # `parity.py --random` draws these meshes in each .ci/run, and one of each kind is slow.
        long=[
            "FSDP 4",
            "FSDP 8",
            "HSDP 4x2",
            "HSDP 2x2, ZeRO 1",
            "FSDP 2, selective",
            "PP 2 x FSDP 2",
            "PP 2 x DDP 2, gpipe",
            "PP 2 interleaved",
            "HSDP 2x3",
            "HSDP 3x2",
            "PP 2, bfloat16",
            "FSDP 2, all bfloat16",
            "experts, FSDP 4",
            "experts, DDP 2",
        ],
    ),
)
def test_other_meshes_have_the_bits_of_one_rank(sha, mesh):
    n_ranks, machine, run, dtype = MESHES[mesh]
    if machine.get("pipeline.schedule") == "zero_bubble_v" and not has_zero_bubble():
        pytest.skip("torch 2.11 has no zero-bubble schedule that works")
    assert sha(n_ranks, machine | run, dtype) == sha(1, run, dtype)


@pytest.mark.parametrize(
    ("machine", "run"),
    [
        pytest.param({"mesh.dp_shard": 2}, {}, id="FSDP 2", marks=pytest.mark.long),
        pytest.param({"mesh.pp": 2}, EXPERTS, id="PP 2, experts", marks=pytest.mark.slow),
        # Each of what follows is in one of these.
        pytest.param({"mesh.pp": 2}, {}, id="PP 2", marks=pytest.mark.long),
        pytest.param({"mesh.dp_replicate": 2, **OWNER}, {}, id="owner 2", marks=pytest.mark.long),
        pytest.param({"mesh.dp_shard": 2}, EXPERTS, id="FSDP 2, experts", marks=pytest.mark.long),
        pytest.param({"mesh.dp_replicate": 2, **OWNER}, EXPERTS, id="owner 2, experts", marks=pytest.mark.long),
    ],
)
def test_meshes_with_tensor_parallelism_have_the_bits_of_tensor_parallelism(sha, machine, run):
    """In bfloat16: the gradients of norms and routers are sums over the tensor-parallel ranks, too."""
    one = sha(2, run | {"mesh.tp": 2, "mesh.dp_shard": 1}, "bfloat16")
    assert sha(4, run | {"mesh.tp": 2, "mesh.dp_shard": 1} | machine, "bfloat16") == one


@pytest.mark.slow
def test_experts_with_owners_have_the_bits_of_experts_on_row_shards(sha):
    one = sha(2, EXPERTS | {"mesh.dp_shard": 2, "mesh.ep": 2})
    assert sha(2, EXPERTS | {"mesh.dp_replicate": 2, "mesh.ep": 2, **OWNER}) == one
    assert sha(4, EXPERTS | {"mesh.dp_replicate": 4, "mesh.ep": 2, **OWNER}) == one


@pytest.mark.slow
def test_experts_are_rounded_alike_with_one_owner_and_with_two(sha):
    run = EXPERTS | MUON | OWNER | {"mesh.ep": 2, "fsdp.owner_broadcast_dtype": "bfloat16"}
    alone = sha(2, run | {"mesh.dp_replicate": 2})
    assert sha(4, run | {"mesh.dp_replicate": 4}) == alone
    assert sha(2, run | {"mesh.dp_replicate": 2, "fsdp.owner_broadcast_dtype": "none"}) != alone


MOVES = [
    (4, {"mesh.dp_shard": 4}),
    (2, {"mesh.pp": 2}),
    (4, {"mesh.dp_replicate": 2, "mesh.dp_shard": 2, "fsdp.zero_stage": 1}),
    (2, {"mesh.dp_replicate": 2, **OWNER}),
]


@pytest.mark.slow
def test_a_run_that_moves_through_meshes_has_the_losses_of_one_that_stays(ranks, tmp_path):
    run = dtype_overrides("float32") + words(RUN | SMALL)
    (stayed,) = ranks(1, go_on, str(tmp_path / "stayed"), 2 * len(MOVES), run)
    moved: list[float] = []
    for n_ranks, mesh in MOVES:
        losses, *others = ranks(n_ranks, go_on, str(tmp_path / "moved"), len(moved) + 2, run + words(mesh))
        assert all(each == losses for each in others)
        moved += losses
    assert moved == stayed


@pytest.mark.slow
def test_a_rank_holds_partial_sums_of_its_shard(ranks):
    """Of 8 micro-batches, before the last: of 4, 2 and 1."""
    for n_ranks, mesh in ((1, {}), (2, {"mesh.dp_shard": 2}), (2, {"mesh.dp_replicate": 2})):
        batch = {"training.global_batch_size": 8 * n_ranks, "model.ffn_dim": 64}
        run = dtype_overrides("float32") + words(RUN | SMALL | batch | mesh)
        for held, shard in ranks(n_ranks, partial_sums, run):
            assert held == 3 * shard


def partial_sums(overrides: tuple[str, ...]) -> tuple[int, int]:
    """Elements of the partial sums when the last micro-batch's backward pass begins, and of this rank's share."""
    config = load(CONFIG, overrides, dist.get_world_size()).config
    sizes = mesh_sizes(config, dist.get_world_size())
    mesh = build_mesh(sizes, torch.device("cpu"))
    learner = build_learner(config, mesh)
    passes: Any = learner.passes
    held: list[int] = []

    def count(*_: object) -> None:
        reduction = passes.reduction
        all_sums = [*(group.sums for group in reduction._groups), *reduction._sums.values()]
        pending = [tensor for sums in all_sums for _, tensor in sums._pending]
        held.append(sum(tensor.untyped_storage().nbytes() // 4 for tensor in pending))

    passes.model.register_forward_hook(count)
    learner.gradients(next(iter(batches(config, mesh.dp_rank, sizes.dp))))
    return held[-1], parameter_count(config.model) // sizes.world_size
