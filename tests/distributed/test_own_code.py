"""Code of the user's own on meshes, against one process in plain PyTorch, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from configs.load import load
from models import build_model
from parallelisms.init import materialize
from scripts.parity_compare import STRAIGHT, Detour, compare
from scripts.parity_reference import Trajectory, batches, buffers_of, copied, reference
from tests.marked import marked
from tests.own_code import WORDS, write_files
from trainer.data.loader import IGNORED

BOUND = 1e-10
FSDP = ("--mesh.dp_shard", "2")
TP = ("--mesh.tp", "2")
PP = ("--mesh.pp", "2")
CP = ("--mesh.cp", "2")
STEPS = ("--training.steps", "3", "--training.micro_batch_size", "2")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job file beside the page's modules, which are found there."""
    folder = write_files(tmp_path_factory.mktemp("own"))
    (folder / "own.toml").write_text('base = "parity.toml"\n')
    return str(folder / "own.toml")


def assert_equal(ranks, n_ranks, job, tmp_path, mesh, words=WORDS, expected=reference, detour=STRAIGHT):
    """Train on a mesh, and compare losses, norms, first gradients and last weights with one process."""
    path = str(tmp_path / "reference.pt")
    ranks(1, expected, job, (*words, *STEPS), path)
    difference, *_ = ranks(n_ranks, compare, job, (*words, *STEPS, *mesh), path, detour)
    assert max(difference.values) < BOUND, difference
    assert difference.gradients
    assert difference.weights


MESHES = {
    "one rank": (1, ()),
    "FSDP 2": (2, FSDP),
    "TP 2": (2, TP),
    "PP 2": (2, PP),
    "CP 2": (2, CP),
    "FSDP 2 x TP 2": (4, (*FSDP, *TP)),
    "TP 2 x PP 2": (4, (*TP, *PP)),
    "interleaved stages": (2, (*PP, "--pipeline.schedule", "interleaved_1f1b")),
    "owner partition": (2, ("--fsdp.partition", "owner", "--mesh.dp_replicate", "2", "--mesh.dp_shard", "1")),
    "compiled": (2, (*FSDP, "--compile.enable", "true")),
    "compiled TP 2": (2, (*TP, "--compile.enable", "true", "--activation_checkpoint.mode", "selective")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", marked(MESHES, slow=["interleaved stages", "owner partition", "compiled"], long=["compiled TP 2"])
)
def test_a_model_of_ones_own_is_the_same_on_every_mesh(ranks, tmp_path, job, mesh):
    n_ranks, words = MESHES[mesh]
    assert_equal(ranks, n_ranks, job, tmp_path, words)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [FSDP, (*TP, *PP)])
def test_documents_are_separate_in_a_model_of_ones_own(ranks, tmp_path, job, mesh):
    documents = ("--data.document_mask", "true", "--data.sources.0.document_length", "8")
    assert_equal(ranks, 2 if mesh == FSDP else 4, job, tmp_path, mesh, (*WORDS, *documents))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(FSDP, TP), (TP, PP)])
def test_a_checkpoint_moves_to_another_mesh(ranks, tmp_path, job, first, then):
    (tmp_path / "state").mkdir()
    detour = Detour(move_at=2, overrides=(*WORDS, *STEPS, *then), folder=str(tmp_path / "state"))
    assert_equal(ranks, 2, job, tmp_path, first, detour=detour)


# --------------------------------------------------------------------------- mixtures of experts

MIXTURE = (*WORDS, "--model.architecture", "my_mixture:MixtureGPT2")
BOTH = (
    "--model.options.router.load_balance",
    "bias_and_auxiliary_loss",
    "--model.options.router.bias_update_rate",
    "0.1",
)
BATCH = (
    "--model.options.router.auxiliary_loss_over",
    "global_batch",
    "--model.options.router.auxiliary_loss_weight",
    "1.0",
)
EP = (*FSDP, "--mesh.ep", "2")
MIXTURES = {
    "EP 2": (2, (), EP),
    "EP 2, bias": (2, BOTH, EP),
    "FSDP 2, batch": (2, BATCH, FSDP),
    "TP 2, batch": (2, BATCH, TP),
    "TP 2, bias": (2, BOTH, TP),
    "PP 2, bias": (2, BOTH, PP),
    "CP 2, both": (2, BOTH, CP),
    "EP 2 x TP 2, batch": (4, BATCH, (*EP, *TP)),
    "EP 2 x PP 2, bias": (4, BOTH, (*EP, *PP)),
    "owner EP 2": (
        2,
        BATCH,
        ("--fsdp.partition", "owner", "--mesh.dp_replicate", "2", "--mesh.dp_shard", "1", *EP[2:]),
    ),
    "compiled EP 2": (2, BOTH, (*EP, "--compile.enable", "true", "--activation_checkpoint.mode", "full")),
}


@pytest.mark.parametrize("case", marked(MIXTURES, slow=[each for each in MIXTURES if each != "EP 2, bias"]))
def test_a_mixture_of_ones_own_is_the_same_on_every_mesh(ranks, tmp_path, job, case):
    """The auxiliary loss and the biases, too, which the reference computes by their formulas."""
    n_ranks, options, mesh = MIXTURES[case]
    assert_equal(ranks, n_ranks, job, tmp_path, mesh, (*MIXTURE, *options))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(EP, TP), (TP, PP), (PP, EP)])
def test_a_mixture_moves_to_another_mesh_with_its_balance(ranks, tmp_path, job, first, then):
    (tmp_path / "state").mkdir()
    words = (*MIXTURE, *BOTH, *BATCH)
    detour = Detour(move_at=2, overrides=(*words, *STEPS, *then), folder=str(tmp_path / "state"))
    assert_equal(ranks, 2, job, tmp_path, first, words, detour=detour)


# --------------------------------------------------------------------------- rule, schedule, loss, by their formulas

RULE = ("--optimizer.name", "my_rule:Momentum", "--optimizer.momentum", "0.8", "--optimizer.lr", "0.1")
SCHEDULE = ("--lr_schedule.name", "my_schedule:parabola", "--lr_schedule.warmup_steps", "1")
LOSS = ("--training.loss", "my_loss:with_z_loss")


def by_formulas(config_name, overrides, path):
    """Train in one process by formulas that share no code with the page's, and write the trajectory to `path`."""
    config = load(config_name, overrides, world_size=1).config
    with torch.device("meta"):
        model = build_model(config.model).double()
    materialize(model, torch.device("cpu"), config.training.seed)
    parameters = dict(model.named_parameters())
    has_rule = ":" in config.optimizer.name
    optimizer = torch.optim.AdamW(
        [
            {"params": [p], "weight_decay": config.optimizer.weight_decay if p.ndim > 1 else 0.0}
            for p in parameters.values()
        ],
        betas=tuple(config.optimizer.betas),
        eps=config.optimizer.eps,
    )
    if has_rule:
        optimizer = torch.optim.SGD(parameters.values(), momentum=0.8)
    found = Trajectory(initial=copied(parameters | buffers_of([model])), buffers=copied(buffers_of([model])))
    for step, micro_batches in enumerate(batches(config, 0, 1)):
        tokens = torch.cat([batch.tokens for batch in micro_batches])
        targets = torch.cat([batch.targets for batch in micro_batches])
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if ":" in config.training.loss:
            loss = loss + 1e-4 * logits.logsumexp(-1)[targets != IGNORED].square().mean()
        loss.backward()
        if step == 0:
            found.gradients = {name: p.grad.clone() for name, p in parameters.items()}
        found.norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), config.training.max_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr * rate(config.lr_schedule, step)
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
    found.weights = copied(parameters)
    torch.save(vars(found), path)


def rate(schedule, step):
    """Share of the peak learning rate, by the page's formula of the parabola; for the cosine, by the cosine's."""
    warmup, total = schedule.warmup_steps, schedule.total_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / (total - warmup)
    shape = (1 - progress) ** 2 if ":" in schedule.name else (1 + math.cos(math.pi * progress)) / 2
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "mesh"),
    [
        (RULE, FSDP),
        (SCHEDULE, FSDP),
        (LOSS, FSDP),
        (LOSS, TP),
        pytest.param((*RULE, *SCHEDULE, *LOSS), (*TP, *PP), marks=pytest.mark.slow),
        pytest.param(LOSS, (*PP, "--pipeline.schedule", "zero_bubble_v"), marks=pytest.mark.slow),
    ],
)
def test_code_of_ones_own_is_its_formula(ranks, tmp_path, job, words, mesh):
    assert_equal(ranks, 4 if mesh == (*TP, *PP) else 2, job, tmp_path, mesh, (*WORDS, *words), by_formulas)


@pytest.mark.slow
def test_the_native_model_takes_them_where_sequences_are_split(ranks, tmp_path, job):
    """Its head and its loss get slices of the sequence, and the loss needs the logits of all ranks."""
    assert_equal(ranks, 2, job, tmp_path, TP, (*RULE, *LOSS), by_formulas)


def test_a_rule_of_ones_own_moves_to_another_mesh(ranks, tmp_path, job):
    (tmp_path / "state").mkdir()
    detour = Detour(move_at=2, overrides=(*WORDS, *RULE, *STEPS, *TP), folder=str(tmp_path / "state"))
    assert_equal(ranks, 2, job, tmp_path, FSDP, (*WORDS, *RULE), by_formulas, detour)


# --------------------------------------------------------------------------- the page's model is GPT-2


def test_the_model_is_that_of_transformers(job):
    transformers = pytest.importorskip("transformers")
    config = load(job, WORDS, world_size=1).config
    with torch.device("meta"):
        model = build_model(config.model).double()
    materialize(model, torch.device("cpu"), seed=0)
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_inner": 64, "n_positions": 64, "vocab_size": 256}
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, tie_word_embeddings=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    ).double()
    state = {
        "transformer.wte.weight": model.tokens.weight,
        "transformer.wpe.weight": model.positions.weight,
        "transformer.ln_f.weight": model.norm.weight,
        "transformer.ln_f.bias": model.norm.bias,
        "lm_head.weight": model.head.weight,
    }
    for number, block in model.blocks.items():
        at = f"transformer.h.{number}"
        qkv = [block.attn.q, block.attn.k, block.attn.v]
        state |= {
            f"{at}.{name}.{kind}": getattr(getattr(block, name), kind)
            for name in ("ln_1", "ln_2")
            for kind in ("weight", "bias")
        }
        state[f"{at}.attn.c_attn.weight"] = torch.cat([each.weight for each in qkv]).T
        state[f"{at}.attn.c_attn.bias"] = torch.cat([each.bias for each in qkv])
        for name, ours in (("attn.c_proj", block.attn.out), ("mlp.c_fc", block.up), ("mlp.c_proj", block.down)):
            state[f"{at}.{name}.weight"] = ours.weight.T
            state[f"{at}.{name}.bias"] = ours.bias
    theirs.load_state_dict(state)
    tokens = torch.arange(2 * 32).view(2, 32) * 7 % 256
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-10, atol=1e-10)
