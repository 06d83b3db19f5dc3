"""Masked targets on every mesh: the mean is over those left, also where a rank or a micro-batch has none."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from scripts.parity import run_rows
from scripts.parity_rows import BOUNDS, Row
from tests.marked import marked
from trainer.data.loader import IGNORED, build_loader
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece
from trainer.step import build_learner

VOCAB, SEQ_LEN = 512, 32
_ROWS = [
    Row("1 process", 1, ("--training.micro_batch_size", "2")),
    Row("FSDP 2, accumulation 4", 2, ("--mesh.dp_shard", "2")),
    Row("CP 2, ring", 2, ("--mesh.cp", "2", "--context.method", "ring", "--training.micro_batch_size", "2")),
    Row("PP 2", 2, ("--mesh.pp", "2")),
    Row("TP 2", 2, ("--mesh.tp", "2", "--training.micro_batch_size", "4")),
    Row("PP 2 x FSDP 2", 4, ("--mesh.pp", "2", "--mesh.dp_shard", "2")),
]
ROWS = {row.name: row for row in _ROWS}


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A folder with a third of its targets, in which a third of the windows has none; one without any target."""
    dice = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("masked")
    train_sentencepiece(iter([" ".join(map(str, range(2000)))]), root / "tokenizer.model", 270)
    tokenizer_hash = load_tokenizer(root / "tokenizer.model").hash
    for name in ("some", "none"):
        (root / name).mkdir()
        with TokenFileWriter(root / name / "a.tokens", VOCAB, tokenizer_hash, has_mask=True) as writer:
            for kind in dice.permutation([0, 0.5, 0.75, 1, 1] * 12):
                ids = dice.integers(0, VOCAB, SEQ_LEN)
                gives_none = (dice.random(SEQ_LEN) < kind) | (name == "none")
                writer.append(2 * ids + gives_none)
    return root


def run_words(root, name):
    source = f'[{{name = "masked", kind = "tokens", path = "{root / name}"}}]'
    words = ("--data.sources", source, "--training.steps", "3", "--training.z_loss_weight", "0.01")
    return *words, "--tokenizer.path", str(root / "tokenizer.model")


def test_the_data_have_micro_batches_without_a_target(masked):
    loader = build_loader(load("parity.toml", run_words(masked, "some")).config, 0, 1, 0)
    counts = [int((batch.targets != IGNORED).sum()) for _ in range(3) for batch in next(loader)]
    loader.close()
    assert counts.count(0) > 3
    assert any(0 < n < SEQ_LEN for n in counts)


def assert_parity(ranks, root, row, *words):
    class Pool:
        run = staticmethod(ranks)

    [(_, difference)] = run_rows(Pool(), "parity.toml", [row], (*run_words(root, "some"), *words))
    assert difference.passes("float64"), (row.name, difference, BOUNDS["float64"])


@pytest.mark.parametrize("name", marked(ROWS, slow=["1 process", "TP 2", "PP 2 x FSDP 2"]))
def test_losses_norms_gradients_and_weights_are_those_of_plain_pytorch(ranks, masked, name):
    assert_parity(ranks, masked, ROWS[name])


@pytest.mark.parametrize("name", marked(ROWS, slow=[name for name in ROWS if name != "CP 2, ring"]))
def test_modules_that_predict_further_tokens_see_those_that_give_no_loss(ranks, masked, name):
    assert_parity(ranks, masked, ROWS[name], "--model.multi_token", "{depth = 2, loss_weight = 0.5}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_same_with_separate_documents(ranks, masked, name):
    assert_parity(ranks, masked, ROWS[name], "--data.document_mask", "true")


def step_without_targets(words):
    """Loss, gradient norm and change of the weights of two steps on data without targets, and their initial size."""
    config = load("parity.toml", words, dist.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    before = {name: weight.clone() for name, weight in learner.state().items() if name.startswith("model.")}
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, 0)
    results = [learner.step(next(loader), lr=0.1).result() for _ in range(2)]
    loader.close()
    after = learner.state()
    change = {name: (after[name] - weight).abs().max().item() for name, weight in before.items()}
    return [(result.loss, result.grad_norm, result.skipped) for result in results], change


@pytest.mark.parametrize("mesh", [(), ("--mesh.dp_shard", "2"), ("--mesh.pp", "2")])
@pytest.mark.parametrize("decay", ["0.0", "0.1"])
def test_a_global_batch_without_any_target_has_loss_0_and_moves_weights_by_their_decay_only(ranks, masked, mesh, decay):
    words = (*run_words(masked, "none"), *mesh, "--optimizer.weight_decay", decay)
    for results, change in ranks(2 if mesh else 1, step_without_targets, words):
        assert [(loss, norm) for loss, norm, _ in results] == [(0.0, 0.0)] * 2
        assert bool(sum(change.values())) == (decay != "0.0")
