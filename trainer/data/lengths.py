"""What is left of an epoch whose windows change their length, so that no token is read twice or left out.

A source whose sequences become longer or shorter within an epoch has read some of its windows, in a random order. The
windows that it has not read, in the order of the source, form a *stream* of tokens, from which windows of the new
length are cut and permuted. Where two pieces of the source meet in such a window, the first ends in the source's own
next token as its last target, and the second begins like a document. From the next epoch on, the source is cut into
windows of the new length from its beginning.

A stream is read through a bit for each window of the old length: 33 MB for 250 million windows, and 300 MB while they
are set, which takes the permutation of the unread ones. If the length changes
again within the epoch, the windows left of the stream form the next stream in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from trainer.data.order import Epochs, permute

_BLOCK_BITS = 2048
_PERMUTED_AT_ONCE = 1 << 20


class Read(NamedTuple):
    """How far a source was read with windows of one length."""

    seq_len: int
    until: int
    """Samples of the source in all, with those before."""


class Stream(Protocol):
    """Inputs that windows are cut from, each of which has a target."""

    @property
    def length(self) -> int:
        """Number of inputs."""

    def tokens(self, positions: np.ndarray) -> np.ndarray:
        """The tokens of the source, by number, that are the inputs at `positions`; int64 of the same shape."""

    def positions(self, tokens: np.ndarray) -> np.ndarray:
        """The inverse of `tokens`; -1 for tokens that are no inputs of the stream."""


@dataclass(frozen=True)
class Whole:
    """All tokens of a source but the last, which is a target only."""

    length: int

    def tokens(self, positions: np.ndarray) -> np.ndarray:
        """The positions themselves."""
        return positions

    def positions(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens themselves."""
        return np.where((tokens >= 0) & (tokens < self.length), tokens, -1)


class Rest:
    """The windows of a stream that were not read, and what is behind the last whole one."""

    def __init__(self, stream: Stream, seq_len: int, n_read: int, key: int | None) -> None:
        """Leave out the first `n_read` of the stream's windows in the order that `key` gives them."""
        self._stream = stream
        self._seq_len = seq_len
        self._n_windows = stream.length // seq_len
        self._n_unread = self._n_windows - n_read
        self.length = stream.length - n_read * seq_len
        n_blocks = -(-self._n_windows // _BLOCK_BITS)
        unread = np.zeros(n_blocks * _BLOCK_BITS, dtype=bool)
        for first in range(n_read, self._n_windows, _PERMUTED_AT_ONCE):
            ordinals = np.arange(first, min(self._n_windows, first + _PERMUTED_AT_ONCE))
            unread[permute(ordinals, self._n_windows, key)] = True
        counts = unread.reshape(n_blocks, _BLOCK_BITS).sum(axis=1, dtype=np.int64)
        self._before = np.cumsum(counts) - counts
        """Unread windows before each block."""
        self._bits = np.packbits(unread).reshape(n_blocks, _BLOCK_BITS // 8)

    def tokens(self, positions: np.ndarray) -> np.ndarray:
        """See `Stream`."""
        nth, offset = np.divmod(positions, self._seq_len)
        is_behind = nth >= self._n_unread
        distinct, which = np.unique(nth[~is_behind], return_inverse=True)
        windows = np.empty_like(nth)
        windows[~is_behind] = self._unread(distinct)[which]
        windows[is_behind] = nth[is_behind] - self._n_unread + self._n_windows
        return self._stream.tokens(windows * self._seq_len + offset)

    def positions(self, tokens: np.ndarray) -> np.ndarray:
        """See `Stream`."""
        inside = self._stream.positions(tokens)
        windows, offset = np.divmod(inside, self._seq_len)
        distinct, which = np.unique(windows, return_inverse=True)
        nth = np.array([self._nth(window) for window in distinct.tolist()], dtype=np.int64)[which]
        return np.where((inside < 0) | (nth < 0), -1, nth * self._seq_len + offset)

    def _nth(self, window: int) -> int:
        """The inverse of `_unread`, also behind the last whole window; -1 if the window was read."""
        if window >= self._n_windows:
            return self._n_unread + window - self._n_windows
        block, place = divmod(max(0, window), _BLOCK_BITS)
        bits = np.unpackbits(self._bits[block])
        return int(self._before[block] + bits[:place].sum(dtype=np.int64)) if bits[place] else -1

    def _unread(self, nth: np.ndarray) -> np.ndarray:
        """The nth windows that were not read, counted from 0; ascending."""
        blocks = np.searchsorted(self._before, nth, side="right") - 1
        found = np.empty_like(nth)
        for block in np.unique(blocks):
            chosen = blocks == block
            inside = np.flatnonzero(np.unpackbits(self._bits[block]))
            found[chosen] = block * _BLOCK_BITS + inside[nth[chosen] - self._before[block]]
        return found


class Lengths:
    """The order of a source's windows after changes of their length.

    Every input of the source is read once in an epoch, but for the last `seq_len` - 1 or fewer that remain of it.
    """

    def __init__(self, name: str, n_inputs: int, seed: int | None, seq_len: int, earlier: Sequence[Read]) -> None:
        """Order the windows of `seq_len` inputs that follow those read before.

        Args:
            name, seed: give each epoch an order of its own; without a seed, windows come as they lie.
            n_inputs: tokens of the source that have a next one; at least one window of each length.
            seq_len: length of the windows now.
            earlier: how far it was read with windows of other lengths, in the order of the run; not empty.
        """
        self.seq_len = seq_len
        self._whole = Epochs(name, n_inputs // seq_len, seed)
        self.first = earlier[-1].until
        """The first ordinal of this length."""
        self.epoch, self._cuts = _epoch_and_cuts(n_inputs, earlier)
        """Number of the epoch that the first ordinal is in, and what was read of it."""
        self._n_inputs = n_inputs
        self.n_rest = (n_inputs - sum(length * n_read for length, n_read in self._cuts)) // seq_len
        """Windows of `rest`."""
        self._keys = [self._whole.key(self.epoch, depth) for depth in range(len(self._cuts) + 1)]
        """The epoch's order has the first; after each change of the length within it comes another."""
        self.key = self._keys[-1]
        """Gives the order of those windows."""

    @cached_property
    def rest(self) -> Stream:
        """What is left of the epoch that the first ordinal is in; made when the first window of it is read."""
        rest: Stream = Whole(self._n_inputs)
        for cut, key in zip(self._cuts, self._keys, strict=False):
            rest = Rest(rest, *cut, key)
        return rest

    def locate(self, ordinals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether each of the source's samples is in `rest`, and the number of its window, there or in the source."""
        index = ordinals - self.first
        is_rest = index < self.n_rest
        windows = np.empty_like(index)
        if is_rest.any():
            windows[is_rest] = permute(index[is_rest], self.n_rest, self.key)
        in_whole = (self.epoch + 1) * self._whole.n_windows + index[~is_rest] - self.n_rest
        windows[~is_rest] = self._whole.window(in_whole)
        return is_rest, windows

    def inputs(self, window: int) -> np.ndarray:
        """The tokens, by number, that are the inputs of a window of `rest`; the next of each is its target."""
        return self.rest.tokens(np.arange(window * self.seq_len, (window + 1) * self.seq_len))


def _epoch_and_cuts(n_inputs: int, earlier: Sequence[Read]) -> tuple[int, list[tuple[int, int]]]:
    """The epoch that a source is in, and what was read of it: length and number of windows, one after the other."""
    epoch = 0
    before = 0
    left = n_inputs
    cuts: list[tuple[int, int]] = []
    for read in earlier:
        n_read = read.until - before
        n_left = left // read.seq_len
        before = read.until
        if n_read > n_left:
            epochs, last = divmod(n_read - n_left - 1, max(1, n_inputs // read.seq_len))
            epoch += 1 + epochs
            n_read = last + 1  # if that is all of an epoch, inputs behind its last whole window may be left
            left = n_inputs
            cuts = []
        if n_read:
            cuts.append((read.seq_len, n_read))
            left -= n_read * read.seq_len
    return epoch, cuts
