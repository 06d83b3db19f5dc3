"""Jobs with a class of torch optimizers: against the class alone in plain PyTorch, on meshes, and resumed."""

import pytest
import torch
import torch.nn.functional as F

from checkpoint.compare import compare as differences
from checkpoint.manifest import step_folder
from configs.load import load
from models import build_model
from parallelisms.init import materialize
from scripts.parity_compare import STRAIGHT, Detour, compare
from scripts.parity_reference import Trajectory, batches, buffers_of, copied
from tests.marked import marked
from tests.torture.resume import curve, go_on

STEPS = 24
BOUND = 1e-12
JOB = "parity.toml"
RUN = ("--training.steps", str(STEPS), "--model.dim", "32", "--model.n_layers", "2", "--model.ffn_dim", "48")
RUN += ("--model.vocab_size", "128", "--training.seq_len", "16", "--optimizer.eps", "1e-3", "--optimizer.lr", "2e-3")
RUN += ("--lr_schedule.name", "constant", "--lr_schedule.warmup_steps", "2", "--training.micro_batch_size", "2")
WORDS = {
    "Adamax": ("--optimizer.betas", "[0.8, 0.95]", "--optimizer.weight_decay", "0.01"),
    "NAdam": ("--optimizer.weight_decay", "0.2", "--optimizer.options.decoupled_weight_decay", "true"),
    "RMSprop": ("--optimizer.weight_decay", "0.01", "--optimizer.options.alpha", "0.9"),
}
ALONE = {
    "Adamax": {"betas": (0.8, 0.95), "eps": 1e-3},
    "NAdam": {"betas": (0.9, 0.95), "eps": 1e-3, "decoupled_weight_decay": True},
    "RMSprop": {"alpha": 0.9, "eps": 1e-3},
}
DECAY = {"Adamax": 0.01, "NAdam": 0.2, "RMSprop": 0.01}
FSDP = ("--mesh.dp_shard", "2")
TP = ("--mesh.tp", "2")
PP = ("--mesh.pp", "2")
OWNER = ("--fsdp.partition", "owner", "--mesh.dp_replicate", "2", "--mesh.dp_shard", "1")
MESHES = {
    "1 process": (1, ("--training.micro_batch_size", "8")),
    "FSDP 2": (2, FSDP),
    "TP 2": (2, TP),
    "PP 2": (2, PP),
    "owner 2": (2, OWNER),
}


def words_of(kind):
    return (*RUN, "--optimizer.name", f"torch.optim:{kind}", *WORDS[kind])


def by_the_class(kind, path):
    """Train in one process with the class itself, and write the trajectory to `path`."""
    config = load(JOB, words_of(kind), world_size=1).config
    with torch.device("meta"):
        model = build_model(config.model).double()
    materialize(model, torch.device("cpu"), config.training.seed)
    parameters = dict(model.named_parameters())
    groups = [{"params": [p], "weight_decay": DECAY[kind] if p.ndim > 1 else 0.0} for p in parameters.values()]
    optimizer = getattr(torch.optim, kind)(groups, **ALONE[kind])
    found = Trajectory(initial=copied(parameters | buffers_of([model])), buffers=copied(buffers_of([model])))
    for step, micro_batches in enumerate(batches(config, 0, 1)):
        tokens = torch.cat([batch.tokens for batch in micro_batches])
        targets = torch.cat([batch.targets for batch in micro_batches])
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        if step == 0:
            found.gradients = {name: p.grad.clone() for name, p in parameters.items()}
        found.norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), config.training.max_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 3)
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
    found.weights = copied(parameters)
    torch.save(vars(found), path)


def difference(ranks, tmp_path, kind, n, mesh, detour=STRAIGHT):
    path = str(tmp_path / "alone.pt")
    ranks(1, by_the_class, kind, path)
    found, *_ = ranks(n, compare, JOB, (*words_of(kind), *mesh), path, detour)
    assert found.gradients
    assert found.weights
    return found


CASES = {f"{kind}, {mesh}": (kind, *MESHES[mesh]) for kind in WORDS for mesh in MESHES}
QUICK = ("Adamax, 1 process", "NAdam, FSDP 2", "RMSprop, owner 2")


@pytest.mark.slow
@pytest.mark.parametrize("case", marked(CASES, slow=[case for case in CASES if case not in QUICK]))
def test_a_run_is_that_of_the_class_alone(ranks, tmp_path, case):
    kind, n, mesh = CASES[case]
    found = difference(ranks, tmp_path, kind, n, mesh)
    assert len(torch.load(tmp_path / "alone.pt")["losses"]) == STEPS
    assert max(found.values) < BOUND, found


MOVES = {"FSDP 2, to owner 2": (FSDP, OWNER), "TP 2, to PP 2": (TP, PP), "owner 2, to TP 2": (OWNER, TP)}


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES)
def test_a_run_moves_to_another_mesh(ranks, tmp_path, move):
    first, then = MOVES[move]
    (tmp_path / "state").mkdir()
    detour = Detour(move_at=5, overrides=(*words_of("NAdam"), *then), folder=str(tmp_path / "state"))
    assert max(difference(ranks, tmp_path, "NAdam", 2, first, detour).values) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("Adagrad", "--mesh.dp_shard 2"),
        ("NAdam", "--mesh.dp_replicate 2 --mesh.dp_shard 1 --fsdp.partition owner"),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(ranks, tmp_path, kind, mesh):
    words = tuple(f"{mesh} --optimizer.name torch.optim:{kind} --metrics.tensorboard false".split())
    for folder, stops in (("stopped", (2, 3, 6)), ("straight", (6,))):
        for stop in stops:
            ranks(2, go_on, str(tmp_path / folder), stop, words)
    stopped, straight = (step_folder(tmp_path / name / "checkpoints", 6) for name in ("stopped", "straight"))
    assert not list(differences(stopped, straight))
    assert curve(tmp_path / "stopped") == curve(tmp_path / "straight")
