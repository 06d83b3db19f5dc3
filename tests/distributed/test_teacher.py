"""Learning from a teacher on any mesh, against plain PyTorch in one process: losses, norms, divergences and weights."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from checkpoint.manager import CheckpointManager
from checkpoint.reader import Description, Log
from configs.plan import plan_of
from configs.schema import Checkpoint, Distillation
from models import build_model
from parallelisms.init import materialize
from scripts.parity_compare import attention_that_compiles
from scripts.parity_options import DOCUMENTS as PARITY_DOCUMENTS
from scripts.parity_options import LATENT as PARITY_LATENT
from scripts.parity_options import MOE, OPTIONS
from scripts.parity_reference import _plain_optimizers
from scripts.parity_rows import words as words_of
from tests.distributed.test_owner_training import (
    FLOAT64,
    learner_of,
    owners,
    set_plain_lr,
    settings,
    weights,
)
from tests.marked import marked
from trainer.data.loader import build_loader
from trainer.distillation import Divergence, States
from trainer.loss import CrossEntropy
from trainer.lr_schedule import learning_rate

STEPS = 4
TEACHER = ("--model.dim", "48", "--model.n_layers", "6", "--model.n_heads", "4", "--training.seed", "5")
TAUGHT = ("--distillation.weight", "0.7", "--distillation.temperature", "1.7", "--training.z_loss_weight", "1e-3")
EXPERTS = words_of(MOE)
FURTHER = words_of(OPTIONS["further tokens"])
TIED = ("--model.tie_embeddings", "true")
WINDOW = ("--model.window", "9")
DOCUMENTS = words_of(PARITY_DOCUMENTS)
LATENT = words_of(PARITY_LATENT)


def write_teacher(words, folder):
    """Write a checkpoint of initial weights with larger logits than those have."""
    learner = learner_of(settings(words, FLOAT64))
    config = learner.config
    with torch.no_grad():
        for name, parameter in learner.parameters.items():
            parameter.mul_(20 if "lm_head" in name else 1)
    run = Description(config.model_dump(mode="json"), learner.mesh.sizes.axes)
    manager = CheckpointManager(folder, Checkpoint(mode="sync"), run, Log())
    manager.resume(learner.state())
    manager.begin_lineage()
    manager.save(3, learner.state(), {"tokens": 1})
    manager.close()


def run(words):
    """Each step's loss, norm and divergence, and the weights after the last, of a job."""
    with attention_that_compiles():
        return _run(words)


def _run(words):
    learner = learner_of(settings(words, FLOAT64))
    config, mesh = learner.config, learner.mesh
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    found = []
    for step, micro_batches in zip(range(STEPS), loader, strict=False):
        result = learner.step(micro_batches, learning_rate(config.lr_schedule, config.optimizer.lr, step)).result()
        found.append((result.loss, result.grad_norm, learner.measure()["distillation_loss"]))
    loader.close()
    return found, weights(learner)


def plain_model(config, seed):
    with torch.device("meta"):
        model = build_model(config.model).to(torch.float64)
    materialize(model, torch.device("cpu"), seed)
    return model


def by_plain_torch(words, teacher_words):
    """The same in one process with whole logits, `cross_entropy` and `kl_div`."""
    config = settings(words, FLOAT64)
    teacher = plain_model(settings(teacher_words, FLOAT64), seed=5)
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            parameter.mul_(20 if "lm_head" in name else 1)
    model = plain_model(config, config.training.seed)
    (optimizer,) = _plain_optimizers(config, dict(model.named_parameters()), plan_of(model))
    found = []
    table = config.distillation
    for step, micro_batches in zip(range(STEPS), build_loader(config, 0, 1, start_sample=0), strict=False):
        tokens, targets = (torch.cat([getattr(batch, key) for batch in micro_batches]) for key in ("tokens", "targets"))
        logits = model(tokens).flatten(0, 1)
        with torch.no_grad():
            taught = (teacher(tokens).flatten(0, 1) / table.temperature).log_softmax(-1)
        cool = (logits / table.temperature).log_softmax(-1)
        valid = targets.flatten() >= 0
        divergence = F.kl_div(cool[valid], taught[valid], reduction="batchmean", log_target=True)
        text = F.cross_entropy(logits, targets.flatten())
        z_loss = config.training.z_loss_weight * logits.logsumexp(-1)[valid].square().mean()
        (text * (1 - table.weight) + table.weight * table.temperature**2 * divergence + z_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        set_plain_lr(optimizer, config, step)
        optimizer.step()
        optimizer.zero_grad()
        found.append((text.item(), norm.item(), divergence.item()))
    return found, {name: parameter.detach() for name, parameter in model.named_parameters()}


MESHES = {
    "one rank": (1, ()),
    "FSDP 2, accumulation": (2, ("--training.micro_batch_size", "2")),
    "FSDP 4, never freed": (4, ("--fsdp.reshard_after_forward", "never")),
    "HSDP 2x2, compiled": (4, ("--mesh.dp_replicate", "2", "--compile.enable", "true")),
    "DDP 2": (2, ("--mesh.dp_replicate", "2")),
    "owner 2": (2, owners(2)),
    "TP 2 x FSDP 2": (4, ("--mesh.tp", "2")),
    "CP 2, ring, x TP 2": (4, ("--mesh.cp", "2", "--mesh.tp", "2", "--context.method", "ring")),
    "PP 2 x FSDP 2": (4, ("--mesh.pp", "2")),
    "PP 2 interleaved x TP 2": (
        4,
        ("--mesh.pp", "2", "--mesh.tp", "2", "--pipeline.schedule", "interleaved_1f1b"),
    ),
    "recomputed": (2, ("--activation_checkpoint.mode", "full")),
}


def compare(found, expected, tolerance=1e-10):
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
    for name, value in found[1].items():
        assert (value - expected[1][name]).abs().max() < 1e-9, name


@pytest.mark.parametrize("name", marked(MESHES, slow=set(MESHES) - {"FSDP 2, accumulation"}))
def test_a_teacher_on_any_mesh(ranks, tmp_path, name):
    n, mesh = MESHES[name]
    ranks(1, write_teacher, TEACHER, tmp_path)
    job = (*TAUGHT, "--distillation.teacher", str(tmp_path / "step-00000003"))
    (expected,) = ranks(1, by_plain_torch, job, TEACHER)
    assert expected[0][0][2] > 0.5  # the teacher says something else than the model
    for found in ranks(n, run, (*job, *mesh)):
        compare(found, expected)


DELTA = words_of(OPTIONS["delta"])
KINDS = {
    # name: (the model's words, the teacher's, ranks, the mesh's)
    "experts, EP 2 x FSDP 2": (EXPERTS, (), 4, ("--mesh.ep", "2")),
    "experts teach experts, EP 2 x TP 2": (EXPERTS, EXPERTS, 4, ("--mesh.ep", "2", "--mesh.tp", "2")),
    "experts teach, owner 2": ((), EXPERTS, 2, owners(2)),
    "further tokens of both, PP 2": (FURTHER, FURTHER, 2, ("--mesh.pp", "2")),
    "tied ends of both, PP 2 x FSDP 2": (TIED, TIED, 4, ("--mesh.pp", "2")),
    "states teach, documents, CP 2": (DOCUMENTS, DELTA, 2, ("--mesh.cp", "2")),
    "latents and windows, FSDP 3": (LATENT, WINDOW, 3, ("--training.global_batch_size", "6")),
    "gathers ahead of none": ((), FURTHER, 2, ("--comm.prefetch", "0", "--comm.streams", "per_group")),
    "ZeRO 1, full": (TIED, EXPERTS, 2, ("--fsdp.zero_stage", "1", "--activation_checkpoint.mode", "full")),
    "Muon, HSDP 2x2": (("--optimizer.name", "muon"), TIED, 4, ("--mesh.dp_replicate", "2")),
}


@pytest.mark.parametrize("name", marked(KINDS, slow=list(KINDS)[1:]))
def test_models_of_other_kinds(ranks, tmp_path, name):
    model, teacher, n, mesh = KINDS[name]
    ranks(1, write_teacher, (*TEACHER, *teacher), tmp_path)
    job = (*TAUGHT, *model, "--distillation.teacher", str(tmp_path / "step-00000003"))
    if "--training.global_batch_size" in mesh:
        job += mesh
    (expected,) = ranks(1, run, job)
    for found in ranks(n, run, (*job, *mesh)):
        compare(found, expected, tolerance=1e-9)


def gradients_with_heads(student_is_split, teacher_is_split):
    """Loss, divergence and gradients of a model's head, each of both heads split by rows or whole on both ranks."""
    generator = torch.Generator().manual_seed(1)
    sizes = {
        "hidden": (1, 7, 4),
        "weight": (10, 4),
        "bias": (10,),
        "taught": (1, 7, 3),
        "head": (10, 3),
        "beside": (10,),
    }
    made = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
    targets = torch.tensor([[1, 9, -100, 4, 5, 0, 7]])
    rows = slice(5 * dist.get_rank(), 5 * dist.get_rank() + 5)
    own, theirs = (rows if is_split else slice(None) for is_split in (student_is_split, teacher_is_split))
    seen = []
    states = States(
        made["taught"].flatten(0, 1),
        made["head"][theirs],
        made["beside"][theirs],
        softcap=3.0,
        group=dist.group.WORLD if teacher_is_split else None,
    )
    lesson = Divergence(states, Distillation(teacher="x", weight=0.3, temperature=1.5), seen.append)
    leaves = [made["hidden"], made["weight"][own].clone(), made["bias"][own].clone()]
    hidden, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    group = dist.group.WORLD if student_is_split else None
    loss = CrossEntropy(z_loss_weight=0.01)(hidden, weight, targets, group, bias, 2.0, lesson)
    loss.backward()
    if student_is_split:
        dist.all_reduce(hidden.grad)  # each rank has what flows through its rows
    return loss.detach(), seen[0], hidden.grad, *(gather_rows(each.grad, student_is_split) for each in (weight, bias))


def gather_rows(tensor, is_split):
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts) if is_split else tensor


@pytest.mark.parametrize("split", [(True, True), (True, False), (False, True)])
def test_heads_that_are_split_in_other_ways(ranks, split):
    (expected, _) = ranks(2, gradients_with_heads, False, False)
    for found in ranks(2, gradients_with_heads, *split):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
