"""Token files: tokenized text on disk, read at random without being loaded.

A corpus is a folder of `*.tokens` files, which in name order form one long sequence of tokens (`TokenFolder`). A file
has a small header, the tokens as plain integers, a checksum for each block of them, and the offset of every document;
docs/data.md describes it byte by byte.

Everything read has been checked. Opening a folder verifies each header, the file's length and the tables behind the
tokens. The tokens themselves are verified at the same time if the folder is small (FULL_CHECK_BYTES), otherwise block
by block on first access: reading a terabyte before the first step would take hours, and a block takes a few
microseconds. A file that changes while a run reads it is an error as soon as it shows: as a read that ends early, an id
beyond the vocabulary, or, in `check_unchanged`, different content.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import xxhash

from configs.errors import UserError
from configs.schema import Data
from trainer.data.place import Content, LocalFile, Place, place_of

MAGIC = b"KEELTOKN"
VERSION = 1
MASK_VERSION = 2
"""The version of a file with a loss mask."""
SUFFIX = ".tokens"
BLOCK_BYTES = 1 << 16
"""Bytes of tokens under one checksum: at 7 GB/s, 10 microseconds on first access, and 0.01% of the file."""
FULL_CHECK_BYTES = 1 << 30
"""A folder with no more token bytes than this is fully verified when it is opened (at most 0.2 s)."""

_HEADER = struct.Struct("<8sIIQQQ16s16s")
HEADER_BYTES = _HEADER.size + 8  # its own xxh3_64 follows
_CHUNK_BYTES = 16 * BLOCK_BYTES
"""How much is read at once when a whole file is read."""
_EXPECTED_FILES = 16
"""How many files' tables are brought at once, if that takes long."""
_MARK_STRIDE = 512
"""Documents per offset kept in memory: one read of a few KB then finds a window's offsets."""
_REMEDY = "prepare it again with scripts/prepare_data.py, or copy it again"


@dataclass(frozen=True)
class Header:
    """The header of a token file."""

    vocab_size: int
    n_tokens: int
    n_documents: int
    tokenizer_hash: str
    """xxh3_128 of the tokenizer's file, in hex."""
    tables_hash: bytes
    """xxh3_128 of the block checksums and document offsets."""
    has_mask: bool = False
    """Whether a token is stored as 2 * id, plus 1 if it gives no loss as a target; otherwise it is stored as its id."""

    @property
    def limit(self) -> int:
        """The stored numbers are below it."""
        return 2 * self.vocab_size if self.has_mask else self.vocab_size

    @property
    def dtype(self) -> np.dtype:
        """Two bytes per token if its numbers allow it, otherwise four."""
        return np.dtype("<u2") if self.limit <= 1 << 16 else np.dtype("<u4")

    @property
    def n_blocks(self) -> int:
        """Number of blocks of tokens; the last may be short."""
        return -(-self.n_tokens * self.dtype.itemsize // BLOCK_BYTES)

    @property
    def tables_start(self) -> int:
        """Where the tables start in the file: after the tokens, at a multiple of 8."""
        return HEADER_BYTES + padded(self.n_tokens * self.dtype.itemsize)

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return self.tables_start + 8 * (self.n_blocks + self.n_documents)

    def pack(self) -> bytes:
        """The header's bytes in the file."""
        sizes = (self.dtype.itemsize, self.vocab_size, self.n_tokens, self.n_documents)
        version = MASK_VERSION if self.has_mask else VERSION
        packed = _HEADER.pack(MAGIC, version, *sizes, bytes.fromhex(self.tokenizer_hash), self.tables_hash)
        return packed + xxhash.xxh3_64_digest(packed)

    @classmethod
    def unpack(cls, raw: bytes, path: str | Path) -> "Header":
        """Parse the header of `path` from its first bytes.

        Raises:
            UserError: Keel can't read it; the message says why.
        """
        if not raw.startswith(MAGIC):
            raise UserError(f"{path}: not a token file of Keel (it does not begin with {MAGIC.decode()})")
        if len(raw) < HEADER_BYTES:
            raise UserError(f"{path}: truncated inside the header, at {len(raw)} bytes; {_REMEDY}")
        _, version, itemsize, vocab_size, n_tokens, n_documents, tokenizer_hash, tables = _HEADER.unpack_from(raw)
        if version not in (VERSION, MASK_VERSION):
            raise UserError(
                f"{path}: version {version} of the token file format; this Keel reads versions {VERSION} and "
                f"{MASK_VERSION}; use the Keel that wrote it"
            )
        if xxhash.xxh3_64_digest(raw[: _HEADER.size]) != raw[_HEADER.size : HEADER_BYTES]:
            raise UserError(f"{path}: the header is damaged (checksum mismatch); {_REMEDY}")
        header = cls(vocab_size, n_tokens, n_documents, tokenizer_hash.hex(), tables, version == MASK_VERSION)
        if itemsize != header.dtype.itemsize:
            raise UserError(f"{path}: {itemsize} bytes per token do not fit a vocabulary of {vocab_size}; {_REMEDY}")
        return header


class TokenFile:
    """One token file, open for reading."""

    def __init__(self, path: Path | Content, check_tables: bool = True) -> None:
        """Open `path` and verify its header, length and, unless `check_tables` is False, its tables.

        Raises:
            UserError: one of these is wrong, or the file can't be read.
        """
        self._content = LocalFile(path) if isinstance(path, Path) else path
        self.path = self._content.name
        try:
            self._stamp = self._content.stamp()
            self.header = Header.unpack(self._content.read(0, HEADER_BYTES), self.path)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror})") from None
        self._check_length(self._stamp.size)
        self.n_tokens = self.header.n_tokens
        self._verified = bytearray(self.header.n_blocks)
        if check_tables:
            self.check_tables()

    def expect_tables(self) -> None:
        """Have the beginning of the tables brought, which will be checked soon."""
        rest = self.header.file_bytes - self.header.tables_start
        self._content.expect(self.header.tables_start, min(rest, _CHUNK_BYTES))

    def check_tables(self) -> None:
        """Verify the tables behind the tokens; to be called before documents are asked for.

        Raises:
            UserError: they are damaged.
        """
        self._marks = self._verify_tables()

    def expect(self, start: int, length: int) -> None:
        """Have tokens [start, start + length) brought, which will be read soon."""
        itemsize = self.header.dtype.itemsize
        self._content.expect(HEADER_BYTES + start * itemsize, length * itemsize)

    def read(self, start: int, length: int) -> np.ndarray:
        """Read tokens [start, start + length) as they are stored, in the file's own dtype.

        Raises:
            UserError: they cannot be read, are damaged, or are not ids of the vocabulary; the message names the byte.
        """
        itemsize = self.header.dtype.itemsize
        tokens_per_block = BLOCK_BYTES // itemsize
        for block in range(start // tokens_per_block, -(-(start + length) // tokens_per_block)):
            if not self._verified[block]:
                self._verify_blocks(block, block + 1)
        at = HEADER_BYTES + start * itemsize
        numbers = np.frombuffer(self._bytes(at, length * itemsize), self.header.dtype)
        self._check_ids(numbers, start)  # again, since the file may have changed since the block was verified
        return numbers

    def document_starts(self, start: int, length: int) -> np.ndarray:
        """The first tokens of the documents that start in tokens [start, start + length): int64 indices, ascending."""
        window = np.array([start, start + length], dtype=np.uint64)  # any other dtype would convert the whole table
        low, high = np.searchsorted(self._marks, window).tolist()
        begin = max(0, low - 1) * _MARK_STRIDE
        end = min(high * _MARK_STRIDE, self.header.n_documents)
        at = self._offsets_start + 8 * begin
        offsets = np.frombuffer(self._bytes(at, 8 * (end - begin)), "<u8")
        low, high = np.searchsorted(offsets, window).tolist()
        found = offsets[low:high]
        if ((found < window[0]) | (found >= window[1])).any():
            raise self._error(at, "the table of documents is damaged")
        return found.astype(np.int64)

    def document_offset(self, document: int) -> int:
        """The first token of a document of the file; the number of tokens for the document after the last."""
        if document == self.header.n_documents:
            return self.n_tokens
        return int.from_bytes(self._bytes(self._offsets_start + 8 * document, 8), "little")

    def verify(self) -> None:
        """Read and check all tokens.

        Raises:
            UserError: some are damaged.
        """
        self._verify_blocks(0, self.header.n_blocks)

    def check_unchanged(self) -> None:
        """Raise UserError if the file's content has changed since it was opened.

        The content is read only if the size or modification time has changed: a file that was merely touched, or copied
        over itself, is the same. Renaming another file to this name does not matter either, since the run keeps reading
        the file that it opened.
        """
        stamp = self._content.stamp()
        if stamp == self._stamp:
            return
        if self._bytes(0, HEADER_BYTES) != self.header.pack():
            raise self._error(0, "it is another file")
        self._verify_tables()
        self.verify()
        self._stamp = stamp

    def _check_length(self, size: int) -> None:
        if size != self.header.file_bytes:
            state = "truncated" if size < self.header.file_bytes else "too long"
            raise UserError(f"{self.path}: {state}, {size} bytes instead of {self.header.file_bytes}; {_REMEDY}")

    @property
    def _offsets_start(self) -> int:
        return self.header.tables_start + 8 * self.header.n_blocks

    def _verify_tables(self) -> np.ndarray:
        """Compare the tables with their hash; returns every _MARK_STRIDE-th document offset."""
        header = self.header
        digest = xxhash.xxh3_128()
        marks = [np.empty(0, dtype=np.uint64)]
        for at, size in _chunks(header.tables_start, self._offsets_start):
            digest.update(self._bytes(at, size))
        for at, size in _chunks(self._offsets_start, header.file_bytes):
            data = self._bytes(at, size)
            digest.update(data)
            marks.append(np.frombuffer(data, "<u8")[::_MARK_STRIDE].copy())  # a view would keep all of the data alive
        if digest.digest() != header.tables_hash:
            self._content.forget(header.tables_start, header.file_bytes - header.tables_start)
            raise self._error(header.tables_start, "the tables after the tokens are damaged (checksum mismatch)")
        return np.concatenate(marks)

    def _verify_blocks(self, begin: int, end: int) -> None:
        """Compare blocks [begin, end) of the tokens with their checksums, and their ids with the vocabulary."""
        tokens_end = HEADER_BYTES + self.n_tokens * self.header.dtype.itemsize
        for at, size in _chunks(HEADER_BYTES + begin * BLOCK_BYTES, min(HEADER_BYTES + end * BLOCK_BYTES, tokens_end)):
            first = (at - HEADER_BYTES) // BLOCK_BYTES
            blocks = blocks_of(memoryview(self._bytes(at, size)))
            sums = np.frombuffer(self._bytes(self.header.tables_start + 8 * first, 8 * len(blocks)), "<u8").tolist()
            for block, data, expected in zip(range(first, first + len(blocks)), blocks, sums, strict=True):
                if xxhash.xxh3_64_intdigest(data) != expected:
                    at = HEADER_BYTES + block * BLOCK_BYTES
                    self._content.forget(at, len(data))
                    raise self._error(at, "the tokens are damaged (checksum mismatch)")
                numbers = np.frombuffer(data, self.header.dtype)
                self._check_ids(numbers, block * BLOCK_BYTES // self.header.dtype.itemsize)
                self._verified[block] = 1

    def _check_ids(self, numbers: np.ndarray, start: int) -> None:
        """Raise UserError if one of `numbers`, which start at token `start` of the file, is beyond the vocabulary."""
        limit = self.header.limit
        if len(numbers) and numbers.max() >= limit:
            index = int(np.argmax(numbers >= limit))
            at = HEADER_BYTES + (start + index) * self.header.dtype.itemsize
            token = int(numbers[index]) >> self.header.has_mask
            what = f"token id {token} is beyond the vocabulary of {self.header.vocab_size}"
            raise self._error(at, f"{what} (token {start + index} of the file)")

    def _bytes(self, at: int, size: int) -> bytes:
        """Read bytes [at, at + size) of the file.

        Raises:
            UserError: they cannot be read, or are no longer there.
        """
        try:
            data = self._content.read(at, size)
        except OSError as error:
            raise self._error(at, f"cannot be read ({error.strerror})") from None
        if len(data) < size:
            raise self._error(
                at + len(data), f"beyond the end of the file, which should have {self.header.file_bytes} bytes"
            )
        return data

    def _error(self, at: int, what: str) -> UserError:
        """The error for a fault at byte `at`; says whether the file has changed since it was opened."""
        try:
            now = self._content.stamp()
        except OSError:
            now = self._stamp
        if now == self._stamp:
            return UserError(f"{self.path}, at byte {at}: {what}; {_REMEDY}")
        return UserError(
            f"{self.path}, at byte {at}: {what}. The file has changed during the run: it had {self._stamp} when it was "
            f"opened, and now has {now}. Restore its old content and start again: the run resumes from its newest "
            "checkpoint. (To replace the data of a running job, prepare them into another folder)"
        )


class TokenFolder:
    """All token files of a folder, in name order, as one long sequence of tokens."""

    def __init__(
        self,
        path: str | Path | Place,
        vocab_size: int,
        tokenizer_hash: str | None = None,
        check_content: bool = True,
        data: Data | None = None,
    ) -> None:
        """Open and verify every file; with `check_content` False, only their headers, and blocks when they are read.

        `data`: as for `place_of`.

        Raises:
            UserError: the folder is missing or has no tokens, a file is damaged, or it was written with another
                vocabulary size or (unless None) another tokenizer than given here.
        """
        self.place = place_of(path, data)
        self.path = self.place.name
        self.files = [TokenFile(content, check_tables=False) for content in _contents(self.place)]
        for index, file in enumerate(self.files if check_content else ()):
            for later in self.files[index : index + _EXPECTED_FILES]:
                later.expect_tables()
            file.check_tables()
        for file in self.files:
            _check_tokenizer(file, vocab_size, tokenizer_hash or self.files[0].header.tokenizer_hash)
        ends = list(accumulate(file.n_tokens for file in self.files))
        self.n_tokens = ends[-1] if ends else 0
        """Tokens in all files."""
        self.has_mask = any(file.header.has_mask for file in self.files)
        """Whether some tokens may give no loss as targets."""
        if not self.n_tokens:
            others = self.place.below(SUFFIX)
            hint = f"there are some in {others[0]}" if others else "make them with scripts/prepare_data.py"
            raise UserError(f"{path}: no tokens in this folder (*{SUFFIX}); {hint}")
        self._starts = [0, *ends[:-1]]
        self.fingerprint = _fingerprint(file.header.pack() for file in self.files)
        """Hash of the content, computed from the checksums in the headers."""
        n_bytes = sum(file.header.file_bytes for file in self.files)
        if check_content and not self.place.is_far and n_bytes <= FULL_CHECK_BYTES:
            for file in self.files:
                file.verify()

    def read(self, start: int, length: int) -> np.ndarray:
        """Read tokens [start, start + length) into a new int64 array of shape (length,).

        Raises:
            IndexError: they are not all in the folder.
            UserError: they cannot be read, are damaged, or are not ids of the vocabulary; the message names the byte.
        """
        return self.read_with_mask(start, length)[0]

    def read_with_mask(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Read tokens as `read`, and which of them give no loss as targets.

        Returns:
            The tokens, and bool of the same shape; None in its place if the folder has no loss mask.
        """
        parts = self._parts(start, length)
        tokens = np.empty(length, dtype=np.int64)
        gives_none = np.zeros(length, dtype=bool) if self.has_mask else None
        filled = 0
        for file, first, count in parts:
            numbers = file.read(first, count)
            if gives_none is not None and file.header.has_mask:
                gives_none[filled : filled + count] = numbers & 1
                numbers = numbers >> 1
            tokens[filled : filled + count] = numbers
            filled += count
        return tokens, gives_none

    def document_starts(self, start: int, length: int) -> np.ndarray:
        """Where documents start in tokens [start, start + length): int64, ascending, relative to `start`."""
        found = [np.empty(0, dtype=np.int64)]
        position = 0
        for file, first, count in self._parts(start, length):
            found.append(file.document_starts(first, count) - (first - position))
            position += count
        return np.concatenate(found)

    def documents_by_file(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each file's first token's index in the folder, and where its documents begin and the last one ends."""
        for start, file in zip(self._starts, self.files, strict=True):
            yield start, np.append(file.document_starts(0, file.n_tokens), file.n_tokens)

    def check_unchanged(self) -> None:
        """Raise UserError if a file's content has changed since the folder was opened."""
        for file in self.files:
            file.check_unchanged()

    def expect(self, start: int, length: int) -> None:
        """Have tokens [start, start + length) brought in the background, which will be read soon."""
        for file, first, count in self._parts(start, length):
            file.expect(first, count)

    def _parts(self, start: int, length: int) -> list[tuple[TokenFile, int, int]]:
        """The files that hold tokens [start, start + length), each with its first token and the number of tokens."""
        if start < 0 or length < 0 or start + length > self.n_tokens:
            raise IndexError(f"{self.path}: tokens [{start}, {start + length}) are not within {self.n_tokens}")
        parts = []
        index = bisect_right(self._starts, start) - 1
        while length:
            file = self.files[index]
            first = start - self._starts[index]
            count = min(length, file.n_tokens - first)
            parts.append((file, first, count))
            start = start + count
            length = length - count
            index = index + 1
        return parts


def folder_fingerprint(path: str | Path, data: Data | None = None) -> str:
    """The fingerprint of a TokenFolder at `path`, from its headers alone.

    Raises:
        OSError, UserError: one can't be read.
    """
    return _fingerprint(content.read(0, HEADER_BYTES) for content in _contents(place_of(path, data)))


def _contents(place: Place) -> list[Content]:
    """The token files of a place, opened, whose headers will be read."""
    contents = [place.open(name) for name in place.names(SUFFIX)]
    for content in contents:
        content.expect(0, HEADER_BYTES)
    return contents


def _fingerprint(headers: Iterable[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(headers))


def _check_tokenizer(file: TokenFile, vocab_size: int, tokenizer_hash: str) -> None:
    header = file.header
    if header.vocab_size > vocab_size:
        raise UserError(
            f"{file.path}: its vocabulary has {header.vocab_size} tokens, the job's only {vocab_size}; "
            "use the tokenizer and model.vocab_size it was made for, or prepare the text again"
        )
    if header.tokenizer_hash != tokenizer_hash:
        raise UserError(
            f"{file.path}: made with another tokenizer (hash {header.tokenizer_hash}, the job's is {tokenizer_hash}); "
            "use that tokenizer, or prepare the text again into another folder"
        )


def blocks_of(data: memoryview) -> list[memoryview]:
    return [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]


def _chunks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Split bytes [start, end) of a file into chunks of bounded size: the start and size of each."""
    return ((at, min(_CHUNK_BYTES, end - at)) for at in range(start, end, _CHUNK_BYTES))


def padded(size: int) -> int:
    """`size` rounded up to a multiple of 8, so that the tables are aligned 8-byte integers."""
    return -(-size // 8) * 8
