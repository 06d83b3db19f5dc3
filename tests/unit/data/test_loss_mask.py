"""Loss masks: which tokens are learned follows from the markers, character by character, and reaches every target."""

import json
import re
import struct
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import UserError
from scripts.prepare_data import main as prepare_data
from tests.preparing import prepare
from tests.unit.data.test_loader import SEED, SEQ_LEN, VOCAB_SIZE, config
from trainer.data.lengths import Read
from trainer.data.loader import IGNORED, build_loader
from trainer.data.packing import PackedSource
from trainer.data.sources import PADDING, TokenSource, known
from trainer.data.text import prepare as preparing
from trainer.data.text.loss_mask import encode_masked, parts_of
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.token_file import TokenFolder
from trainer.data.tokenizer import encode_document, load_tokenizer, train_sentencepiece

UNTIL, AFTER = "<|bot|>", "<|end|>"


class Characters:
    """A tokenizer whose tokens are characters."""

    vocab_size = 256
    hash = "ab" * 16

    def __init__(self, bos_id=1, eos_id=2):
        self.bos_id = bos_id
        self.eos_id = eos_id

    def encode(self, text):
        return list(text.encode("latin-1"))


def learned(text, until, after):
    """For each character, and for the end of the text, whether it gives loss: by its definition, one at a time."""
    found, gives_loss, since = [], False, ""
    for character in text:
        found.append(gives_loss)
        since += character
        if since.endswith((after or "no marker") if gives_loss else until):
            gives_loss, since = not gives_loss, ""
    return [*found, gives_loss]


MARKERS = st.text("ab", min_size=1, max_size=3)


@given(st.text("abc", max_size=40), MARKERS, st.none() | MARKERS)
def test_parts_are_those_of_a_scan_by_character(text, until, after):
    parts = list(parts_of(text, until, after))
    assert "".join(part for part, _ in parts) == text
    flags = [gives_loss for part, gives_loss in parts for _ in part]
    assert [*flags, parts[-1][1]] == learned(text, until, after)


@given(
    st.text("abc", max_size=40), MARKERS, st.none() | MARKERS, st.sampled_from([None, 1]), st.sampled_from([None, 2])
)
def test_bos_gives_no_loss_and_eos_as_the_text_before_it(text, until, after, bos, eos):
    tokenizer = Characters(bos, eos)
    numbers = encode_masked(tokenizer, parts_of(text, until, after))
    assert (numbers >> 1).tolist() == encode_document(tokenizer, text)
    *flags, last = learned(text, until, after)
    expected = [False] * (bos is not None) + flags + [last] * (eos is not None)
    assert [number % 2 == 0 for number in numbers.tolist()] == expected


def write(path, documents, has_mask=True, vocab_size=VOCAB_SIZE, tokenizer_hash="ab" * 16):
    path.parent.mkdir(exist_ok=True)
    with TokenFileWriter(path, vocab_size, tokenizer_hash, has_mask) as writer:
        for document in documents:
            writer.append(document)


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(1 << 15, 2), ((1 << 15) + 1, 4)])
def test_the_mask_is_the_lowest_bit_of_the_documented_format(tmp_path, vocab_size, itemsize):
    ids, gives_none = [vocab_size - 1, 0, 7], [1, 0, 1]
    write(tmp_path / "a.tokens", [2 * np.array(ids) + gives_none], vocab_size=vocab_size)
    raw = (tmp_path / "a.tokens").read_bytes()
    assert struct.unpack_from("<II", raw, 8) == (2, itemsize)
    assert [n & 1 for n in struct.unpack_from(f"<3{'H' if itemsize == 2 else 'I'}", raw, 80)] == gives_none
    folder = TokenFolder(tmp_path, vocab_size)
    tokens, mask = folder.read_with_mask(0, 3)
    assert (tokens.tolist(), mask.tolist()) == (ids, [True, False, True])
    assert folder.read(1, 2).tolist() == ids[1:]
    with pytest.raises(ValueError, match="outside"), TokenFileWriter(tmp_path / "b.tokens", 5, "", True) as writer:
        writer.append([10])


def test_a_file_without_a_mask_beside_one_that_has_one(tmp_path):
    write(tmp_path / "a.tokens", [[1, 2, 3]], has_mask=False)
    write(tmp_path / "b.tokens", [[9, 8]])
    tokens, mask = TokenFolder(tmp_path, VOCAB_SIZE).read_with_mask(1, 4)
    assert tokens.tolist() == [2, 3, 4, 4]
    assert mask.tolist() == [False, False, True, False]


def test_another_mask_is_other_data_and_its_damage_is_found(tmp_path):
    for name, last in (("one", 8), ("other", 9)):
        write(tmp_path / name / "a.tokens", [[1, 2, last]])
    one, other = (TokenFolder(tmp_path / name, VOCAB_SIZE) for name in ("one", "other"))
    assert one.read(0, 3).tolist() == other.read(0, 3).tolist()
    assert one.fingerprint != other.fingerprint
    raw = bytearray((tmp_path / "one/a.tokens").read_bytes())
    raw[80] ^= 1
    (tmp_path / "one/a.tokens").write_bytes(raw)
    with pytest.raises(UserError, match="damaged"):
        TokenFolder(tmp_path / "one", VOCAB_SIZE)


# --------------------------------------------------------------------------- from text to targets


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Conversations of 0 to 3 answers, a tokenizer, and their folders: a stream and packed."""
    root = tmp_path_factory.mktemp("chats")
    dice = np.random.default_rng(0)
    words = ["".join(map(chr, dice.integers(97, 123, 3))) for _ in range(30)]
    texts = []
    for n_answers in dice.integers(0, 4, 120).tolist():
        asked = " ".join(dice.choice(words, dice.integers(1, 5)))
        turns = [f"{UNTIL}{' '.join(dice.choice(words, 3))}{AFTER}{dice.choice(words)}" for _ in range(n_answers)]
        texts.append(asked + "".join(turns))
    (root / "chats.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_sentencepiece(iter(texts), root / "tokenizer.model", VOCAB_SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "MIN_SHARD_BYTES", 2000)
        patch.setattr("trainer.data.text.documents.PIECE_BYTES", 2000)
        for name, more in (("stream", []), ("packed", ["--pack", str(SEQ_LEN)])):
            command = [str(root / "chats.jsonl"), "--output", str(root / name), "--processes", "1", *more]
            marks = ["--tokenizer", str(root / "tokenizer.model"), "--mask-until", UNTIL, "--mask-after", AFTER]
            assert prepare_data([*command, *marks]) == 0
    return root, texts


def documents_in(folder):
    """The tokens of each document of a folder, and which give loss."""
    tokens, mask = folder.read_with_mask(0, folder.n_tokens)
    cuts = folder.document_starts(0, folder.n_tokens)[1:]
    return [(a.tolist(), (~b).tolist()) for a, b in zip(np.split(tokens, cuts), np.split(mask, cuts), strict=True)]


def test_the_command_masks_what_stands_outside_of_answers(chats):
    root, texts = chats
    tokenizer = load_tokenizer(root / "tokenizer.model")
    folder = TokenFolder(root / "stream/train", VOCAB_SIZE)
    assert len(folder.files) > 1
    n_learned = n_without = 0
    for text, (tokens, with_loss) in zip(texts, documents_in(folder), strict=True):
        answers = re.findall(f"{re.escape(UNTIL)}(.*?{re.escape(AFTER)})", text)
        expected = [tokenizer.encode(answer) for answer in answers]
        assert [t for t, is_learned in zip(tokens, with_loss, strict=True) if is_learned] == list(
            chain.from_iterable(expected)
        )
        assert tokenizer.decode(tokens) == text
        n_learned += sum(with_loss)
        n_without += not answers
    record = json.loads((root / "stream/prepare.json").read_text())
    assert record["masked"] == {"train": {"tokens_with_loss": n_learned, "documents_without_loss": n_without}}
    assert 0 < n_without < len(texts)


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_bytes(chats, tmp_path, monkeypatch):
    root, _ = chats
    monkeypatch.setattr(preparing, "MIN_SHARD_BYTES", 2000)
    monkeypatch.setattr("trainer.data.text.documents.PIECE_BYTES", 2000)
    options = {"mask_until": UNTIL, "mask_after": AFTER, "processes": 2}
    prepare([str(root / "chats.jsonl")], tmp_path / "out", root / "tokenizer.model", **options)
    one, two = (sorted((at / "train").iterdir()) for at in (root / "stream", tmp_path / "out"))
    assert [file.read_bytes() for file in one] == [file.read_bytes() for file in two]


def test_the_command_says_the_counts_and_refuses_another_mask_for_the_same_folder(chats, capsys):
    root, _ = chats
    command = [str(root / "chats.jsonl"), "--output", str(root / "stream"), "--mask-until", UNTIL]
    command += ["--tokenizer", str(root / "tokenizer.model")]
    assert prepare_data([*command, "--mask-after", AFTER]) == 0
    said = " ".join(capsys.readouterr().out.split())
    counts = json.loads((root / "stream/prepare.json").read_text())["masked"]["train"]
    assert f"{counts['tokens_with_loss']:,} tokens (" in said
    assert f"give loss; {counts['documents_without_loss']} documents have no such token" in said
    assert prepare_data(command) == 1
    assert "mask_after" in capsys.readouterr().err


def test_a_folder_that_was_prepared_before_there_were_masks_is_the_same_without_one(chats, tmp_path, capsys):
    root, _ = chats
    command = [str(root / "chats.jsonl"), "--output", str(tmp_path / "out"), "--processes", "1"]
    command += ["--tokenizer", str(root / "tokenizer.model")]
    assert prepare_data(command) == 0
    record = json.loads((tmp_path / "out/prepare.json").read_text())
    assert "masked" not in record
    for key in ("mask_until", "mask_after"):
        del record["settings"][key]
    (tmp_path / "out/prepare.json").write_text(json.dumps(record))
    assert prepare_data(command) == 0
    assert "nothing was written" in " ".join(capsys.readouterr().out.split())
    assert not TokenFolder(tmp_path / "out/train", VOCAB_SIZE).has_mask


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("kind", ["stream", "packed"])
def test_every_target_is_the_next_token_or_none_as_the_mask_says(chats, kind, document_mask):
    """Each window of an epoch, against the folder's documents joined in plain lists."""
    root, _ = chats
    folder = TokenFolder(root / kind / "train", VOCAB_SIZE)
    documents = documents_in(folder)
    flat = [
        (token, gives_loss and not (document_mask and place == 0))
        for tokens, with_loss in documents
        for place, (token, gives_loss) in enumerate(zip(tokens, with_loss, strict=True))
    ]
    source = (PackedSource if kind == "packed" else TokenSource)("chats", folder, SEQ_LEN, SEED)
    sources = [{"name": "chats", "kind": "tokens", "path": str(root / kind / "train")}]
    job = config(root, 2, (), data={"sources": sources, "document_mask": document_mask})
    loader = build_loader(job, 0, 1, 0)
    seen = 0
    for _ in range(source.n_windows // 12):
        for batch in next(loader):
            for row, sample in enumerate(batch.samples):
                _, [(start, stop)] = source.reads(sample)
                expected = [token if gives_loss else IGNORED for token, gives_loss in flat[start + 1 : stop]]
                expected += [IGNORED] * (SEQ_LEN - len(expected))
                assert batch.targets[row].tolist() == expected
                assert batch.tokens[row].tolist()[: stop - start] == [token for token, _ in flat[start:stop]][:SEQ_LEN]
                seen += sum(target != IGNORED for target in expected)
    loader.close()
    assert 0 < seen < SEQ_LEN * source.n_windows


@pytest.mark.parametrize("document_mask", [False, True])
def test_windows_of_another_length_keep_the_mask(chats, document_mask):
    root, _ = chats
    folder = TokenFolder(root / "stream/train", VOCAB_SIZE)
    flat = [pair for tokens, with_loss in documents_in(folder) for pair in zip(tokens, with_loss, strict=True)]
    begins = set(folder.document_starts(0, folder.n_tokens).tolist())
    source = TokenSource("chats", folder, SEQ_LEN, SEED, earlier=[Read(24, 11)])
    n_several = 0
    for ordinal in range(11, 11 + source.lengths.n_rest):
        tokens = np.zeros(SEQ_LEN + 1, dtype=np.int64)
        starts = np.zeros(SEQ_LEN + 1, dtype=bool) if document_mask else None
        targets = source.read(int(source.addresses(np.array([ordinal]))[0]), tokens, starts)
        pieces = source.reads(ordinal)[1]
        places = [place for start, stop in pieces for place in range(start + 1, stop)]
        is_cut = [document_mask and place in begins for place in places]
        expected = [
            flat[place][0] if flat[place][1] and not cut else PADDING for place, cut in zip(places, is_cut, strict=True)
        ]
        assert np.where(targets < 0, PADDING, targets).tolist() == expected
        following = [PADDING if cut else flat[place][0] for place, cut in zip(places, is_cut, strict=True)]
        assert known(targets).tolist() == following
        n_several += len(pieces) > 1
    assert n_several


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mask-until", ""], "an empty text is everywhere"),
        (["--mask-after", "x"], "--mask-after does nothing without --mask-until"),
    ],
)
def test_options_without_effect_are_refused(chats, tmp_path, capsys, words, said):
    root, _ = chats
    command = [
        str(root / "chats.jsonl"),
        "--output",
        str(tmp_path / "out"),
        "--tokenizer",
        str(root / "tokenizer.model"),
    ]
    with pytest.raises(SystemExit):
        prepare_data([*command, *words])
    assert said in capsys.readouterr().err


def test_a_marker_that_never_occurs_is_refused_with_the_count(chats, tmp_path, capsys):
    root, texts = chats
    command = [
        str(root / "chats.jsonl"),
        "--output",
        str(tmp_path / "out"),
        "--tokenizer",
        str(root / "tokenizer.model"),
    ]
    assert prepare_data([*command, "--processes", "1", "--mask-until", "<|boat|>"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"no token of train would give loss: none of its {len(texts)} document(s) has a text behind" in said
    assert "'<|boat|>'" in said
    assert not (tmp_path / "out").exists()


def test_a_line_end_can_be_typed(chats, tmp_path):
    root, _ = chats
    (tmp_path / "a.txt").write_text("ask\nanswer")
    command = [str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--tokenizer", str(root / "tokenizer.model")]
    assert prepare_data([*command, "--processes", "1", "--mask-until", r"\n"]) == 0
    [(tokens, with_loss)] = documents_in(TokenFolder(tmp_path / "out/train", VOCAB_SIZE))
    tokenizer = load_tokenizer(root / "tokenizer.model")
    learned_ids = [token for token, is_learned in zip(tokens, with_loss, strict=True) if is_learned]
    assert learned_ids == [*tokenizer.encode("answer"), tokenizer.eos_id]
