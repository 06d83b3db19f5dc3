"""Token files: tokenised text on disk, read at random without being loaded.

A corpus is a folder of `*.tokens` files, which in name order are one long run of tokens (`TokenFolder`). A file is a
small header, the tokens as plain integers for memory mapping, a checksum for each block of them, and the offset of
every document; docs/token_files.md has it byte by byte.

What is read was checked. Opening a folder verifies each header, the file's length and the tables behind the tokens.
The tokens themselves are verified at the same time if the folder is small (FULL_CHECK_BYTES), else block by block when
first touched: reading a terabyte before the first step would cost hours, and a block costs a few microseconds.
"""

import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from configs.errors import UserError

MAGIC = b"KEELTOKN"
VERSION = 1
SUFFIX = ".tokens"
BLOCK_BYTES = 1 << 16
"""Bytes of tokens under one checksum: at 7 GB/s, 10 microseconds at the first touch, and 0.01% of the file."""
FULL_CHECK_BYTES = 1 << 30
"""A folder with no more token bytes than this is verified whole when it is opened (0.2 s at most)."""

_HEADER = struct.Struct("<8sIIQQQ16s16s")
_HEADER_BYTES = _HEADER.size + 8  # its own xxh3_64 follows
_REMEDY = "Prepare it again with scripts/prepare_data.py, or copy it again."


@dataclass(frozen=True)
class Header:
    """What a token file says of itself."""

    vocab_size: int
    n_tokens: int
    n_documents: int
    tokenizer_hash: str
    """xxh3_128 of the tokenizer's file, in hex."""
    tables_hash: bytes
    """xxh3_128 of the block checksums and document offsets."""

    @property
    def dtype(self) -> np.dtype:
        """Two bytes a token where the vocabulary allows it, else four."""
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")

    @property
    def n_blocks(self) -> int:
        """Blocks of tokens, the last one perhaps short."""
        return -(-self.n_tokens * self.dtype.itemsize // BLOCK_BYTES)

    @property
    def tables_start(self) -> int:
        """Where the tables begin in the file: after the tokens, at a multiple of 8."""
        return _HEADER_BYTES + _padded(self.n_tokens * self.dtype.itemsize)

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return self.tables_start + 8 * (self.n_blocks + self.n_documents)

    def pack(self) -> bytes:
        """The header as it stands in the file."""
        sizes = (self.dtype.itemsize, self.vocab_size, self.n_tokens, self.n_documents)
        packed = _HEADER.pack(MAGIC, VERSION, *sizes, bytes.fromhex(self.tokenizer_hash), self.tables_hash)
        return packed + xxhash.xxh3_64_digest(packed)

    @classmethod
    def unpack(cls, raw: bytes, path: Path) -> "Header":
        """Read the header of `path` from its first bytes; raises UserError if they are none that Keel can read."""
        if not raw.startswith(MAGIC):
            raise UserError(f"{path}: not a token file of Keel (it does not begin with {MAGIC.decode()}).")
        if len(raw) < _HEADER_BYTES:
            raise UserError(f"{path}: truncated inside the header, at {len(raw)} bytes. {_REMEDY}")
        _, version, itemsize, vocab_size, n_tokens, n_documents, tokenizer_hash, tables = _HEADER.unpack_from(raw)
        if version != VERSION:
            raise UserError(f"{path}: version {version} of the token file format; this Keel reads version {VERSION}.")
        if xxhash.xxh3_64_digest(raw[: _HEADER.size]) != raw[_HEADER.size : _HEADER_BYTES]:
            raise UserError(f"{path}: the header is damaged (checksum mismatch). {_REMEDY}")
        header = cls(vocab_size, n_tokens, n_documents, tokenizer_hash.hex(), tables)
        if itemsize != header.dtype.itemsize:
            raise UserError(f"{path}: {itemsize} bytes a token do not fit a vocabulary of {vocab_size}. {_REMEDY}")
        return header


class TokenFileWriter:
    """Writes one token file, document by document; it gets its name only once it is whole.

    Use as a context manager: leaving it commits the file, leaving it by an exception deletes what was written.
    """

    def __init__(self, path: Path, vocab_size: int, tokenizer_hash: str) -> None:
        """Begin the file `path` with ids below `vocab_size`, from the tokenizer with this hash."""
        self.path = path
        self.n_tokens = 0
        self._empty = Header(vocab_size, 0, 0, tokenizer_hash, bytes(16))
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._offsets: list[int] = []
        self._block_sums: list[int] = []
        self._pending = bytearray()

    def __enter__(self) -> Self:
        self._file = self._temporary.open("wb")
        self._file.write(bytes(_HEADER_BYTES))
        return self

    def append(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Add a document; raises ValueError if it is empty or holds an id outside the vocabulary."""
        ids = np.asarray(tokens, dtype=np.int64)
        if not len(ids):
            raise ValueError("a document without tokens")
        if ids.min() < 0 or ids.max() >= self._empty.vocab_size:
            raise ValueError(f"token id outside [0, {self._empty.vocab_size}): {ids.min()} or {ids.max()}")
        self._offsets.append(self.n_tokens)
        self.n_tokens += len(ids)
        self._pending += ids.astype(self._empty.dtype).tobytes()
        whole = len(self._pending) // BLOCK_BYTES * BLOCK_BYTES
        self._write_blocks(self._pending[:whole])
        del self._pending[:whole]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._file:
                if kind is None:
                    self._finish()
        finally:
            self._temporary.unlink(missing_ok=True)

    def _write_blocks(self, data: bytearray) -> None:
        self._block_sums += [xxhash.xxh3_64_intdigest(block) for block in _blocks(memoryview(data))]
        self._file.write(data)

    def _finish(self) -> None:
        self._write_blocks(self._pending)
        tables = np.array(self._block_sums + self._offsets, dtype="<u8").tobytes()
        size = self.n_tokens * self._empty.dtype.itemsize
        self._file.write(bytes(_padded(size) - size) + tables)
        tables_hash = xxhash.xxh3_128_digest(tables)
        header = Header(
            self._empty.vocab_size, self.n_tokens, len(self._offsets), self._empty.tokenizer_hash, tables_hash
        )
        self._file.seek(0)
        self._file.write(header.pack())
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self.path)


class TokenFile:
    """One token file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Map `path` and verify its header, length and tables; raises UserError if one is wrong."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.header = Header.unpack(file.read(_HEADER_BYTES), path)
            self._check_length(path.stat().st_size)
            raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))  # plain ndarray: its slices are 3x faster
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}).") from None
        header = self.header
        self.n_tokens = header.n_tokens
        self._bytes = raw[_HEADER_BYTES : _HEADER_BYTES + header.n_tokens * header.dtype.itemsize]
        self._tokens = self._bytes.view(header.dtype)
        tables = raw[header.tables_start :]
        if xxhash.xxh3_128_digest(tables.data) != header.tables_hash:
            raise UserError(f"{path}: the tables after the tokens are damaged (checksum mismatch). {_REMEDY}")
        self._block_sums, self.document_offsets = np.split(tables.view("<u8"), [header.n_blocks])
        self._verified = bytearray(header.n_blocks)

    def _check_length(self, size: int) -> None:
        if size != self.header.file_bytes:
            state = "truncated" if size < self.header.file_bytes else "too long"
            raise UserError(f"{self.path}: {state}, {size} bytes instead of {self.header.file_bytes}. {_REMEDY}")

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as a view of the file; raises UserError if they are damaged."""
        tokens_per_block = BLOCK_BYTES // self.header.dtype.itemsize
        for block in range(start // tokens_per_block, -(-(start + length) // tokens_per_block)):
            if not self._verified[block]:
                self._verify(block)
        return self._tokens[start : start + length]

    def _verify(self, block: int) -> None:
        data = self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        at = f"{self.path}, at byte {_HEADER_BYTES + block * BLOCK_BYTES}"
        if xxhash.xxh3_64_intdigest(data.data) != self._block_sums[block]:
            raise UserError(f"{at}: the tokens are damaged (checksum mismatch). {_REMEDY}")
        largest = int(data.view(self.header.dtype).max())
        if largest >= self.header.vocab_size:
            raise UserError(f"{at}: token id {largest} is beyond the vocabulary of {self.header.vocab_size}. {_REMEDY}")
        self._verified[block] = 1


class TokenFolder:
    """All token files of a folder, in name order, as one long run of tokens."""

    def __init__(self, path: str | Path, vocab_size: int, tokenizer_hash: str | None = None) -> None:
        """Open and verify every file.

        Raises UserError if the folder is missing or holds no tokens, if a file is damaged, or if it was written with
        another vocabulary size or (unless None) another tokenizer than given here.
        """
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"{path}: no such folder of token files. Make it with scripts/prepare_data.py.")
        self._files = [TokenFile(file) for file in sorted(self.path.glob("*" + SUFFIX))]
        for file in self._files:
            _check_tokenizer(file, vocab_size, tokenizer_hash or self._files[0].header.tokenizer_hash)
        ends = list(accumulate(file.n_tokens for file in self._files))
        self.n_tokens = ends[-1] if ends else 0
        """Tokens in all files."""
        if not self.n_tokens:
            raise UserError(f"{path}: no tokens in this folder (*{SUFFIX}). Make them with scripts/prepare_data.py.")
        self._starts = [0, *ends[:-1]]
        self.fingerprint = xxhash.xxh3_128_hexdigest(b"".join(file.header.pack() for file in self._files))
        """Hash of the content, by way of the checksums in the headers."""
        if sum(file.header.file_bytes for file in self._files) <= FULL_CHECK_BYTES:
            for file in self._files:
                file.read(0, file.n_tokens)

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as a new int64 array of shape (length,).

        Raises IndexError if they are not all in the folder, UserError (with file and byte) if they are damaged.
        """
        parts = self._parts(start, length)
        tokens = np.empty(length, dtype=np.int64)
        filled = 0
        for file, first, count in parts:
            tokens[filled : filled + count] = file.read(first, count)
            filled += count
        return tokens

    def document_starts(self, start: int, length: int) -> np.ndarray:
        """Where documents begin in tokens [start, start + length): int64, ascending, relative to `start`."""
        found = []
        position = 0
        for file, first, count in self._parts(start, length):
            window = np.array([first, first + count], dtype=np.uint64)  # another type would convert the whole table
            low, high = np.searchsorted(file.document_offsets, window)
            found.append(file.document_offsets[low:high].astype(np.int64) - (first - position))
            position += count
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _parts(self, start: int, length: int) -> list[tuple[TokenFile, int, int]]:
        """The files that hold tokens [start, start + length), each with its first token and how many."""
        if start < 0 or length < 0 or start + length > self.n_tokens:
            raise IndexError(f"{self.path}: tokens [{start}, {start + length}) are not within {self.n_tokens}")
        parts = []
        index = bisect_right(self._starts, start) - 1
        while length:
            file, first = self._files[index], start - self._starts[index]
            count = min(length, file.n_tokens - first)
            parts.append((file, first, count))
            start, length, index = start + count, length - count, index + 1
        return parts


def _check_tokenizer(file: TokenFile, vocab_size: int, tokenizer_hash: str) -> None:
    header = file.header
    if header.vocab_size != vocab_size:
        raise UserError(
            f"{file.path}: its vocabulary has {header.vocab_size} tokens, the job's {vocab_size}. "
            "Use the tokenizer and model.vocab_size it was made for, or prepare the text again."
        )
    if header.tokenizer_hash != tokenizer_hash:
        raise UserError(
            f"{file.path}: made with another tokenizer (hash {header.tokenizer_hash}, the job's is {tokenizer_hash}). "
            "Use that tokenizer, or prepare the text again into another folder."
        )


def _blocks(data: memoryview) -> list[memoryview]:
    return [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]


def _padded(size: int) -> int:
    """`size` rounded up to a multiple of 8, so that the tables can be mapped as 8-byte integers."""
    return -(-size // 8) * 8
