"""Token files: what goes in comes out, over file borders too; whatever is wrong with a file is said by name."""

import dataclasses
import errno
import os
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from trainer.data import token_file
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.token_file import BLOCK_BYTES, Header, TokenFile, TokenFolder

HASH = "0123456789abcdef0123456789abcdef"
VOCAB = 1000


def write(path, documents, vocab_size=VOCAB, tokenizer_hash=HASH):
    with TokenFileWriter(path, vocab_size, tokenizer_hash) as writer:
        for document in documents:
            writer.append(document)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def path(tmp_path):
    """A file of three documents, 45,000 tokens, two blocks."""
    rng = np.random.default_rng(0)
    write(tmp_path / "a.tokens", [rng.integers(0, VOCAB, 15_000) for _ in range(3)])
    return tmp_path / "a.tokens"


documents = st.lists(st.lists(st.integers(0, 99_999), min_size=1, max_size=9), max_size=5)


@settings(max_examples=60, deadline=None)
@given(files=st.lists(documents, min_size=1, max_size=4), data=st.data(), large=st.booleans())
def test_any_window_of_a_folder_is_that_of_the_joined_documents(tmp_path_factory, files, data, large):
    folder = tmp_path_factory.mktemp("folder")
    vocab_size = 100_000 if large else 65_536
    files = [[[t % vocab_size for t in document] for document in file] for file in files]
    for i, file in enumerate(files):
        write(folder / f"{i}.tokens", file, vocab_size)
    joined = [(t, i == 0) for file in files for document in file for i, t in enumerate(document)]
    if not joined:
        with pytest.raises(UserError, match="no tokens"):
            TokenFolder(folder, vocab_size)
        return
    read = TokenFolder(folder, vocab_size, HASH)
    assert read.n_tokens == len(joined)
    start = data.draw(st.integers(0, len(joined)))
    length = data.draw(st.integers(0, len(joined) - start))
    window = joined[start : start + length]
    tokens = read.read(start, length)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [t for t, _ in window]
    starts = read.document_starts(start, length)
    assert starts.dtype == np.int64
    assert starts.tolist() == [i for i, (_, is_start) in enumerate(window) if is_start]


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(65_536, 2), (65_537, 4)])
def test_the_bytes_are_those_of_the_documented_format(tmp_path, vocab_size, itemsize):
    path = tmp_path / "x.tokens"
    tokens = list(range(33_000))
    write(path, [tokens[:7], tokens[7:]], vocab_size)
    raw = path.read_bytes()
    magic, *numbers = struct.unpack_from("<8sIIQQQ", raw)
    assert (magic, numbers) == (b"KEELTOKN", [1, itemsize, vocab_size, 33_000, 2])
    assert raw[40:56].hex() == HASH
    assert raw[72:80] == xxhash.xxh3_64_digest(raw[:72])
    body = np.array(tokens, dtype=f"<u{itemsize}").tobytes()
    assert raw[80 : 80 + len(body)] == body
    tables = raw[80 + len(body) :]  # 33,000 tokens fill a multiple of 8
    sums = [xxhash.xxh3_64_intdigest(body[i : i + 65_536]) for i in range(0, len(body), 65_536)]
    assert struct.unpack(f"<{len(sums) + 2}Q", tables) == (*sums, 0, 7)
    assert raw[56:72] == xxhash.xxh3_128_digest(tables)


def test_windows_outside_the_folder_are_a_programming_error(path):
    folder = TokenFolder(path.parent, VOCAB)
    for start, length in [(-1, 5), (0, 45_001), (45_000, 1), (5, -1)]:
        with pytest.raises(IndexError):
            folder.read(start, length)


@pytest.mark.parametrize("document", [[], [0, VOCAB], [-1]])
def test_the_writer_refuses_what_is_no_document_and_leaves_nothing(tmp_path, document):
    with pytest.raises(ValueError, match="token"):
        write(tmp_path / "x.tokens", [[1, 2, 3], document])
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_and_an_empty_one(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.*prepare_data"):
        TokenFolder(tmp_path / "nowhere", VOCAB)
    (tmp_path / "notes.txt").write_text("no tokens")
    with pytest.raises(UserError, match=r"no tokens.*prepare_data"):
        TokenFolder(tmp_path, VOCAB)


def test_a_folder_that_may_not_be_read_is_not_said_to_be_empty(path, monkeypatch):
    def refuse(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(os, "listdir", refuse)  # not by chmod, which does not stop root
    with pytest.raises(PermissionError, match="Permission denied"):
        TokenFolder(path.parent, VOCAB)


@pytest.mark.parametrize("size", [0, 5, 40, 79, 80, 1000, 90_000])
def test_a_truncated_file_is_named(path, size):
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"a\.tokens: (truncated|not a token file)"):
        TokenFolder(path.parent, VOCAB)


def test_a_file_that_is_too_long_is_named(path):
    path.write_bytes(path.read_bytes() + bytes(8))
    with pytest.raises(UserError, match=r"a\.tokens: too long"):
        TokenFolder(path.parent, VOCAB)


def test_a_foreign_file_and_a_newer_version(path):
    good = path.read_bytes()
    path.write_bytes(b"PK\x03\x04" + good[4:])
    with pytest.raises(UserError, match=r"a\.tokens: not a token file"):
        TokenFolder(path.parent, VOCAB)
    newer = good[:8] + struct.pack("<I", 3) + good[12:72]
    path.write_bytes(newer + xxhash.xxh3_64_digest(newer) + good[80:])
    with pytest.raises(UserError, match=r"a\.tokens: version 3 .* reads versions 1 and 2"):
        TokenFolder(path.parent, VOCAB)


@pytest.mark.parametrize("at", [12, 20, 25, 33, 45, 60, 75])
def test_a_damaged_header_is_found(path, at):
    flip(path, at)
    with pytest.raises(UserError, match=r"a\.tokens: the header is damaged"):
        TokenFolder(path.parent, VOCAB)


def test_damaged_tables_are_found(path):
    for at in (-1, -30):
        flip(path, at)
        with pytest.raises(UserError, match=r"a\.tokens, at byte 90080: the tables .* are damaged"):
            TokenFolder(path.parent, VOCAB)
        flip(path, at)


def test_damaged_tokens_of_a_small_folder_are_found_when_it_is_opened(path):
    flip(path, 80 + BLOCK_BYTES + 5)
    with pytest.raises(UserError, match=rf"a\.tokens, at byte {80 + BLOCK_BYTES}: the tokens are damaged"):
        TokenFolder(path.parent, VOCAB)


def test_damaged_tokens_of_a_large_folder_are_found_when_first_touched(path, monkeypatch):
    expected = TokenFolder(path.parent, VOCAB).read(0, 45_000)
    flip(path, 80 + BLOCK_BYTES + 5)
    monkeypatch.setattr(token_file, "FULL_CHECK_BYTES", 0)
    folder = TokenFolder(path.parent, VOCAB)
    first_block = BLOCK_BYTES // 2
    assert (folder.read(0, first_block) == expected[:first_block]).all()
    for _ in range(2):  # a damaged block does not pass at the second touch
        with pytest.raises(UserError, match=rf"a\.tokens, at byte {80 + BLOCK_BYTES}"):
            folder.read(first_block - 1, 2)


def test_a_token_beyond_the_vocabulary_is_found(path):
    header, tokens = TokenFile(path).header, TokenFolder(path.parent, VOCAB).read(0, 45_000)
    first = int(np.flatnonzero(tokens >= 500)[0])
    path.write_bytes(dataclasses.replace(header, vocab_size=500).pack() + path.read_bytes()[80:])
    place = rf"at byte {80 + 2 * first}: token id {tokens[first]} is beyond .* of 500 \(token {first} of the file\)"
    with pytest.raises(UserError, match=place):
        TokenFolder(path.parent, 500)


def test_a_width_that_does_not_suit_the_vocabulary_is_found(path):
    raw = path.read_bytes()
    header = raw[:12] + struct.pack("<I", 4) + raw[16:72]
    with pytest.raises(UserError, match="4 bytes per token"):
        Header.unpack(header + xxhash.xxh3_64_digest(header), path)


def test_another_tokenizer_or_vocabulary_is_refused(path):
    with pytest.raises(UserError, match=r"a\.tokens.*1000 tokens.*job's only 999"):
        TokenFolder(path.parent, VOCAB - 1, HASH)
    assert TokenFolder(path.parent, VOCAB + 1, HASH).n_tokens  # a model may have rows that no text uses
    with pytest.raises(UserError, match=rf"a\.tokens.*another tokenizer.*{HASH}"):
        TokenFolder(path.parent, VOCAB, "f" * 32)
    write(path.with_name("b.tokens"), [[1]], tokenizer_hash="e" * 32)
    with pytest.raises(UserError, match=r"b\.tokens.*another tokenizer"):
        TokenFolder(path.parent, VOCAB)


def test_the_fingerprint_follows_the_content(path):
    folder = TokenFolder(path.parent, VOCAB)
    assert TokenFolder(path.parent, VOCAB).fingerprint == folder.fingerprint
    content = folder.read(0, folder.n_tokens)
    content[7] = (content[7] + 1) % VOCAB
    write(path, np.split(content, 3))
    assert TokenFolder(path.parent, VOCAB).fingerprint != folder.fingerprint


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "a.tokens").mkdir()
    with pytest.raises(UserError, match=r"a\.tokens: cannot be read"):
        TokenFolder(tmp_path, VOCAB)


def test_a_folder_above_the_token_files_is_told_where_they_are(tmp_path):
    (tmp_path / "train").mkdir()
    with TokenFileWriter(tmp_path / "train" / "a.tokens", 100, "ab" * 16) as writer:
        writer.append([1, 2, 3])
    with pytest.raises(UserError, match=r"no tokens in this folder .*; there are some in .*/train$"):
        TokenFolder(tmp_path, 100)
