"""Queues of gathers: they change when a computation waits, and no bit of what it computes."""

import os
import time
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from configs.layout import mesh_sizes
from configs.load import load
from configs.schema import Comm, Simulate
from parallelisms.mesh import build_mesh
from parallelisms.streams import count_gathers, queue_gathers
from parallelisms.torch_internals import separate_streams
from scripts.benchmarks.overlap import measure, variants
from trainer.data.loader import build_loader
from trainer.step import build_learner

MODES = {
    "FSDP's own": (),
    "again": (),
    "per group": ("--comm.streams", "per_group"),
    "no prefetch": ("--comm.prefetch_forward", "0", "--comm.prefetch_backward", "0"),
    "late": ("--comm.streams", "per_group", "--comm.prefetch_forward", "3", "--comm.prefetch_backward", "2")
    + ("--comm.simulate.all_gather_milliseconds", "2", "--comm.simulate.reduce_scatter_milliseconds", "1"),
}
MESHES = {
    "FSDP 2": (2, ()),
    "HSDP 2x2": (4, ("--mesh.dp_replicate", "2")),
    "PP 2 x FSDP 2": (4, ("--mesh.pp", "2", "--fsdp.reshard_after_forward", "always")),
}


def train(words: tuple[str, ...], queues: bool = False) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and this rank's final weights of two steps; `queues`: gathers queue although no key asks for it."""
    n_ranks = dist.get_world_size()
    config = load("parity.toml", words, n_ranks).config
    mesh = build_mesh(mesh_sizes(config, n_ranks), torch.device("cpu"))
    learner = build_learner(config, mesh)
    counts = count_gathers(learner.stages.values(), config.comm) if queues else None
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    results = [learner.step(next(loader), lr=1e-3).result() for _ in range(2)]
    loader.close()
    weights = {name: p.to_local().detach().clone() for name, p in learner.parameters.items()}
    assert counts is None or counts.gathers > 0
    return [r.loss for r in results], [r.grad_norm for r in results], weights


def differences(words: tuple[str, ...]) -> list[str]:
    """Modes whose values are not those of the first, bit for bit."""
    runs = {mode: train((*words, *more)) for mode, more in MODES.items()}
    runs["one queue"] = train(words, queues=True)
    losses, norms, weights = runs["FSDP's own"]
    return [
        mode
        for mode, (other_losses, other_norms, other_weights) in runs.items()
        if (losses, norms) != (other_losses, other_norms)
        or any(not torch.equal(weights[name], other_weights[name]) for name in weights)
    ]


@pytest.mark.parametrize("name", MESHES)
def test_every_mode_computes_the_same_bits(ranks, name):
    n_ranks, words = MESHES[name]
    assert ranks(n_ranks, differences, words) == [[]] * n_ranks


class Layer(nn.Module):
    """A layer of which a part gathers over a mesh of its own, as experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = x + torch.tanh(self.dense(x))
        return x + torch.tanh(self.expert(x))


def two_meshes(mode: str) -> tuple[list[float], torch.Tensor, int, int, int]:
    """Losses, a shard of the weights and the counts of a model over two meshes."""
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "part"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)))
    for layer in model:
        fully_shard(layer.expert, mesh=part)
        fully_shard(layer, mesh=whole)
    fully_shard(model, mesh=whole)
    for this, after in zip(model, [*model[1:], None], strict=True):
        this.set_modules_to_forward_prefetch([after] * (after is not None))  # the part gathers behind it, and needs not
    delays = Simulate(all_gather_milliseconds=20, groups=[{"shards_over": "part", "all_gather_milliseconds": 5.0}])
    counts = None
    if mode == "gpu":
        assert separate_streams(model) == 2
    elif mode != "torch":
        counts = count_gathers([model], Comm(streams=mode, simulate=delays))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(3, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    shards = torch.cat([p.to_local().detach().flatten() for p in model.parameters() if isinstance(p, DTensor)])
    numbers = (counts.gathers, counts.waits, counts.waits_behind_others) if counts else (0, 0, 0)
    return losses, shards, *numbers


def test_a_group_does_not_wait_behind_another(ranks):
    stock, shared, per_group, streams = (ranks(4, two_meshes, m) for m in ("torch", "shared", "per_group", "gpu"))
    for expected, *others in zip(stock, shared, per_group, streams, strict=True):
        for losses, shards, *_ in others:
            assert losses == expected[0]
            assert torch.equal(shards, expected[1])
    assert all(gathers == again[2] for (_, _, gathers, *_), again in zip(shared, per_group, strict=True))
    assert all(behind >= 4 for *_, behind in shared)
    assert all(behind == 0 < waits for *_, waits, behind in per_group)


def seconds_of_gathers(words: tuple[str, ...]) -> float:
    """How long a block of a model waits for its gather, of which the FSDP group's dimension says how long it takes."""
    n_ranks = dist.get_world_size()
    words += ("--comm.simulate.all_gather_milliseconds", "20000")
    words += ("--comm.simulate.groups", "[{shards_over = 'shard', all_gather_milliseconds = 30.0}]")
    config = load("parity.toml", words, n_ranks).config
    learner = build_learner(config, build_mesh(mesh_sizes(config, n_ranks), torch.device("cpu")))
    block = cast(FSDPModule, learner.passes.model.layers["0"])
    start = time.monotonic()
    block.unshard()
    return time.monotonic() - start


@pytest.mark.parametrize(("n_ranks", "words"), [(2, ()), (4, ("--mesh.dp_replicate", "2"))])
def test_a_named_group_has_delays_of_its_own(ranks, n_ranks, words):
    assert all(0.03 <= seconds < 20 for seconds in ranks(n_ranks, seconds_of_gathers, words))


@pytest.mark.long
def test_overlap_is_measured(ranks):
    chosen = variants(milliseconds=20, depths=[0, 3])
    words = ["--fsdp.reshard_after_forward", "always"]
    rows = ranks(2, measure, "parity.toml", words, chosen, 2, torch.device("cpu"))[0]
    plain, guarded, exact, *late = rows
    names = ("shared, prefetch {}", "per_group, prefetch {}", "shared, prefetch {}, exact")
    assert [row["variant"] for row in late] == [name.format(depth) for depth in (0, 3) for name in names]
    # The embedding, four blocks and the head, for each of two directions and four micro-batches, behind no other group.
    assert {row["gathers"] for row in rows} == {6 * 2 * 4}
    assert {row["waits_behind_others"] for row in rows} == {0}
    for row in late:  # a queue has one gather after the other, however early they were issued
        assert min(row["seconds"]) > 48 * 0.02
    assert guarded["gathers"] == exact["gathers"] == plain["gathers"]


@pytest.mark.parametrize(("streams", "expected"), [("per_group", "1"), ("shared", None)])
def test_nccl_orders_the_kernels_of_queues_that_run_side_by_side(monkeypatch, streams, expected):
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "")  # so that it is taken back
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    queue_gathers([], Comm(streams=streams), torch.device("cuda"))
    assert os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == expected
