"""Sequences change their length within an epoch: each input is read once, and its target is the source's next token."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from trainer.data.lengths import Lengths, Read, Rest, Whole
from trainer.data.order import Mixture, Start, derive_key, permute
from trainer.data.sources import PADDING, TokenSource

PACKED_FOR = 4


@dataclass
class Numbers:
    """A folder whose tokens are their own numbers; every seventh begins a document."""

    n_tokens: int
    path: Path = Path("numbers")
    fingerprint: str = ""

    def read_with_mask(self, start, length):
        assert start >= 0
        assert start + length <= self.n_tokens
        return np.arange(start, start + length), None

    def document_starts(self, start, length):
        return np.flatnonzero(np.arange(start, start + length) % 7 == 0)

    def check_unchanged(self):
        pass


@dataclass
class Reader:
    """What a source must read, by counting alone: which inputs are left of the epoch."""

    n_inputs: int
    left: set[int] = field(default_factory=set)
    epochs: int = 0

    def read(self, inputs):
        if len(self.left) < len(inputs):  # the rest is shorter than a window
            self.left = set(range(self.n_inputs))
            self.epochs += 1
        assert len(set(inputs)) == len(inputs)
        assert self.left.issuperset(inputs)
        self.left.difference_update(inputs)


def train(plan, sizes, seed, masked):
    """Read the stages of a plan, (seq_len, samples, weights); returns the epochs that each source has begun."""
    readers = {name: Reader(size - 1) for name, size in sizes.items()}
    start = Start()
    for number, (seq_len, n_samples, weights) in enumerate(plan):
        mixture = Mixture(list(weights), list(weights.values()), seed, start)
        sources = [
            TokenSource(name, Numbers(sizes[name]), seq_len, seed, earlier=start.lengths.get(name, ()))
            for name in weights
        ]
        assert "packed" not in weights or "packed" not in start.lengths  # its windows stay as they are
        samples = start.sample + np.arange(n_samples)
        of, ordinals = mixture.locate(samples)
        addresses = np.empty_like(ordinals)
        for index, source in enumerate(sources):
            addresses[of == index] = source.addresses(ordinals[of == index])
        for index, address in zip(of.tolist(), addresses.tolist(), strict=True):
            tokens = np.zeros(seq_len + 1, dtype=np.int64)
            starts = np.zeros(seq_len + 1, dtype=bool) if masked else None
            targets = sources[index].read(address, tokens, starts)
            inputs = tokens[:-1]
            if targets is None:
                targets = np.where(starts[1:], PADDING, tokens[1:]) if masked else tokens[1:]
            following = inputs + 1
            assert (targets == (np.where(following % 7 == 0, PADDING, following) if masked else following)).all()
            if masked:
                begins = (inputs % 7 == 0) | (np.diff(inputs, prepend=-2) != 1)
                begins[0] = inputs[0] % 7 == 0 or starts[0]  # the first token begins a document in any case
                assert (starts[:-1] == begins).all()
            readers[list(weights)[index]].read(inputs.tolist())
        if number + 1 < len(plan):
            read = mixture.read_before(start.sample + n_samples)
            start = start.following(start.sample + n_samples, read, (seq_len, plan[number + 1][0]))
    return {name: reader.epochs for name, reader in readers.items()}


def random_plan(dice):
    """Sources of token files, and one that is packed for sequences of PACKED_FOR, which other stages leave out."""
    sizes = {name: dice.randint(9, 60) for name in ("a", "b", "c", "packed")}
    plan = []
    for _ in range(dice.randint(2, 4)):
        seq_len = dice.choice((*range(1, 9), PACKED_FOR, PACKED_FOR))
        names = dice.sample(sorted(sizes.keys() - ({"packed"} if seq_len != PACKED_FOR else set())), dice.randint(1, 3))
        weights = {name: dice.choice((1.0, 2.0, 5.0)) for name in names}
        plan.append((seq_len, dice.randint(0, 12), weights))
    return plan, sizes


@pytest.mark.parametrize("n_plans", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_input_is_repeated_or_left_out_in_random_plans(n_plans):
    """And every target is the source's next token; or none, where documents are separate and it begins one."""
    dice = random.Random(n_plans)
    epochs = 0
    for seed in range(n_plans):
        plan, sizes = random_plan(dice)
        epochs = max(epochs, *train(plan, sizes, seed, masked=seed % 2 == 1).values())
    assert epochs > 2


def test_a_source_that_was_left_out_meanwhile_goes_on_in_its_windows():
    start = Start().following(10, {"a": 10}, (4, 8))
    assert start.lengths == {"a": [[4, 10]]}
    start = start.following(20, {"a": 10, "b": 10}, (8, 4))
    assert start.lengths == {"b": [[8, 10]]}


def test_lengths_of_equal_windows_are_the_plain_order_from_the_next_epoch_on():
    n_inputs, seed = 103, 5
    lengths = Lengths("a", n_inputs, seed, 5, [Read(4, 7)])
    assert lengths.rest.length == n_inputs - 28
    assert lengths.n_rest == 15
    is_rest, windows = lengths.locate(np.arange(7, 7 + 15 + 20))
    assert is_rest.tolist() == [True] * 15 + [False] * 20
    assert windows[15:].tolist() == permute(np.arange(20), 20, derive_key("epoch", seed, "a", 1)).tolist()


@pytest.mark.parametrize("n_windows", [1, 2047, 2048, 5000])
def test_the_unread_windows_are_found_by_their_rank(n_windows):
    n_read = n_windows // 3
    rest = Rest(Whole(n_windows * 3 + 2), 3, n_read, key=9)
    order = permute(np.arange(n_windows), n_windows, 9)
    unread = np.sort(order[n_read:])
    expected = [token for window in unread for token in range(3 * window, 3 * window + 3)]
    expected += [3 * n_windows, 3 * n_windows + 1]
    assert rest.length == len(expected)
    assert rest.tokens(np.arange(rest.length)).tolist() == expected
