"""Queues of gathers: they change when a computation waits, and no bit of what it computes."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from parallelisms.streams import separate_streams
from tests.conftest import ROOT
from tests.distributed.gathers import count_gathers
from trainer.data.loader import build_loader
from trainer.step import build_learner

PER_GROUP = ("--comm.streams", "per_group")
MODES = {  # overrides, and the seconds of a gather that queues
    "FSDP's own": ((), None),
    "per group": (PER_GROUP, None),
    "no prefetch": (("--comm.prefetch", "0"), None),
    "late": ((*PER_GROUP, "--comm.prefetch", "3"), 0.002),
    "one queue": ((), 0.0),
}
MESHES = {
    "FSDP 2": (2, ()),
    "HSDP 2x2": (4, ("--mesh.dp_replicate", "2")),
    "PP 2 x FSDP 2": (4, ("--mesh.pp", "2", "--fsdp.reshard_after_forward", "always")),
}


def train(words: tuple[str, ...], late: float | None) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and this rank's final weights of two steps; `late`: gathers queue, and take as long."""
    n_ranks = dist.get_world_size()
    config = load("parity.toml", words, n_ranks).config
    mesh = build_mesh(mesh_sizes(config, n_ranks), torch.device("cpu"))
    learner = build_learner(config, mesh)
    counts = None
    if late is not None:
        counts = count_gathers(learner.stages.values(), config.comm.streams, lambda _: late)
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    results = [learner.step(next(loader), lr=1e-3).result() for _ in range(2)]
    loader.close()
    weights = {name: p.to_local().detach().clone() for name, p in learner.parameters.items()}
    assert counts is None or counts.gathers > 0
    return [r.loss for r in results], [r.grad_norm for r in results], weights


def differences(words: tuple[str, ...]) -> list[str]:
    """Modes whose values are not those of the first, bit for bit."""
    runs = {mode: train((*words, *more), late) for mode, (more, late) in MODES.items()}
    losses, norms, weights = runs["FSDP's own"]
    return [
        mode
        for mode, (other_losses, other_norms, other_weights) in runs.items()
        if (losses, norms) != (other_losses, other_norms)
        or any(not torch.equal(weights[name], other_weights[name]) for name in weights)
    ]


@pytest.mark.slow
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
    counts = None
    if mode == "gpu":
        assert separate_streams(model) == 2
    elif mode != "torch":
        counts = count_gathers([model], mode, lambda dimension: 0.005 if dimension == "part" else 0.02)
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


@pytest.mark.slow
def test_a_group_does_not_wait_behind_another(ranks):
    stock, shared, per_group, streams = (ranks(4, two_meshes, m) for m in ("torch", "shared", "per_group", "gpu"))
    for expected, *others in zip(stock, shared, per_group, streams, strict=True):
        for losses, shards, *_ in others:
            assert losses == expected[0]
            assert torch.equal(shards, expected[1])
    assert all(gathers == again[2] for (_, _, gathers, *_), again in zip(shared, per_group, strict=True))
    assert all(behind >= 4 for *_, behind in shared)
    assert all(behind == 0 < waits for *_, waits, behind in per_group)


EXAMPLE = re.search(r"```python\n(import torch\n.*?)```", (ROOT / "docs/parallelism.md").read_text(), re.DOTALL)[1]
CALL = "streams = separate_streams(model)"


def run_example(code: str) -> tuple[float, list[torch.Tensor], int]:
    """The example of docs/parallelism.md: its last loss, this rank's weights and the number of streams."""
    space = {"streams": 0}
    torch.manual_seed(0)
    exec(code, space)
    return space["loss"].item(), [p.to_local().detach() for p in space["model"].parameters()], space["streams"]


def test_the_documented_example_computes_the_same_with_separate_streams(ranks):
    assert CALL in EXAMPLE
    stock, separate = (ranks(4, run_example, code) for code in (EXAMPLE.replace(CALL, "pass"), EXAMPLE))
    for (loss, weights, _), (other_loss, other_weights, n_streams) in zip(stock, separate, strict=True):
        assert n_streams == 2
        assert loss == other_loss
        assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"Sequential is no FSDP model; apply .*fully_shard"):
        separate_streams(model)
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(ValueError, match="Sequential is no FSDP model"):
        separate_streams(model)
    fully_shard(model, mesh=mesh)
    assert separate_streams(model) == 1  # nothing to separate
    with pytest.raises(ValueError, match="inside another FSDP model"):
        separate_streams(model[0])
    with torch.device("meta"):
        on_meta = nn.Linear(4, 4)
    fully_shard(on_meta, mesh=mesh)
    with pytest.raises(ValueError, match="weight is on the meta device"):
        separate_streams(on_meta)


def refused_twice() -> None:
    space = {}
    exec(EXAMPLE, space)
    with pytest.raises(ValueError, match="separate streams already"):
        separate_streams(space["model"])


def test_what_separate_streams_refuses(ranks):
    ranks(2, refusals)
    ranks(4, refused_twice)
