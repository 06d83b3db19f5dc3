"""The order of samples backward: from a window to the samples of the run that read it (see `trainer/data/order.py`)."""

from collections.abc import Iterator

import numpy as np

from trainer.data.lengths import Lengths
from trainer.data.order import GOLDEN, ROUNDS, Epochs, Mixture, mix, walked


def unpermute(value: np.ndarray | int, n: int, key: int | None) -> np.ndarray:
    """The inverse of `order.permute`: the indices that it maps to `value`.

    Args:
        value: integers in [0, n), any shape.
        n: size of the domain, at least 1.
        key: 64-bit key, or None.

    Returns:
        int64 array of the shape of `value`.
    """
    return walked(_unfeistel, value, n, key)


def _unfeistel(value: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
    """Undo one pass of `order._feistel`: the same rounds in reverse."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    low = value & np.uint64((1 << low_bits) - 1)
    high = value >> np.uint64(low_bits)
    for number in range(ROUNDS, 0, -2):
        high = high ^ (mix(low ^ _round_key(key, number)) >> np.uint64(64 - high_bits))
        low = low ^ (mix(high ^ _round_key(key, number - 1)) >> np.uint64(64 - low_bits))
    return high << np.uint64(low_bits) | low


def _round_key(key: np.ndarray, number: int) -> np.ndarray:
    return key + np.uint64(number * int(GOLDEN) % (1 << 64))


def ordinals(epochs: Epochs, windows: np.ndarray, epoch: int) -> np.ndarray:
    """The inverse of `Epochs.window`: which sample of its source reads each window in an epoch; int64."""
    return epoch * epochs.n_windows + unpermute(windows, epochs.n_windows, epochs.key(epoch))


def ordinals_after(lengths: Lengths, epochs: Epochs, inputs: np.ndarray, end: int) -> Iterator[tuple[int, int]]:
    """The samples of a source before its `end`-th that read some of these inputs after its length has changed.

    Yields:
        The epoch and the ordinal of each, in order.
    """
    positions = lengths.rest.positions(inputs)
    windows = np.unique(positions[positions >= 0] // lengths.seq_len)
    windows = windows[windows < lengths.n_rest]
    if windows.size:
        found = np.sort(lengths.first + unpermute(windows, lengths.n_rest, lengths.key))
        yield from ((lengths.epoch, ordinal) for ordinal in found[found < end].tolist())
    windows = np.unique(inputs // lengths.seq_len)
    windows = windows[windows < epochs.n_windows]
    shift = lengths.first + lengths.n_rest - (lengths.epoch + 1) * epochs.n_windows
    for epoch in range(lengths.epoch + 1, -(-(end - shift) // epochs.n_windows)):
        found = np.sort(ordinals(epochs, windows, epoch)) + shift
        yield from ((epoch, ordinal) for ordinal in found[found < end].tolist())


def sample_of(mixture: Mixture, source: int, ordinal: int) -> int:
    """The inverse of `Mixture.locate`: the sample of the run that is the source's `ordinal`-th.

    In a block, source s takes `count` of the `left` positions that earlier sources have left: those where
    (position * count + phase) // left increases. The place of an increase has a closed form, and so has the place of
    the positions in between, which later sources are numbered by.
    """
    counts = mixture.counts.tolist()
    block, nth = divmod(ordinal - mixture.start.read.get(mixture.names[source], 0), counts[source])
    lefts = [mixture.block_length - sum(counts[:s]) for s in range(source + 1)]
    phases = [int(mix(np.array([block], dtype=np.uint64) + mixture.keys[s])[0]) % left for s, left in enumerate(lefts)]
    # The smallest position with (position + 1) * count + phase >= (nth + 1) * left.
    position = -(-((nth + 1) * lefts[source] - phases[source]) // counts[source]) - 1
    for s in range(source - 1, -1, -1):
        # The position-th of those not taken: the smallest m with m - (m * count + phase) // left > position, less 1.
        position = (position * lefts[s] + phases[s]) // (lefts[s] - counts[s])
    return mixture.start.sample + block * mixture.block_length + position
