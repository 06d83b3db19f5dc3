"""Validation by source: equal to a computation by hand from the text itself, at any mesh."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from configs.layout import mesh_sizes
from configs.load import load
from models import build_model
from parallelisms.mesh import build_mesh
from trainer.data.loader import build_loader
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.tokenizer import encode_document, load_tokenizer, train_sentencepiece
from trainer.step import build_learner
from trainer.validation import Validation, validate

VOCAB, SEQ_LEN, SEQUENCES = 320, 32, 8
SHARES = {"code": 0.75, "prose": 0.25}
TEXTS = {
    "code": "def main(argv):\n    return [str(x) for x in argv]\n\n\nclass A(dict):\n    'naïve 漢字 🙂'\n",
    "prose": "It was the best of times, it was the worst of times; the season of Light.\n",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A tokenizer, and for each source exactly the windows that a validation of SEQUENCES reads."""
    root = tmp_path_factory.mktemp("validation")
    train_sentencepiece(iter([text * 20 for text in TEXTS.values()]), root / "tokenizer.model", VOCAB)
    tokenizer = load_tokenizer(root / "tokenizer.model")
    for name, text in TEXTS.items():
        n_tokens, tokens = round(SHARES[name] * SEQUENCES) * SEQ_LEN + 1, []
        while len(tokens) < n_tokens:
            tokens += encode_document(tokenizer, text)
        (root / name).mkdir()
        with TokenFileWriter(root / name / "part.tokens", VOCAB, tokenizer.hash) as writer:
            writer.append(tokens[:n_tokens])
        torch.save(tokens[:n_tokens], root / f"{name}.pt")
    return root


def measure(words, root):
    """What a validation finds at the initial weights, and those weights if this is the only rank."""
    sources = ", ".join(
        f'{{name = "{name}", kind = "tokens", path = "{root / name}", weight = {share}}}'
        for name, share in SHARES.items()
    )
    words = (
        *("--validation.interval", "1", "--validation.sequences", str(SEQUENCES)),
        *("--validation.sources", f"[{sources}]", "--tokenizer.path", str(root / "tokenizer.model")),
        *("--model.vocab_size", str(VOCAB), "--training.seq_len", str(SEQ_LEN), *words),
    )
    config = load("parity.toml", words, dist.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    held_out = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0, validation=True)
    token_bytes = torch.from_numpy(load_tokenizer(root / "tokenizer.model").token_bytes())
    results = [validate(learner, held_out, token_bytes, lambda: False) for _ in range(2)]
    held_out.close()
    assert results[0] == results[1]
    if dist.get_world_size() > 1:
        return results[0], None, None
    return results[0], config, {name: p.detach().clone() for name, p in learner.parameters.items()}


def by_hand(config, weights, tokens, tokenizer):
    """Nats, tokens and bytes of text of all windows of a source: logits of the plain model, bytes of the text itself.

    Every token but the first is a target, so their text is the text that is predicted.
    """
    model = build_model(config.model).double()
    model.load_state_dict(weights, strict=False)
    nats = 0.0
    for start in range(0, len(tokens) - 1, SEQ_LEN):
        window = torch.tensor(tokens[start : start + SEQ_LEN + 1])
        with torch.no_grad():
            logits = model(window[None, :-1], loss=F.linear)[0]
        nats -= sum(logits[i].log_softmax(-1)[target].item() for i, target in enumerate(window[1:].tolist()))
    return nats, len(tokens) - 1, sum(len(_text(tokenizer, token)) for token in tokens[1:])


def _text(tokenizer, token):
    """The UTF-8 of a token: a byte piece's name says it, other pieces' text is decoded behind a letter."""
    piece = tokenizer._model.id_to_piece(token)
    if piece.startswith("<0x"):
        return bytes([int(piece[3:5], 16)])
    letter = tokenizer.encode("a")
    return tokenizer.decode([*letter, token]).encode()[1:]


def test_losses_and_bits_per_byte_are_those_computed_by_hand(ranks, data):
    result, config, weights = ranks(1, measure, (), data)[0]
    tokenizer = load_tokenizer(data / "tokenizer.model")
    sums = {name: by_hand(config, weights, torch.load(data / f"{name}.pt"), tokenizer) for name in SHARES}
    assert list(result.validation_by_source) == list(SHARES)
    for name, (nats, tokens, n_bytes) in sums.items():
        own = result.validation_by_source[name]
        assert own["loss"] == pytest.approx(nats / tokens, rel=1e-10)
        assert own["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-10)
        assert own["bits_per_byte"] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-10)
    nats, tokens, n_bytes = map(sum, zip(*sums.values(), strict=True))
    assert tokens == SEQUENCES * SEQ_LEN
    assert result.validation_loss == pytest.approx(nats / tokens, rel=1e-10)
    assert result.validation_bits_per_byte == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-10)
    weighted = sum(share * result.validation_by_source[name]["loss"] for name, share in SHARES.items())
    assert result.validation_loss == pytest.approx(weighted, rel=1e-10)


def measure_random_tokens(root):
    """What a validation on random tokens of a vocabulary that is padded finds."""
    words = (
        *("--validation.interval", "1", "--validation.sequences", str(SEQUENCES)),
        *("--validation.sources", '[{name = "noise", kind = "synthetic"}]'),
        *("--tokenizer.path", str(root / "tokenizer.model"), "--model.vocab_size", str(VOCAB + 64)),
    )
    config = load("parity.toml", words, 1).config
    mesh = build_mesh(mesh_sizes(config, 1), torch.device("cpu"))
    validation = Validation(config, mesh)
    result = validation.measure(build_learner(config, mesh), 1, lambda: False)
    validation.close()
    return result


def test_the_padding_of_a_vocabulary_has_no_text(ranks, data):
    (result,) = ranks(1, measure_random_tokens, data)
    assert result.validation_loss == pytest.approx(math.log(VOCAB + 64), rel=0.05)
    assert 0 < result.validation_bits_per_byte < math.inf


@pytest.mark.parametrize(
    ("n_ranks", "words"),
    [
        (2, ("--mesh.dp_shard", "2", "--training.micro_batch_size", "2")),
        (2, ("--mesh.tp", "2")),
        (2, ("--mesh.cp", "2")),
        (2, ("--mesh.pp", "2")),
        pytest.param(
            4, ("--mesh.dp_shard", "2", "--mesh.tp", "2", "--training.micro_batch_size", "4"), marks=pytest.mark.slow
        ),
    ],
    ids=["FSDP", "TP", "CP", "PP", "FSDP x TP"],
)
def test_every_mesh_finds_the_same(ranks, data, n_ranks, words):
    expected = ranks(1, measure, (), data)[0][0]
    for result, _, _ in ranks(n_ranks, measure, words, data):
        assert result.validation_loss == pytest.approx(expected.validation_loss, rel=1e-12)
        assert result.validation_perplexity == pytest.approx(expected.validation_perplexity, rel=1e-12)
        for name, own in expected.validation_by_source.items():
            assert result.validation_by_source[name] == pytest.approx(own, rel=1e-12), name
