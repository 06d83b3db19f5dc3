"""Tokenizers: exact round trips, what an id stands for in bytes, and errors that say what to do."""

import sys

import numpy as np
import pytest
import tokenizers
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import ConfigError, UserError
from trainer.data import tokenizer as module
from trainer.data.tokenizer import encode_document, load_tokenizer, train_sentencepiece

CODE = [
    "def f(x):\n    if x > 10:\n\t\treturn  {'a': 1234}\n\n\n    return None\r\n" * 20,
    "class A:\n    '''Größe, 漢字, 🙂'''\n        # deep  indent\n" * 20,
    "",
]
VOCAB = 340
code_like = st.text(st.sampled_from("abdef x(){}:\n\t\r  01\u2581é漢🙂\u00a0\u2028\x00") | st.characters(codec="utf-8"))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "code.model"
    train_sentencepiece(iter(CODE), path, VOCAB)
    return path


@pytest.fixture(scope="module")
def sentencepiece(model_path):
    return load_tokenizer(model_path, VOCAB)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A tokenizer.json in the manner of Llama 3: byte-level BPE, marks as special tokens."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    marks = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=marks, show_progress=False
    )
    model.train_from_iterator(CODE, trainer)
    path = tmp_path_factory.mktemp("json") / "tokenizer.json"
    model.save(str(path))
    return load_tokenizer(path, 300)


@pytest.mark.parametrize("name", ["sentencepiece", "byte_level"])
@settings(max_examples=150, deadline=None)
@given(text=code_like)
def test_decode_gives_back_the_text_and_token_bytes_add_up_to_it(name, sentencepiece, byte_level, text):
    tokenizer = {"sentencepiece": sentencepiece, "byte_level": byte_level}[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[np.array(ids, dtype=int)].sum() == len(text.encode())


def test_source_code_survives(sentencepiece):
    for text in CODE:
        assert sentencepiece.decode(sentencepiece.encode(text)) == text
    assert len(sentencepiece.encode("    return ")) <= 3  # indentation is one piece, not four


def test_marks_have_ids_and_no_bytes(sentencepiece, byte_level):
    assert (sentencepiece.bos_id, sentencepiece.eos_id) == (1, 2)
    assert (byte_level.bos_id, byte_level.eos_id) == (0, 1)
    for tokenizer in (sentencepiece, byte_level):
        lengths = tokenizer.token_bytes()
        assert lengths.dtype == np.int32
        assert lengths.shape == (tokenizer.vocab_size,)
        assert lengths[[tokenizer.bos_id, tokenizer.eos_id]].tolist() == [0, 0]
    assert sentencepiece.token_bytes()[3:259].tolist() == [1] * 256


def test_names_of_marks_in_a_text_are_text(sentencepiece, byte_level):
    for tokenizer, mark in ((sentencepiece, "</s>"), (byte_level, "<|end_of_text|>")):
        ids = tokenizer.encode(mark)
        assert tokenizer.eos_id not in ids
        assert tokenizer.decode(ids) == mark


def test_a_document_stands_between_its_marks(sentencepiece, monkeypatch):
    text = "one line\nand another\n" * 50 + "the end"
    whole = encode_document(sentencepiece, text)
    assert whole == [1, *sentencepiece.encode(text), 2]
    monkeypatch.setattr(module, "RUN_CHARACTERS", 100)
    in_runs = encode_document(sentencepiece, text)
    assert sentencepiece.decode(in_runs[1:-1]) == text
    assert encode_document(sentencepiece, "") == [1, 2]


def test_token_bytes_of_a_sentencepiece_like_json(tmp_path):
    vocab = {"<s>": 0, "<0x0A>": 1, "\u2581": 2, "\u2581é": 3, "ab": 4}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback()]
    model.decoder = tokenizers.decoders.Sequence(steps)
    model.add_special_tokens(["<s>"])
    model.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").token_bytes().tolist() == [0, 1, 1, 3, 2]


def test_a_decoder_that_does_not_tell_bytes_is_an_error(tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    model.decoder = tokenizers.decoders.WordPiece()
    model.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizer.json.*WordPiece"):
        load_tokenizer(tmp_path / "tokenizer.json").token_bytes()


def test_training_is_deterministic_and_hashed_by_content(model_path, sentencepiece, tmp_path):
    train_sentencepiece(iter(CODE), tmp_path / "again.model", VOCAB)
    assert (tmp_path / "again.model").read_bytes() == model_path.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["again.model"]
    assert sentencepiece.hash == xxhash.xxh3_128_hexdigest(model_path.read_bytes())


def test_no_document_is_too_long_to_be_learned_from(tmp_path):
    """SentencePiece's default leaves out texts of more than 4,192 bytes."""
    train_sentencepiece(iter(["zqzqzq " * 2000]), tmp_path / "long.model", 266)
    assert len(load_tokenizer(tmp_path / "long.model").encode("zqzqzq")) < 6


@pytest.mark.parametrize(
    ("texts", "vocab_size", "words"),
    [(["too little"], 4096, "too high"), (CODE, 200, "smaller than"), ([], 300, "0 bytes"), (["", ""], 300, "0 bytes")],
)
def test_text_that_does_not_suit_the_vocabulary_is_an_error(tmp_path, texts, vocab_size, words):
    with pytest.raises(UserError, match=words) as caught:
        train_sentencepiece(iter(texts), tmp_path / "x.model", vocab_size)
    assert "x.model" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_texts_stays_what_it_was(tmp_path):
    def texts():
        yield "some text"
        raise UserError("file.py: not UTF-8")

    with pytest.raises(UserError, match=r"^file.py: not UTF-8$"):
        train_sentencepiece(texts(), tmp_path / "x.model", 300)


def test_another_vocabulary_size_is_a_config_error_with_both_figures(model_path):
    with pytest.raises(ConfigError, match=rf"32000.*code.model.*{VOCAB}"):
        load_tokenizer(model_path, 32000)


@pytest.mark.parametrize("name", ["missing.model", "foreign.model", "foreign.json", "empty.model"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, name):
    if not name.startswith("missing"):
        (tmp_path / name).write_bytes(b"" if name.startswith("empty") else b"{}")
    with pytest.raises(UserError, match=name):
        load_tokenizer(tmp_path / name)


def test_a_missing_package_comes_with_the_install_command(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"tokenizer.json.*pip install tokenizers"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"t\.model: cannot write"):
        train_sentencepiece(iter(CODE), tmp_path / "file" / "t.model", VOCAB)
