"""AdamW's stochastic rounding of moments, and of weights in bfloat16: no mesh changes it, nor does a stop."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Linear, Sequential

from checkpoint.compare import compare
from checkpoint.index import read_metadata
from checkpoint.manifest import read_manifest, step_folder
from checkpoint.tensor_stream import read_tensor
from parallelisms.part import part_of
from scripts.parity import dtype_overrides
from scripts.parity_compare import bits
from scripts.parity_rows import words
from tests.marked import marked
from tests.torture.resume import curve, go_on

EXACT = {"training.reduction": "exact", "training.steps": 8}
EXACT |= {"model.dim": 32, "model.n_layers": 2, "model.ffn_dim": 70, "model.vocab_size": 200}
ROUNDED: dict[str, dict[str, object]] = {
    "moments": {"optimizer.moments_dtype": "bfloat16"},
    "weights": {"training.dtype": "bfloat16", "optimizer.rounding": "stochastic"},
}
ROUNDED["weights by Muon"] = ROUNDED["weights"] | {"optimizer.name": "muon", "optimizer.neuron_beta": 0.9}
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "DDP 2": (2, {"mesh.dp_replicate": 2, "mesh.dp_shard": 1}),
    "FSDP 4, of uneven rows": (4, {"mesh.dp_shard": 4}),
    "HSDP 2x2": (4, {"mesh.dp_replicate": 2, "mesh.dp_shard": 2}),
    "owner 2": (2, {"mesh.dp_replicate": 2, "mesh.dp_shard": 1, "fsdp.partition": "owner"}),
    "PP 2": (2, {"mesh.pp": 2}),
}


def bits_of(ranks, n: int, overrides: dict[str, object]) -> set[str]:
    return set(ranks(n, bits, "parity.toml", dtype_overrides("float32") + words(EXACT | overrides)))


@pytest.fixture(scope="module")
def of_one_rank(ranks) -> Callable[[str], set[str]]:
    return cache(lambda what: bits_of(ranks, 1, ROUNDED[what]))


@pytest.mark.parametrize("what", marked(ROUNDED, slow=["weights by Muon"]))
@pytest.mark.parametrize("mesh", marked(MESHES, slow=["FSDP 4, of uneven rows", "HSDP 2x2", "PP 2"]))
def test_exact_runs_have_the_bits_of_one_rank(ranks, of_one_rank, mesh, what):
    n, overrides = MESHES[mesh]
    assert bits_of(ranks, n, ROUNDED[what] | overrides) == of_one_rank(what)


@pytest.mark.parametrize("what", marked(ROUNDED, slow=["weights by Muon"]))
def test_the_bits_are_not_those_of_other_rounding(ranks, of_one_rank, what):
    without = ("optimizer.moments_dtype", "optimizer.rounding")
    nearest = {key: value for key, value in ROUNDED[what].items() if key not in without}
    assert bits_of(ranks, 1, nearest) != of_one_rank(what)


def numbers_of_parts() -> None:
    """Each rank's parts of tensors that hold their elements' own numbers, however they are cut."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    cuts = {
        (8, 6): ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)]),
        (5, 4): ([Shard(0), Shard(1)],),
        (4, 6, 10): ([Shard(0), Shard(2)], [Shard(1), Shard(2)], [Shard(0), Shard(1)]),
        (3,): ([Shard(0), Shard(0)],),
    }
    for shape, placements in cuts.items():
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        for placement in placements if len(shape) > 1 else ():
            if placement == [Shard(0), Shard(0)]:
                continue  # nested as no technique nests them
            check(distribute_tensor(whole, mesh, placement))
        check(distribute_tensor(whole, mesh["a"], [Shard(0)]))
    model = Sequential(Linear(6, 10, bias=False), Linear(10, 7, bias=False))
    for layer, dimension in zip(model, (0, 1), strict=True):
        split = distribute_tensor(
            torch.arange(layer.weight.numel()).view_as(layer.weight).float(), mesh["b"], [Shard(dimension)]
        )
        layer.weight = torch.nn.Parameter(split)
    fully_shard(model, mesh=mesh["a"])  # strided shards: FSDP cuts what tensor parallelism has left
    for parameter in model.parameters():
        check(parameter.detach())
    stacked = torch.nn.Module()
    stacked.weight = torch.nn.Parameter(distribute_tensor(torch.arange(240.0).view(4, 6, 10), mesh["b"], [Shard(2)]))
    fully_shard(stacked, mesh=mesh["a"], shard_placement_fn=lambda _: Shard(1))
    check(stacked.weight.detach())
    assert part_of(stacked.weight).levels == 3


def check(tensor: DTensor) -> None:
    mine = tensor.to_local().flatten().long()
    assert torch.equal(part_of(tensor).numbers(0, len(mine), torch.device("cpu")), mine), tensor


def test_a_part_knows_its_elements_numbers_in_the_whole(ranks):
    ranks(4, numbers_of_parts)


RUN = "--training.dtype float32 --metrics.tensorboard false --training.micro_batch_size 1 --training.reduction exact"
WITH_MOMENTS = " ".join((RUN, *words(ROUNDED["moments"])))


def run_to(ranks, n, folder, step, words):
    ranks(n, go_on, str(folder), step, tuple(words.split()))
    return step_folder(folder / "checkpoints", step)


@pytest.mark.slow
@pytest.mark.parametrize("what", ROUNDED)
def test_a_run_that_moves_between_meshes_has_the_bits_of_one_that_stays(ranks, tmp_path, what):
    rounded = " ".join((RUN, *words(ROUNDED[what])))
    stays = run_to(ranks, 1, tmp_path / "stays", 6, rounded)
    moves = tmp_path / "moves"
    run_to(ranks, 2, moves, 2, rounded)
    run_to(ranks, 2, moves, 4, f"{rounded} --mesh.dp_replicate 2 --mesh.dp_shard 1 --fsdp.partition owner")
    assert not list(compare(run_to(ranks, 4, moves, 6, f"{rounded} --mesh.pp 2"), stays))
    assert curve(moves) == curve(tmp_path / "stays")
    moment = read_tensor(stays, read_metadata(stays), "optimizer.norm.weight.exp_avg")
    assert moment.dtype == torch.bfloat16
    assert moment.any()


@pytest.mark.slow
def test_moments_change_their_type_only_if_that_is_allowed(ranks, tmp_path):
    run_to(ranks, 1, tmp_path, 2, RUN)
    with pytest.raises(Exception, match=r"optimizer.moments_dtype: \"float32\" -> \"bfloat16\""):
        run_to(ranks, 1, tmp_path, 3, WITH_MOMENTS)
    for step, run, dtype in ((3, WITH_MOMENTS, torch.bfloat16), (4, RUN, torch.float32)):
        newest = run_to(ranks, 1, tmp_path, step, f"{run} --job.allow_run_change true")
        assert read_metadata(newest).state_dict_metadata["optimizer.norm.weight.exp_avg"].properties.dtype == dtype
        assert read_tensor(newest, read_metadata(newest), "optimizer.norm.weight.step") == step
    assert len(read_manifest(newest).run_changes) == 2


def matrices(checkpoint) -> list[str]:
    shapes = {name: entry.size for name, entry in read_metadata(checkpoint).state_dict_metadata.items()}
    return [name for name, shape in shapes.items() if name.startswith("model.layers") and len(shape) > 1]


SPLIT = {
    "TP 2": (2, "--mesh.tp 2"),
    "FSDP 2 x TP 2": (4, "--mesh.tp 2"),
    "owner 2 x TP 2": (4, "--mesh.dp_replicate 2 --mesh.dp_shard 1 --fsdp.partition owner --mesh.tp 2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weights_cut_by_columns_are_rounded_as_whole_ones(ranks, tmp_path, name):
    """All but a few, whose gradients differ in the last bit; other random bits would round a third in another way."""
    words = f"--training.dtype bfloat16 --optimizer.rounding stochastic --optimizer.name {name} --optimizer.lr 1e-4"
    words += " --metrics.tensorboard false --training.micro_batch_size 1 --lr_schedule.warmup_steps 0"
    alone = run_to(ranks, 1, tmp_path / "alone", 1, words)
    for mesh, (n, more) in SPLIT.items():
        split = run_to(ranks, n, tmp_path / mesh, 1, f"{words} {more}")
        for tensor in matrices(split):
            same = read_tensor(split, read_metadata(split), tensor) == read_tensor(alone, read_metadata(alone), tensor)
            assert same.double().mean() > 0.95, (mesh, tensor)


@pytest.mark.slow
def test_an_owner_rounds_its_experts_as_one_process_does(ranks, tmp_path):
    """All but a few, since the exchange of tokens may change a gradient's last bit."""
    experts = "--model.n_experts 4 --model.experts_per_token 2 --optimizer.lr 1e-4 --lr_schedule.warmup_steps 0"
    rounded = " ".join((RUN, *words(ROUNDED["weights by Muon"]), experts))
    owners = "--mesh.dp_replicate 2 --mesh.dp_shard 1 --mesh.ep 2 --fsdp.partition owner"
    alone = run_to(ranks, 1, tmp_path / "alone", 1, rounded)
    owned = run_to(ranks, 2, tmp_path / "owned", 1, f"{rounded} {owners}")
    for tensor in (name for name in matrices(owned) if ".experts." in name):
        same = read_tensor(owned, read_metadata(owned), tensor) == read_tensor(alone, read_metadata(alone), tensor)
        assert same.double().mean() > 0.95, tensor
