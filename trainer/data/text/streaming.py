"""Text that is tokenized while training, as exact on a resume and at any number of ranks as token files.

The rows (documents) of the text, numbered consecutively through its epochs, are dealt out to V *virtual shards*: row j
goes to shard j mod V. V is 64, or the number of documents if that is smaller. A shard packs its rows, one after
another, into windows of seq_len tokens, each with the first token of the next as its last target. Sample i of the
source is window i div V of shard i mod V, and so depends only on the text, the tokenizer and V. A rank tokenizes only
the shards that its samples come from. That is its fair share if the global batch is a multiple of V (or V of it), and
V is at least the number of data-parallel ranks.

If a stage of the run has another seq_len, each shard goes on at its next token, in windows of the new length.

Nothing is dropped or repeated: a document that does not fit continues in its shard's next window, and a shard's last,
unfilled window of an epoch is filled with its first rows of the next epoch. Each epoch has every row once, in the order
of the text. Since shards advance by tokens, not rows, they do not all enter an epoch at the same sample.

A resume needs nothing but the sample's number: the shards can be packed again from the start. To make it fast, a
checkpoint has *cursors*: for each shard that a rank read, its window, and the row and token where the window begins.

The price: a rank reads every row to find its own, and rows that a shard is not ready for wait in memory, the more so
the more the lengths of documents differ; what waits for several epochs is tokenized and held once. This is meant for
trying out a corpus, at the speed of the tokenizer (measured: 1.1 to 1.4 M tokens/s per process, against 280 M from
token files).
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import xxhash

from configs.errors import UserError
from configs.files import is_file
from trainer.data.lengths import Read
from trainer.data.text.bad_files import BadFiles
from trainer.data.text.documents import Keys, Piece, pieces, read, read_by
from trainer.data.text.hub import pin
from trainer.data.text.inputs import content_files
from trainer.data.tokenizer import Tokenizer, encode_document

VIRTUAL_SHARDS = 64
"""More than most jobs have data-parallel ranks, so that they share the tokenizing."""
FULL_CHECK_BYTES = 1 << 30
"""Text of no more bytes than this is read whole when its source is made (0.1 to 0.5 s, from memory)."""
_BLOCK_BYTES = 1 << 18
_NO_TEXT = "no text, so there would be no token to train on"


@dataclass
class Rows:
    """The documents of a text, repeated, numbered consecutively from 0 through the epochs."""

    path: str
    text_key: str
    pieces: list[Piece]
    sizes: list[int]
    """Numbers of rows of the first pieces, as far as known."""
    repeat: bool

    def count(self, most: int) -> int:
        """Number of rows, up to `most`."""
        return sum(1 for _ in islice(self._epoch_from(0), most))

    def have_come_round(self, passed: int, n_shards: int) -> bool:
        """Whether a shard of `n_shards` that has passed so many rows only gets rows again that it has had."""
        return len(self.sizes) == len(self.pieces) and passed > math.lcm(sum(self.sizes), n_shards)

    def document(self, row: int) -> int:
        """Number of a row that was read in the text, which is the same in each epoch."""
        return row % sum(self.sizes) if len(self.sizes) == len(self.pieces) else row

    def from_row(self, row: int) -> Iterator[tuple[int, str]]:
        """Yield rows `row`, `row` + 1, ... with their numbers, endlessly.

        Raises:
            UserError: a row can't be read, or the text has no tokens, or it ended and does not repeat.
        """
        epoch_start = 0
        if len(self.sizes) == len(self.pieces) and any(self.sizes):
            epoch_start = row // sum(self.sizes) * sum(self.sizes)
        while True:
            has_text = row > epoch_start  # what was before is not known
            for number, text in self._epoch_from(max(0, row - epoch_start)):
                has_text = has_text or bool(text)
                yield epoch_start + number, text
            self._check_end(has_text)
            epoch_start += sum(self.sizes)

    def _epoch_from(self, row: int) -> Iterator[tuple[int, str]]:
        """The rows of one epoch from `row` on, skipping whole earlier pieces whose size is known."""
        starts = [0, *accumulate(self.sizes)]
        first = min(bisect_right(starts, row) - 1, len(self.sizes))
        number = starts[first]
        for index in range(first, len(self.pieces)):
            start = number
            for document in read(self.pieces[index], Keys(self.text_key), BadFiles()):
                if number >= row:
                    yield number, document.text
                number += 1
            if index == len(self.sizes):
                self.sizes.append(number - start)

    def _check_end(self, has_text: bool) -> None:
        if not has_text:
            raise UserError(f"{self.path}: {_NO_TEXT}")
        if not self.repeat:
            raise UserError(
                f"{self.path}: validation needs more text: it has only {sum(self.sizes)} document(s), and reads none "
                "twice; lower validation.sequences, or give it more"
            )


@dataclass
class Shard:
    """A virtual shard: its tokens from the current window on."""

    next_row: int
    """The next row that it must receive."""
    window: int = 0
    """Number of the window at which the tokens begin."""
    offset: int = 0
    """Where that window begins in the first document."""
    documents: deque[tuple[int, np.ndarray]] = field(default_factory=deque)
    """Its rows from there on: number and tokens."""

    @property
    def n_tokens(self) -> int:
        """Tokens available from the beginning of the current window."""
        return sum(len(tokens) for _, tokens in self.documents) - self.offset

    def advance(self, seq_len: int) -> None:
        """Move to the next window."""
        self.window += 1
        self.offset += seq_len
        while self.documents and self.offset >= len(self.documents[0][1]):
            self.offset -= len(self.documents.popleft()[1])

    def copy_to(self, tokens: np.ndarray, starts: np.ndarray | None) -> None:
        """Fill `tokens` from the beginning of the current window, and mark in `starts` where documents begin."""
        filled = 0
        offset = self.offset
        for _, document in self.documents:
            part = document[offset : offset + len(tokens) - filled]
            if starts is not None and offset == 0 and len(part):
                starts[filled] = True
            tokens[filled : filled + len(part)] = part
            filled = filled + len(part)
            offset = 0


class TextSource:
    """Windows of a text, packed in virtual shards; the address of a window is its ordinal."""

    def __init__(
        self,
        path: str,
        text_key: str,
        tokenizer: Tokenizer,
        seq_len: int,
        repeat: bool = True,
        state: dict[str, Any] | None = None,
        earlier: Sequence[Sequence[int]] = (),
    ) -> None:
        """Stream the text `path` in epochs, or once and in order, from the cursors in `state` if it has any.

        `earlier` says how far it was read in windows of other lengths; the fields of each `lengths.Read`.

        Raises:
            UserError: there is no such text, it has no documents, or one of its first cannot be read.
        """
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._earlier = [Read(*each) for each in earlier]
        self._path = path = pin(path, state.get("path") if state else None)
        layout = pieces(path)
        self._fingerprint, earlier_form = _fingerprints(layout, tokenizer.hash)
        if state is not None and state["fingerprint"] == earlier_form:
            self._fingerprint = earlier_form  # of a run that an older Keel has begun
        if state is None or state["fingerprint"] != self._fingerprint:  # cursors into another text are meaningless
            state = {"sizes": [], "cursors": {}}
        self._rows = Rows(path, text_key, layout, list(state["sizes"]), repeat)
        self._n_shards = self._rows.count(VIRTUAL_SHARDS if repeat else 1)
        if not self._n_shards:
            raise UserError(f"{path}: {_NO_TEXT}")
        self._cursors: dict[str, list[int]] = state["cursors"]
        self._shards: dict[int, Shard] = {}
        self._held: WeakValueDictionary[int, np.ndarray] = WeakValueDictionary()  # tokens in the shards, by document
        self._furthest = -1  # the last window known to exist in a text that is read once
        self._stream: Iterator[tuple[int, str]] = iter(())
        self._stream_row: int | None = None  # the row that the stream yields next; None: not started

    @property
    def layout(self) -> str:
        """The number of virtual shards."""
        return f"{self._n_shards} virtual shards"

    def addresses(self, ordinals: np.ndarray) -> np.ndarray:
        """The ordinals themselves; from now on, their shards keep the rows read for them."""
        windows, indices = np.divmod(ordinals, self._n_shards)
        for index in np.unique(indices).tolist():
            self._open(index, int(windows[indices == index].min()))
        if not self._rows.repeat and ordinals.max() > self._furthest:
            self._furthest = int(ordinals.max())
            self._seek(self._furthest)
        return ordinals

    def read(self, address: int, tokens: np.ndarray, starts: np.ndarray | None) -> None:
        """Fetch the `address`-th window; see `sources.SampleSource`."""
        self._seek(address).copy_to(tokens, starts)

    def state(self) -> dict[str, Any]:
        """What text and tokenizer are, with the commit of a dataset, and cursors: [window, row, token] by shard."""
        begun = {i: shard for i, shard in self._shards.items() if shard.documents}
        cursors = {str(i): [shard.window, shard.documents[0][0], shard.offset] for i, shard in begun.items()}
        return {
            "fingerprint": self._fingerprint,
            "path": self._path,
            "sizes": list(self._rows.sizes),
            "cursors": self._cursors | cursors,
        }

    def check_unchanged(self) -> None:
        """Do nothing: a text is read from start to end, not at random."""

    def _open(self, index: int, window: int) -> Shard:
        """Shard `index`, at `window` or before: the current one, or started from its cursor or from the beginning."""
        shard = self._shards.get(index)
        if shard is None or shard.window > window:
            at, row, offset = self._cursors.get(str(index), [0, index, 0])
            shard = Shard(row, at, offset) if at <= window else Shard(index)
            self._shards[index] = shard
        return shard

    def _seek(self, address: int) -> Shard:
        """The shard of a window, positioned at it and with all its tokens available."""
        window, index = divmod(address, self._n_shards)
        shard = self._open(index, window)
        while shard.window < window:
            length = self._length(shard.window * self._n_shards + index)
            self._fill(shard, length)
            shard.advance(length)
        self._fill(shard, self._seq_len + 1)
        return shard

    def _length(self, ordinal: int) -> int:
        """The length of a window."""
        return next((read.seq_len for read in self._earlier if ordinal < read.until), self._seq_len)

    def _fill(self, shard: Shard, n_tokens: int) -> None:
        """Read rows until `n_tokens` of the shard are available.

        Raises:
            UserError: no row of the shard has a token.
        """
        had = shard.n_tokens
        first = shard.next_row
        while shard.n_tokens < n_tokens:
            self._read_row(shard)
            passed = shard.next_row - first
            if passed > self._n_shards and shard.n_tokens == had and self._rows.have_come_round(passed, self._n_shards):
                raise UserError(
                    f"{self._path}: document {first % sum(self._rows.sizes) + 1} has no token (it is empty or white "
                    "space), nor has any other that its virtual shard gets; remove such documents, or use token files, "
                    "from which keel prepare leaves them out"
                )

    def _read_row(self, shard: Shard) -> None:
        """Read the next row, going back first if `shard` needs an earlier one, and give its tokens to its shard."""
        if self._stream_row is None or self._stream_row > shard.next_row:
            self._stream_row = min(other.next_row for other in self._shards.values())
            self._stream = self._rows.from_row(self._stream_row)
        row, text = next(self._stream)
        self._stream_row = row + 1
        owner = self._shards.get(row % self._n_shards)
        if owner is not None and row == owner.next_row:
            owner.documents.append((row, self._tokens(row, text)))
            owner.next_row += self._n_shards

    def _tokens(self, row: int, text: str) -> np.ndarray:
        """A row's tokens: those that a shard still has of an earlier epoch, since long documents outlast many."""
        document = self._rows.document(row)
        tokens = self._held.get(document)
        if tokens is None:
            tokens = np.array(encode_document(self._tokenizer, text), dtype=np.int32)
            self._held[document] = tokens
        return tokens


def text_fingerprint(layout: Sequence[Piece], tokenizer_hash: str) -> str:
    """Hash of everything that decides which window is which: the text, its division into pieces, and the tokenizer.

    The text may be in another place, under other names. At most FULL_CHECK_BYTES of it are read, in blocks spread
    evenly over each file: a replaced file is noticed, a replaced word in a larger corpus may not be. For a hub dataset,
    the commit identifies the text.
    """
    return _fingerprints(layout, tokenizer_hash)[0]


def _fingerprints(layout: Sequence[Piece], tokenizer_hash: str) -> tuple[str, str]:
    """The fingerprint, and the form that it had until paths were left out of it."""
    paths = dict.fromkeys(piece.path for piece in layout if piece.kind != "hub")
    files = [file for path in paths for file in content_files(Path(path))]
    share = min(1.0, FULL_CHECK_BYTES / max(1, sum(piece.n_bytes for piece in layout if piece.kind != "hub")))
    contents = [_content_hash(file, share) for file in files]
    numbered = {path: f"{number}{read_by(path)}" for number, path in enumerate(paths)}

    def hashed(names: Mapping[str, str]) -> str:
        parts = [(names.get(piece.path, piece.path), piece.start, piece.stop) for piece in layout]
        return xxhash.xxh3_128_hexdigest(repr((tokenizer_hash, VIRTUAL_SHARDS, parts, contents)).encode())

    return hashed(numbered), hashed({})


def _content_hash(file: Path, share: float) -> str:
    """Hash of a file's blocks, or of an evenly spread `share` of them, including the first and the last."""
    size = file.stat().st_size if is_file(file) else 0
    if not size:  # may be a pipe, which must not be waited for
        return ""
    digest = xxhash.xxh3_128(str(size).encode())
    n_blocks = -(-size // _BLOCK_BYTES)
    n_read = n_blocks if share == 1 else min(n_blocks, max(2, round(n_blocks * share)))
    try:
        with file.open("rb") as opened:
            for index in range(n_read):
                opened.seek(index * (n_blocks - 1) // max(1, n_read - 1) * _BLOCK_BYTES)
                digest.update(opened.read(_BLOCK_BYTES))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return digest.hexdigest()


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge a source's states from several ranks: for each shard, the furthest cursor."""
    merged = dict(states[0])
    if "cursors" in merged:
        merged["sizes"] = max((state["sizes"] for state in states), key=len)
        merged["cursors"] = {}
        for index, cursor in chain.from_iterable(state["cursors"].items() for state in states):
            merged["cursors"][index] = max(cursor, merged["cursors"].get(index, cursor))
    return merged
