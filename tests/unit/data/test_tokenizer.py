"""Tokenizers: exact round trips, what an id stands for in bytes, and errors that say what to do."""

import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece as spm
import tokenizers
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import ConfigError, UserError
from trainer.data import tokenizer as module
from trainer.data.tokenizer import encode_document, load_tokenizer, losses_of, train_sentencepiece

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


def test_names_of_marks_are_text_to_a_unigram_json_as_to_sentencepiece(tmp_path):
    """Its vocabulary has the marks among its pieces, as transformers' conversion of a SentencePiece model leaves it."""
    written = io.BytesIO()
    options = {"model_type": "unigram", "vocab_size": 60, "normalization_rule_name": "identity", "minloglevel": 2}
    rules = {"hard_vocab_limit": False, "remove_extra_whitespaces": False, "character_coverage": 1.0}
    lines = [line.strip() for text in CODE for line in text.splitlines()] + ["x < y / s > z"]
    spm.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=written, **options, **rules)
    reference = spm.SentencePieceProcessor(model_proto=written.getvalue())
    pieces = [(reference.id_to_piece(i), reference.get_score(i)) for i in range(len(reference))]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(split=False)
    model.decoder = tokenizers.decoders.Metaspace()
    model.add_special_tokens(["<unk>", "<s>", "</s>", "<more>"])
    model.add_tokens(["<br>"])
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    for text in ("<s>", "a</s>", "return </s> <s>", *lines):
        assert tokenizer.encode(text) == reference.encode(text), text
    assert 2 not in tokenizer.encode("a</s>")
    assert tokenizer.encode("<br>")[-1] == len(reference) + 1
    assert tokenizer.decode([1, *tokenizer.encode("a</s>"), 2]) == "a</s>"


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


def saved_with_added_tokens(path, special, plain):
    """Save a SentencePiece-like tokenizer.json with these added tokens, numbered in their order; returns it loaded."""
    names = [*special, *plain]
    vocab = {name: i for i, name in enumerate(names)} | {"\u2581a": len(names)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback()]
    model.decoder = tokenizers.decoders.Sequence(steps)
    model.add_special_tokens([*special])
    model.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in plain])
    model.save(str(path))
    return load_tokenizer(path)


@pytest.mark.parametrize(
    ("special", "plain", "marks"),
    [
        (("<pad>", "<eos>", "<bos>"), ("<s>", "</s>"), (2, 1)),  # Gemma, with tags of HTML
        (("<s>", "<|endoftext|>"), ("</s>",), (0, 1)),  # Phi-3
        (
            ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
            (),
            (0, 1),
        ),  # DeepSeek
        (("<pad>",), ("<s>", "</s>"), (1, 2)),
        (("<pad>",), (), (None, None)),
    ],
)
def test_marks_are_found_among_the_special_tokens_first(tmp_path, special, plain, marks):
    tokenizer = saved_with_added_tokens(tmp_path / "tokenizer.json", special, plain)
    assert (tokenizer.bos_id, tokenizer.eos_id) == marks


def test_added_tokens_have_the_bytes_of_the_text_that_they_decode_to(tmp_path):
    """Gemma adds runs of spaces, written as U+2581, and tags of HTML."""
    tokenizer = saved_with_added_tokens(tmp_path / "tokenizer.json", ("<bos>",), ("\u2581\u2581", "<s>", "<0x0A>"))
    decoded = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    assert decoded == ["", "  ", "<s>", "\n", " a"]
    assert tokenizer.token_bytes().tolist() == [len(text.encode()) for text in decoded]


def test_what_a_tokenizer_takes_from_texts_is_said(tmp_path, sentencepiece, byte_level):
    assert losses_of(sentencepiece) == losses_of(byte_level) == []
    path = tmp_path / "defaults.model"  # of SentencePiece: white space becomes a space
    training = {"sentence_iterator": iter(CODE), "model_prefix": str(path.with_suffix("")), "minloglevel": 2}
    spm.SentencePieceTrainer.train(**training, vocab_size=60, model_type="bpe", bos_id=-1, eos_id=-1)
    no_marks, no_lines = losses_of(load_tokenizer(path))
    assert "neither BOS nor EOS" in no_marks
    assert r"'a\n\n\tb  c' becomes 'a " in no_lines
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"known": 0}))  # it refuses other words
    words.save(str(tmp_path / "tokenizer.json"))
    assert losses_of(load_tokenizer(tmp_path / "tokenizer.json")) == [no_marks]


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
    [
        (["too little"], 4096, "too high"),
        (CODE, 200, "smaller than"),
        ([], 300, "0 bytes of text for .*: all documents are empty, or there are none"),
        (["", ""], 300, "0 bytes of text for .*: all documents are empty, or there are none"),
        (["text"], 10**12, "1,000,000,000,000 pieces; Keel trains one of up to 16,777,216"),
    ],
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


def test_ctrl_c_while_the_texts_are_read_is_no_mistake_of_theirs(tmp_path):
    def texts():
        yield "some text"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_sentencepiece(texts(), tmp_path / "t.model", 300)
    assert not any(tmp_path.iterdir())


def test_a_vocabulary_that_is_too_small_is_a_config_error_with_both_figures(model_path):
    with pytest.raises(ConfigError, match=rf"{VOCAB - 1}.*code.model.*{VOCAB}"):
        load_tokenizer(model_path, VOCAB - 1)
    assert load_tokenizer(model_path, VOCAB + 1).vocab_size == VOCAB  # a model may have rows that no text uses


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


def test_an_output_that_cannot_be_written_is_named_before_any_text_is_read(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder.model").mkdir()
    texts = iter(CODE)
    for output, reason in (("file/t.model", "Not a directory"), ("folder.model", "Is a directory")):
        with pytest.raises(UserError, match=rf"\.model: cannot write the tokenizer \({reason}\)"):
            train_sentencepiece(texts, tmp_path / output, VOCAB)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    with pytest.raises(UserError, match=r"t\.model: cannot write the tokenizer \(Permission denied\)"):
        train_sentencepiece(texts, tmp_path / "new" / "t.model", VOCAB)
    assert not (tmp_path / "new").exists()
    assert next(texts) == CODE[0]


@pytest.fixture
def json_values(byte_level):
    """The content of a tokenizer.json, to be changed."""
    return json.loads(byte_level._model.to_str())


def load_json(folder, values):
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return load_tokenizer(folder / "tokenizer.json")


TRUNCATION = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 512},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<|begin_of_text|>",
}
TWICE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    "settings_of_a_use",
    [
        {"truncation": TRUNCATION},
        {"truncation": TRUNCATION | {"stride": 99}},
        {"padding": PADDING},
        {"padding": PADDING | {"strategy": {"Fixed": 2**30}}},
        {"padding": PADDING | {"pad_to_multiple_of": 64, "strategy": "BatchLongest"}},
        {"post_processor": TWICE},
        {"truncation": TRUNCATION, "padding": PADDING, "post_processor": TWICE},
    ],
)
def test_what_a_file_says_of_truncation_padding_and_templates_is_not_done(
    tmp_path, byte_level, json_values, settings_of_a_use
):
    """A document of 400 characters and more, whole: files that were saved after a use with these have such blocks."""
    document = "def f(x):\n    return x\n" * 40
    tokenizer = load_json(tmp_path, json_values | settings_of_a_use)
    ids = encode_document(tokenizer, document)
    assert ids == encode_document(byte_level, document)
    assert tokenizer.decode(ids) == document
    loaded = tokenizer._model
    assert (loaded.truncation, loaded.padding, loaded.post_processor) == (None, None, None)


def times(n):
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * n}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [times(1000)] * 3}}, "1,000,000,000 times longer"),
        ({"decoder": {"type": "Sequence", "decoders": [times(1000)] * 3}}, "1,000,000,000 times longer"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}}, "ids go up to 4,294,967,295"),
        ({"model": None}, "not a tokenizer.json"),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(["}, "behavior": "Isolated", "invert": False}},
            "not a tokenizer.json",
        ),
    ],
)
def test_a_tokenizer_json_that_would_take_memory_or_time_without_end(tmp_path, json_values, change, reason):
    with pytest.raises(UserError, match=reason):
        load_json(tmp_path, json_values | change)


def test_a_tokenizer_json_that_never_ends(tmp_path):
    (tmp_path / "tokenizer.json").write_text("[" * 200_000)
    with pytest.raises(UserError, match="nested deeper"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_panic_of_the_package_is_a_message(tmp_path, byte_level, monkeypatch):
    """pyo3's PanicException derives from BaseException."""

    class PanicException(BaseException):
        pass

    class Model:
        def encode(self, *_, **__):
            raise PanicException("attempt to subtract with overflow")

    monkeypatch.setattr(byte_level, "_encoder", Model())
    with pytest.raises(UserError, match=r"can't encode a text .attempt to subtract"):
        byte_level.encode("x")


def test_a_sentencepiece_model_with_a_piece_that_is_no_text(tmp_path, model_path):
    content = model_path.read_bytes()
    piece = b"<0x41>"
    assert content.count(piece) == 1
    (tmp_path / "forged.model").write_bytes(content.replace(piece, b"\xff\xfe\x80\xc3(("))
    with pytest.raises(UserError, match="not a SentencePiece model"):
        load_tokenizer(tmp_path / "forged.model")
