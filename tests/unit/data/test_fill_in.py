"""Documents whose middle comes last: every part against the text that it came from, and the shares asked for."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError, UserError
from configs.load import load
from scripts.microscope.documents import Documents, occurrences
from scripts.prepare_data import main as prepare_data
from scripts.sampling.text import prompt_tokens
from scripts.train_tokenizer import main as train_tokenizer
from tests.preparing import call_of, prepare
from tests.unit.data.test_shares import content, small_parts
from trainer.data.text import finish
from trainer.data.text.fill_in import NAMES, encode_rearranged, fim_tokens
from trainer.data.text.shares import make_share
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.token_file import TokenFolder
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece

VOCAB_SIZE = 300
TEXTS = [f"def f{i}(x):\n    return x + {i}  # \N{SNOWMAN}\n" * (1 + i % 3) for i in range(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fim")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = ["--output", str(folder / "t.model"), "--vocab-size", str(VOCAB_SIZE), "--fim"]
    assert train_tokenizer([str(folder / "text.jsonl"), *words]) == 0
    train_sentencepiece(iter(TEXTS), folder / "plain.model", VOCAB_SIZE)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder / "t.model")


def read_back(tokenizer, ids):
    """A document's text in its own order, whether it was rearranged, and whether the suffix came first."""
    own = fim_tokens(tokenizer)
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    ids = ids[1:-1]
    if own.middle not in ids:
        assert not {*own} & {*ids}
        return tokenizer.decode(ids), False, False
    assert ids[0] == own.prefix
    assert [ids.count(token) for token in own] == [1, 1, 1]
    at_suffix, at_middle = ids.index(own.suffix), ids.index(own.middle)
    before, suffix, after = (
        tokenizer.decode(part) for part in (ids[1:at_suffix], ids[at_suffix + 1 : at_middle], ids[at_middle + 1 :])
    )
    return before + after + suffix, True, at_suffix == 1


def test_a_trained_tokenizer_has_the_tokens_and_text_never_becomes_one(tokenizer):
    own = fim_tokens(tokenizer)
    assert [*own] == [3, 4, 5]
    for name in NAMES[0]:
        assert not {*own} & {*tokenizer.encode(name)}
        assert tokenizer.decode(tokenizer.encode(name)) == name
    assert tokenizer.decode([*own]) == ""
    assert not tokenizer.token_bytes()[[*own]].any()


@given(text=st.text(min_size=1), rate=st.sampled_from([1.0, 0.5]), suffix_first=st.sampled_from([0.0, 0.5, 1.0]))
def test_every_document_has_its_whole_text(tokenizer, text, rate, suffix_first):
    ids = encode_rearranged(tokenizer, fim_tokens(tokenizer), text, rate, suffix_first)
    found, is_rearranged, _ = read_back(tokenizer, ids)
    assert found == text
    assert is_rearranged or rate < 1


def test_shares_and_cuts_are_those_asked_for(tokenizer):
    own = fim_tokens(tokenizer)
    texts = [f"{i:04}" * 25 for i in range(4000)]
    found = [read_back(tokenizer, encode_rearranged(tokenizer, own, text, 0.7, 0.25)) for text in texts]
    assert [text for text, *_ in found] == texts
    assert np.mean([is_rearranged for _, is_rearranged, _ in found]) == pytest.approx(0.7, abs=0.03)
    assert np.mean([first for _, is_rearranged, first in found if is_rearranged]) == pytest.approx(0.25, abs=0.03)
    prefixes = []
    for text in texts:
        ids = encode_rearranged(tokenizer, own, text, 0.5, 0.0)
        if own.suffix in ids:
            prefixes.append(len(tokenizer.decode(ids[: ids.index(own.suffix)])))
    # The smaller of two uniform cuts of 100 characters.
    assert np.mean(prefixes) == pytest.approx(100 / 3, abs=1.5)
    assert (min(prefixes), max(prefixes) > 90) == (0, True)


def test_a_cut_may_be_at_either_end(tokenizer):
    own = fim_tokens(tokenizer)
    found = set()
    for character in map(chr, range(ord("!"), ord("~"))):
        ids = encode_rearranged(tokenizer, own, character, 1.0, 0.0)
        places = [ids.index(token) for token in own]
        found.add(tuple(place + 1 == stop for place, stop in zip(places, [*places[1:], len(ids) - 1], strict=True)))
    assert found == {(False, True, True), (True, False, True), (True, True, False)}


@pytest.mark.parametrize(("rate", "share"), [(None, 0.5), (0.0, 0.0), (1.0, 1.0)])
def test_half_have_the_suffix_first_unless_another_share_is_asked_for(folder, tmp_path, tokenizer, rate, share):
    words = [str(folder / "text.jsonl"), "--output", str(tmp_path / "out"), "--tokenizer", str(folder / "t.model")]
    words += ["--validation-fraction", "0", "--fim-rate", "1", "--processes", "1"]
    assert prepare_data([*words, *([] if rate is None else ["--fim-spm-rate", str(rate)])]) == 0
    found = [read_back(tokenizer, ids)[2] for ids in documents_in(TokenFolder(tmp_path / "out" / "train", VOCAB_SIZE))]
    assert np.mean(found) == pytest.approx(share, abs=0.1)  # an empty prefix reads alike


def test_the_least_vocabulary_includes_the_tokens(folder, tmp_path, capsys):
    words = ["--output", str(tmp_path / "t.model"), "--vocab-size", "260", "--fim"]
    assert train_tokenizer([str(folder / "text.jsonl"), *words]) == 1
    assert "another vocabulary size (at least 262 plus the characters" in capsys.readouterr().err


def test_a_gap_is_asked_for_as_it_was_read(tokenizer):
    """The prompt is the beginning of a document that was cut at the same places."""
    own = fim_tokens(tokenizer)
    ids = encode_rearranged(tokenizer, own, TEXTS[7], 1.0, 0.0)
    prefix, suffix = (
        tokenizer.decode(ids[ids.index(start) + 1 : ids.index(stop)])
        for start, stop in ((own.prefix, own.suffix), (own.suffix, own.middle))
    )
    assert prompt_tokens(tokenizer, prefix, suffix) == ids[: ids.index(own.middle) + 1]
    assert prompt_tokens(tokenizer, prefix, "")[-2:] == [own.suffix, own.middle]


@pytest.mark.parametrize("names", NAMES)
def test_a_tokenizer_json_has_them_by_their_usual_names(tmp_path, names):
    model = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    model.add_tokens([tokenizers.AddedToken(name, special=name != names[0]) for name in names])
    model.save(str(tmp_path / "tokenizer.json"))
    assert [*fim_tokens(load_tokenizer(tmp_path / "tokenizer.json"))] == [2, 3, 4]


def test_the_command_rearranges_what_is_for_training_and_says_how_many(folder, tmp_path, capsys):
    words = [str(folder / "text.jsonl"), "--output", str(tmp_path / "out"), "--tokenizer", str(folder / "t.model")]
    assert prepare_data([*words, "--validation-fraction", "0.3", "--fim-rate", "0.5", "--processes", "1"]) == 0
    tokenizer = load_tokenizer(folder / "t.model")
    found = {name: documents_in(TokenFolder(tmp_path / "out" / name, VOCAB_SIZE)) for name in ("train", "validation")}
    back = {name: [read_back(tokenizer, ids) for ids in documents] for name, documents in found.items()}
    assert sorted(text for each in back.values() for text, *_ in each) == sorted(TEXTS)
    assert not any(is_rearranged for _, is_rearranged, _ in back["validation"])
    rearranged = sum(is_rearranged for _, is_rearranged, _ in back["train"])
    assert rearranged / len(back["train"]) == pytest.approx(0.5, abs=0.1)
    assert f"rearranged: {rearranged} documents of train" in capsys.readouterr().out
    assert prepare_data([*words, "--validation-fraction", "0.3", "--fim-rate", "0.6", "--processes", "1"]) == 1
    assert "fim_rate: 0.5 then, 0.6 now" in capsys.readouterr().err


@pytest.mark.parametrize("suffix_first", [0.0, 1.0])
def test_a_text_is_found_where_a_cut_has_moved_it(tokenizer, tmp_path, suffix_first):
    """Whole, across a cut, or in one part; what a cut has put together is no text."""
    own = fim_tokens(tokenizer)
    texts = [f"{i:03} one two three four five six {i:03} seven eight nine ten eleven twelve {i:03}" for i in range(60)]
    with TokenFileWriter(tmp_path / "0.tokens", VOCAB_SIZE, tokenizer.hash) as writer:
        for text in texts:
            writer.append(encode_rearranged(tokenizer, own, text, 0.8, suffix_first))
    folder = TokenFolder(tmp_path, VOCAB_SIZE)
    documents = Documents(folder)
    spelled = 0
    for number, text in enumerate(texts):
        assert [document.number for document, *_ in occurrences(text, documents, tokenizer)] == [number]
        for document, start, stop in occurrences(text[:12], documents, tokenizer):
            assert document.start <= start < stop <= document.stop
            spelled += text[:12] in tokenizer.decode(folder.read(start, stop - start).tolist())
    assert spelled > 30
    decoded = [tokenizer.decode(ids) for ids in documents_in(folder)]
    new = {each[at : at + 9] for each in decoded for at in range(len(each) - 8)} - {
        text[at : at + 9] for text in texts for at in range(len(text) - 8)
    }
    assert new
    assert not any(list(occurrences(each, documents, tokenizer)) for each in sorted(new)[:20])


def test_texts_that_have_the_names_are_not_counted_as_rearranged(tmp_path, capsys):
    """To some tokenizers, such as Qwen-Coder's, the names are no special tokens: in a text they are the tokens, too."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    model.add_tokens([tokenizers.AddedToken(name, special=False) for name in NAMES[1]])
    model.save(str(tmp_path / "tokenizer.json"))
    texts = ["ab" * i + NAMES[1][2] + "b" for i in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--output", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "tokenizer.json"), "--processes", "1"]
    words += ["--validation-fraction", "0.5", "--fim-rate", "0.5"]
    assert prepare_data([str(tmp_path / "text.jsonl"), *words]) == 0
    tokens = TokenFolder(tmp_path / "out" / "train", 5)
    rearranged = int((tokens.read(0, tokens.n_tokens) == 2).sum())
    assert 0 < rearranged < 30
    assert f"rearranged: {rearranged} documents of train" in capsys.readouterr().out


def documents_in(folder):
    tokens = folder.read(0, folder.n_tokens)
    return [part.tolist() for part in np.split(tokens, folder.document_starts(0, folder.n_tokens)[1:])]


@pytest.mark.parametrize("pack", [None, 64])
def test_shards_give_the_same_bytes(folder, tmp_path, monkeypatch, pack):
    small_parts(monkeypatch)
    options = {"validation_fraction": 0.2, "fim_rate": 0.5, "fim_spm_rate": 0.9, "drop_duplicates": True, "pack": pack}
    inputs = [str(folder / "text.jsonl")]
    record = prepare(inputs, tmp_path / "one", folder / "t.model", **options)
    for number in range(3):
        make_share(call_of(inputs, tmp_path / "many", folder / "t.model", **options), number, 3)
    assert finish.finish(call_of(inputs, tmp_path / "many", folder / "t.model", **options)) == record
    assert content(tmp_path / "one") == content(tmp_path / "many")
    assert record["rearranged"] > 50


REFUSED = {
    "--fim-spm-rate 0.5": "--fim-spm-rate does nothing without --fim-rate",
    "--fim-rate 0.5 --mask-until x": "divide documents; leave one out",
    "--fim-rate 0.5 --prompt-key ask": "divide documents; leave one out",
    "--fim-rate 0": "argument --fim-rate: 0 is not above 0 and at most 1",
}


@pytest.mark.parametrize("words", REFUSED)
def test_the_command_refuses_what_has_no_meaning(folder, tmp_path, capsys, words):
    command = [str(folder / "text.jsonl"), "--output", str(tmp_path / "o"), "--tokenizer", str(folder / "t.model")]
    with pytest.raises(SystemExit):
        prepare_data([*command, *words.split()])
    assert REFUSED[words] in capsys.readouterr().err


def test_a_tokenizer_without_the_tokens_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"plain\.model: .* \(looked for: <fim_prefix> .* leave out fim_rate"):
        prepare([str(folder / "text.jsonl")], tmp_path / "out", folder / "plain.model", fim_rate=0.5)


@pytest.mark.parametrize("key", ["prompt_key", "mask_until"])
def test_a_job_refuses_it_with_a_loss_mask(key):
    prepare = ["--data.prepare.input", '["a"]', "--data.prepare.output", "b", "--data.prepare.fim_rate", "0.5"]
    with pytest.raises(ConfigError, match="fim_rate moves the middle of a whole document"):
        load("debug.toml", [*prepare, f"--data.prepare.{key}", "x"])
