"""Writing token files (see `token_file`)."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from trainer.data.token_file import BLOCK_BYTES, HEADER_BYTES, Header, blocks_of, padded


class TokenFileWriter:
    """Writes one token file, document by document; the file gets its name only once it is complete.

    Use it as a context manager: leaving it commits the file; leaving it by an exception deletes what was written.
    """

    def __init__(self, path: Path, vocab_size: int, tokenizer_hash: str, has_mask: bool = False) -> None:
        """Start the file `path` for ids below `vocab_size`, from the tokenizer with this hash.

        With a loss mask, documents are given as numbers of `loss_mask.encode_masked`.
        """
        self.path = path
        self.n_tokens = 0
        self._empty = Header(vocab_size, 0, 0, tokenizer_hash, bytes(16), has_mask)
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._offsets: list[int] = []
        self._block_sums: list[int] = []
        self._pending = bytearray()

    def __enter__(self) -> Self:
        self._file = self._temporary.open("wb")
        self._file.write(bytes(HEADER_BYTES))
        return self

    def append(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Add a document.

        Raises:
            ValueError: the document is empty, or contains an id outside the vocabulary.
        """
        # Of a list, fromiter is faster than np.asarray.
        ids = tokens.astype(np.int64) if isinstance(tokens, np.ndarray) else np.fromiter(tokens, np.int64, len(tokens))
        if not len(ids):
            raise ValueError("a document without tokens")
        if ids.min() < 0 or ids.max() >= self._empty.limit:
            raise ValueError(f"token id outside [0, {self._empty.limit}): {ids.min()} or {ids.max()}")
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
        self._block_sums += [xxhash.xxh3_64_intdigest(block) for block in blocks_of(memoryview(data))]
        self._file.write(data)

    def _finish(self) -> None:
        self._write_blocks(self._pending)
        tables = np.array(self._block_sums + self._offsets, dtype="<u8").tobytes()
        size = self.n_tokens * self._empty.dtype.itemsize
        self._file.write(bytes(padded(size) - size) + tables)
        tables_hash = xxhash.xxh3_128_digest(tables)
        n_documents = len(self._offsets)
        header = replace(self._empty, n_tokens=self.n_tokens, n_documents=n_documents, tables_hash=tables_hash)
        self._file.seek(0)
        self._file.write(header.pack())
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self.path)
