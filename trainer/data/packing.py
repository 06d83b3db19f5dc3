"""Packing whole documents into windows by best fit, so that hardly any is cut (Ding et al., "Fewer Truncations Improve
Language Modeling", 2024, section 3).

A window holds seq_len + 1 tokens: the inputs, and the targets one position further. Documents longer than that are cut
into windows' lengths first. Then each part, from the longest to the shortest, goes into the window with the least room
that is enough, or opens a new one. What remains of a window's room is padding, which counts in no loss.

A packed file is a token file like any other, without padding: its documents in the order of the windows. The windows
follow from the documents' lengths, because each opens with a part that did not fit in any earlier window: a window ends
where the next document would not fit (`window_bounds`).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from configs.errors import UserError
from configs.files import write_atomically
from configs.untrusted import MAX_JSON_BYTES, parse_json
from trainer.data.place import Place
from trainer.data.sources import TokenSource
from trainer.data.text.token_writer import TokenFileWriter

NAME = "packed.json"
"""Marks a folder of packed token files, and says for which seq_len."""


class PackingWriter:
    """Collects the documents of a token file, and writes them packed when it is left without an exception."""

    def __init__(self, writer: TokenFileWriter, seq_len: int) -> None:
        """Pack into windows of seq_len + 1 tokens."""
        self._writer = writer
        self._room = seq_len + 1
        self._parts: list[np.ndarray] = []
        self.n_windows = 0
        self.n_cut = 0
        """Documents that are longer than a window."""

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def append(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Add a document."""
        ids = np.asarray(tokens, dtype=np.uint32)
        self.n_cut += len(ids) > self._room
        self._parts += [ids[start : start + self._room] for start in range(0, len(ids), self._room)]

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                windows = best_fit([len(part) for part in self._parts], self._room)
                self.n_windows = len(windows)
                for window in windows:
                    for index in window:
                        self._writer.append(self._parts[index])
        except BaseException as error:
            self._writer.__exit__(type(error), error)
            raise
        self._writer.__exit__(kind, *rest)


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack parts of these `lengths` (1 to `room`) by best fit, the longest first.

    Returns:
        For each window, in the order in which they were opened, the indices of its parts.
    """
    room = min(room, sum(lengths))  # more makes no other windows, only numbers with more bits
    windows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # the windows with exactly this much room left
    sizes = 0  # a bit for each key of `by_room`
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        enough = sizes >> length
        if enough:
            left = length + (enough & -enough).bit_length() - 1
            window = by_room[left].pop()
            if not by_room[left]:
                del by_room[left]
                sizes ^= 1 << left
        else:
            left = room
            window = len(windows)
            windows.append([])
        windows[window].append(index)
        if left > length:
            by_room.setdefault(left - length, []).append(window)
            sizes |= 1 << (left - length)
    return windows


def window_bounds(document_bounds: np.ndarray, room: int) -> np.ndarray:
    """Where the windows of a packed file begin, and the end of the last: int64, ascending.

    Args:
        document_bounds: the same of its documents.

    Raises:
        ValueError: a document is longer than a window.
    """
    if (np.diff(document_bounds) > room).any():
        raise ValueError(f"a document has more than {room} tokens")
    following = (np.searchsorted(document_bounds, document_bounds + room, side="right") - 1).tolist()
    document = 0
    found = [0]
    while document < len(document_bounds) - 1:
        document = following[document]
        found.append(document)
    return document_bounds[found]


def write_mark(folder: Path, seq_len: int) -> None:
    """Mark a folder of token files as packed for `seq_len`."""
    write_atomically(folder / NAME, [json.dumps({"seq_len": seq_len}) + "\n"])


def packed_for(place: Place) -> int | None:
    """The seq_len that a folder of token files is packed for; None if it is a stream.

    Raises:
        UserError: its mark is damaged.
    """
    try:
        content = place.get(NAME, MAX_JSON_BYTES)
        if content is None:
            return None
        seq_len = parse_json(content)["seq_len"]
        if type(seq_len) is not int or seq_len < 1:
            raise ValueError("seq_len is not a positive integer")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{place.name}/{NAME}: cannot be read ({error}); prepare the folder again") from None
    return seq_len


class PackedSource(TokenSource):
    """The windows of a packed folder.

    A window that is not full ends with PADDING, which is no token: its inputs do not matter, and it counts in no loss.
    The inputs of the folder are numbered with that padding. So a stage of another length, which goes on with a source
    that is partly read, has windows that lie side by side in its sequences, or parts of one.
    """

    layout_name = "packed windows"

    def inputs_before(self, start: int, stop: int) -> np.ndarray:
        """The inputs whose targets are tokens [start, stop): no target is the first token of a window."""
        tokens = np.arange(start, stop)
        windows = np.searchsorted(self._starts, tokens, side="right") - 1
        offsets = tokens - self._starts[windows]
        return (windows * self._packed + offsets - 1)[offsets > 0]

    def pieces(self, address: int) -> list[tuple[int, int]]:
        """The inputs of a sequence, as ranges [start, stop) that are each within a window, in their order."""
        return [
            (max(start, window * self._packed), min(stop, (window + 1) * self._packed))
            for start, stop in super().pieces(address)
            for window in range(start // self._packed, -(-stop // self._packed))
        ]

    def _tokens_of(self, start: int, stop: int) -> tuple[int, int]:
        """Implements `TokenSource`: the piece is within a window, and its end may be padding."""
        window, offset = divmod(start, self._packed)
        length = int(self._lengths[window])
        first = min(offset, length)
        return int(self._starts[window]) + first, min(stop - start + 1, length - first)

    def _count_inputs(self) -> int:
        """Find the windows.

        Raises:
            UserError: the folder is not packed.
        """
        folder = self.folder
        packed = packed_for(folder.place)
        assert packed is not None
        starts = [np.empty(0, dtype=np.int64)]
        lengths = [np.empty(0, dtype=np.int64)]
        for first, documents in folder.documents_by_file():
            try:
                bounds = window_bounds(documents, packed + 1)
            except ValueError as error:
                raise UserError(f"{folder.path}: not packed for {packed}: {error}; prepare the text again") from None
            starts.append(first + bounds[:-1])
            lengths.append(np.diff(bounds))
        self._packed = packed
        self._starts = np.concatenate(starts)
        self._lengths = np.concatenate(lengths)
        return len(self._starts) * packed
