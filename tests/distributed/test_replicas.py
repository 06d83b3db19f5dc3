"""Copies of a tensor on several ranks: found equal in healthy runs of every kind, and named where a bit has flipped."""

import re
import socket
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from checkpoint.manifest import steps_in
from configs.errors import UserError
from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.guards.replicas import differences
from parallelisms.mesh import build_mesh
from scripts.parity import dtype_overrides
from scripts.parity_rows import table
from tests.end_to_end.launch import TINY, assert_same_tensors, curve, records, tensors
from tests.marked import marked
from trainer.data.loader import build_loader
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.opening import Runtime
from trainer.report.console import Console
from trainer.report.metrics import TimeLedger
from trainer.step import Learner, build_learner
from trainer.trainer import Trainer

ROWS = {row.name: row for row in table()}
HEALTHY = {
    # row: what this rank has copies of, by the axes along which they are
    "DDP 2, none, eager, accumulation 1": {("replicas",): 117, ("tokens",): 39},
    "HSDP 2x2, none, eager, accumulation 1": {("replicas",): 117, ("tokens",): 39},
    "TP 2, none, eager, accumulation 1": {("tp",): 66},
    "owner 2 x TP 2, AdamW, eager": None,
    "EP 2 x DDP 2, eager": None,
    "owner 4 x EP 2, Muon, eager": None,
    "CP 2 x DDP 2, ring, eager": None,
    "PP 2 x DDP 2, none, eager, accumulation 1": None,
}
MORE_HEALTHY = [
    "DDP 2, none, compiled, accumulation 1",
    "TP 2, none, compiled, accumulation 1",
    "FSDP 2 x TP 2, none, compiled, accumulation 1",
    "ZeRO 1, HSDP 2x2, compiled",
    "HSDP 2x2 x TP 2, selective, eager",
    "EP 2 x FSDP 2 x TP 2, eager",
    "EP 2 x PP 2, eager",
    "EP 2 x CP 2, eager",
    "owner 2 x TP 2, Muon, compiled",
    "owner 2 x CP 2, AdamW, eager",
    "owner 2 x PP 2, AdamW, eager",
    "owner 4 x TP 2 x EP 2, Muon, eager",
    "PP 2 zero-bubble, none, eager, accumulation 1",
    "CP 2 x TP 2, all_to_all, eager, documents",
]
REDUCE_IN_FLOAT32 = ("--training.reduce_dtype", "float32")
PRECISIONS = {
    "float32": dtype_overrides("float32"),
    "bfloat16": ("--training.dtype", "float32", "--training.compute_dtype", "bfloat16", *REDUCE_IN_FLOAT32),
}


def learner_of(words, job="parity.toml"):
    torch._dynamo.reset()
    config = load(job, words, world_size=dist.get_world_size()).config
    return build_learner(config, build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu")))


def train(learner, steps):
    config, mesh = learner.config, learner.mesh
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    results = [learner.step(batches, 1e-2).result() for _, batches in zip(range(steps), loader, strict=False)]
    loader.close()
    return results


def healthy(words):
    """What differs after each of three steps, the axes of this rank's copies, and its losses and norms."""
    learner, found = learner_of(words), []
    results = []
    for _ in range(3):
        results += [(result.loss, result.grad_norm) for result in train(learner, 1)]
        found += [difference.name for difference in differences(learner.replicas())[0]]
    axes: dict[tuple[str, ...], int] = {}
    for copy in learner.replicas():
        axes[tuple(copy.axes)] = axes.get(tuple(copy.axes), 0) + 1
    return found, axes, results


def assert_healthy(ranks, name, precision, expected=None):
    row = ROWS[name]
    by_rank = ranks(row.ranks, healthy, (*PRECISIONS[precision], *row.overrides, *row.run_overrides))
    for found, axes, results in by_rank:
        assert not found
        assert axes, "there is nothing to compare on this mesh"
        assert expected in (None, axes)
        assert results == by_rank[0][2]  # what decides about skipping is the same on all ranks, bit for bit


@pytest.mark.parametrize(
    "name",
    marked(
        HEALTHY,
        slow=["owner 2 x TP 2, AdamW, eager", "CP 2 x DDP 2, ring, eager", "owner 4 x EP 2, Muon, eager"],
        long=["EP 2 x DDP 2, eager"],
    ),
)
def test_copies_stay_equal(ranks, name):
    assert_healthy(ranks, name, "float32", HEALTHY[name])


@pytest.mark.long
def test_copies_stay_equal_in_bfloat16(ranks):
    assert_healthy(ranks, "DDP 2, none, eager, accumulation 1", "bfloat16")
    assert_healthy(ranks, "FSDP 2 x TP 2, none, eager, accumulation 1", "bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MORE_HEALTHY)
def test_copies_stay_equal_on_more_meshes(ranks, name, precision):
    assert_healthy(ranks, name, precision)


# --------------------------------------------------------------------------- a flipped bit


def flip(tensor):
    """Flip the lowest bit of a tensor's last element on this rank, in place."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    local.view(-1)[-1:].view(torch.uint8)[0] ^= 1


def flipped(words, name, rank):
    """What is found after a bit has flipped: (name, part, sets of ranks), and the lines that say so."""
    learner = learner_of(words, TINY)
    train(learner, 1)
    if dist.get_rank() == rank:
        learner.finish_update()
        named = learner.state() | {f"model.{key}": p for key, p in learner.parameters.items()}
        flip(named[name])
    found, hosts = differences(learner.replicas())
    return [(d.name, d.part, d.holders) for d in found], [d.text(hosts) for d in found]


HERE = socket.gethostname()
OWNER = ("--fsdp.partition", "owner", "--mesh.dp_shard", "1")
MOE = ("--model.n_experts", "4", "--model.router.load_balance", "bias")
FLIPS = {
    # name: (ranks, words, tensor, rank, sets of ranks found)
    "norm, one of 2 replicas": (2, ("--mesh.dp_replicate", "2"), "model.norm.weight", 1, ((0,), (1,))),
    "norm, one of 4 replicas": (4, ("--mesh.dp_replicate", "4"), "model.norm.weight", 2, ((0, 1, 3), (2,))),
    "norm, one of 2 tp ranks": (2, ("--mesh.tp", "2"), "model.norm.weight", 0, ((0,), (1,))),
    "norm, of 2 replicas x 2 tp ranks": (
        4,
        ("--mesh.tp", "2", "--mesh.dp_replicate", "2"),
        "model.norm.weight",
        1,
        ((0, 2, 3), (1,)),
    ),
    "moment, of 2 replicas x 2 shards": (
        4,
        ("--mesh.dp_replicate", "2", "--mesh.dp_shard", "2"),
        "optimizer.layers.1.mlp.down_proj.weight.exp_avg_sq",
        3,
        ((1,), (3,)),
    ),
    "count of steps, of 2 shards": (2, (), "optimizer.norm.weight.step", 1, ((0,), (1,))),
    "an owner's parameter": (2, (*OWNER, "--mesh.dp_replicate", "2"), "model.embed_tokens.weight", 0, ((0,), (1,))),
    "experts of two owners": (
        4,
        (*OWNER, "--mesh.dp_replicate", "4", "--mesh.ep", "2", "--model.n_experts", "4"),
        "model.layers.0.mlp.experts.gate_proj",
        3,
        ((1,), (3,)),
    ),
    "a load balance's bias": (2, MOE, "model.layers.0.mlp.router.bias", 1, ((0,), (1,))),
}


@pytest.mark.parametrize("case", FLIPS)
def test_a_flipped_bit_is_named(ranks, case):
    n_ranks, words, name, rank, holders = FLIPS[case]
    by_rank = ranks(n_ranks, flipped, words, name, rank)
    [(found, part, sets)], [line] = by_rank[0]
    assert (found, sets) == (name, holders)
    assert part == {"moment, of 2 replicas x 2 shards": "shard 1", "experts of two owners": "ep 1"}.get(case, "")
    if len(holders[0]) > 1:
        assert line.startswith(f"{name}: rank {rank} ({HERE}) differs from rank {holders[0][0]} ({HERE}), rank ")
    else:
        assert line.endswith(f"rank {holders[0][0]} ({HERE}) from rank {holders[1][0]} ({HERE}); {CANT_TELL}")
    assert all(of_rank == by_rank[0] for of_rank in by_rank)


CANT_TELL = "without a majority, neither is known to be right"


# --------------------------------------------------------------------------- in a run


def run(folder, words, flip_after=0, odd_rank=-1, steps=12):
    """A run in which a bit of a norm flips after a step; returns its error's message and its incidents."""
    original, calls = Learner.update, []

    def update(learner, *arguments):
        original(learner, *arguments)
        calls.append(1)
        if len(calls) == flip_after and dist.get_rank() == odd_rank:
            flip(learner.parameters["norm.weight"])

    Learner.update = update
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    quiet = ("--metrics.tensorboard", "false", "--job.output_dir", str(folder), "--training.steps", str(steps))
    job = load(str(TINY), (*quiet, *words), dist.get_world_size())
    try:
        with Console(rank=1) as console, closing(Watchdog(folder, 600, print)) as watchdog:
            trainer = Trainer(Runtime(job, torch.device("cpu"), console, StopRequest(), TimeLedger(), watchdog))
            try:
                trainer.train()
                return "", trainer.run.incidents
            except UserError as error:
                return str(error), trainer.run.incidents
    finally:
        Learner.update = original


DDP_4 = ("--mesh.dp_replicate", "4", "--checkpoint.interval", "4")


@pytest.mark.slow
def test_a_run_ends_before_it_saves_what_differs_and_goes_on_from_before(ranks, tmp_path):
    """Compared only before a save, the flip after step 6 is met at step 8."""
    words = (*DDP_4, "--fault.compare_interval", "0", "--checkpoint.mode", "sync")
    for message, _ in ranks(4, run, str(tmp_path / "run"), words, 6, 3):
        assert re.search(r"differ after step 8:\n  model.norm.weight: rank 3 \(.*\) differs from rank 0 ", message)
        assert "Nothing was saved. The same command resumes from the checkpoint of step 4, when all" in message
    assert steps_in(tmp_path / "run" / "checkpoints") == [4]
    assert ranks(4, run, str(tmp_path / "run"), words)[0] == ("", [])
    ranks(4, run, str(tmp_path / "undisturbed"), words)
    assert curve(tmp_path / "run") == curve(tmp_path / "undisturbed")
    assert_same_tensors(tensors(tmp_path / "run", 12), tensors(tmp_path / "undisturbed", 12))


@pytest.mark.slow
def test_an_interval_finds_it_at_once_and_healing_is_recorded(ranks, tmp_path):
    """A copy repaired before the next forward pass leaves no trace but the record: the curve is the undisturbed one."""
    words = (*DDP_4, "--fault.compare_interval", "1", "--fault.on_difference", "heal")
    outcomes = ranks(4, run, str(tmp_path / "run"), words, 6, 3)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    message, [incident] = outcomes[0]
    assert not message
    assert (incident["step"], incident["what"]) == (6, "heal")
    assert incident["tensors"][0].startswith(f"model.norm.weight: rank 3 ({HERE}) differs from rank 0 ({HERE})")
    assert [record["incidents"] for record in records(tmp_path / "run") if "incidents" in record] == [[incident]]
    assert ranks(4, run, str(tmp_path / "run"), words, 0, -1, 13)[0][1] == [incident]
    ranks(4, run, str(tmp_path / "undisturbed"), words, 0, -1, 13)
    assert curve(tmp_path / "run") == curve(tmp_path / "undisturbed")
    assert_same_tensors(tensors(tmp_path / "run", 13), tensors(tmp_path / "undisturbed", 13))


@pytest.mark.slow
def test_of_two_copies_none_can_be_healed(ranks, tmp_path):
    words = ("--mesh.tp", "2", "--fault.compare_interval", "5", "--fault.on_difference", "heal")
    for message, incidents in ranks(2, run, str(tmp_path / "run"), words, 3, 1):
        assert 'after step 5 (fault.on_difference = "heal" needs more than half of the replicas to be equal)' in message
        assert CANT_TELL in message
        assert "There is no checkpoint yet" in message
        assert not incidents
    assert steps_in(tmp_path / "run" / "checkpoints") == []
