"""Sequences change their length within an epoch: each input is read once, and its target is the source's next token."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from scripts.microscope.inverse import ordinals_after
from trainer.data.lengths import Lengths, Read, Rest, Whole
from trainer.data.order import Mixture, Start, derive_key, permute
from trainer.data.packing import PackedSource, window_bounds
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
class PackedNumbers(Numbers):
    """The same, packed for sequences of PACKED_FOR, with documents of random lengths; its own place."""

    name = "numbers"

    def __post_init__(self):
        dice = random.Random(self.n_tokens)
        lengths = [dice.randint(1, PACKED_FOR + 1) for _ in range(self.n_tokens)]
        bounds = np.cumsum([0, *lengths])
        self.bounds = np.append(bounds[bounds < self.n_tokens], self.n_tokens)
        self.windows = window_bounds(self.bounds, PACKED_FOR + 1)
        self.place = self

    def get(self, name, limit):
        return json.dumps({"seq_len": PACKED_FOR}).encode()

    def documents_by_file(self):
        return [(0, self.bounds)]

    def document_starts(self, start, length):
        return np.flatnonzero(np.isin(np.arange(start, start + length), self.bounds))


@dataclass
class Reader:
    """What a source must read, by counting alone: which inputs are left of the epoch."""

    n_inputs: int
    """With padding."""
    tokens: set[int]
    """The inputs without padding."""
    n_left: int = 0
    left: set[int] = field(default_factory=set)
    epochs: int = 0

    def read(self, inputs):
        if self.n_left < len(inputs):  # the rest is shorter than a window
            assert len(self.left) <= self.n_left
            self.left = set(self.tokens)
            self.n_left = self.n_inputs
            self.epochs += 1
        self.n_left -= len(inputs)
        found = [token for token in inputs if token != PADDING]
        assert len(set(found)) == len(found)
        assert self.left.issuperset(found)
        self.left.difference_update(found)


@dataclass
class Source:
    """A source of numbers, and what its tokens are."""

    name: str
    n_tokens: int

    def __post_init__(self):
        is_packed = self.name == "packed"
        self.kind = PackedSource if is_packed else TokenSource
        self.folder = PackedNumbers(self.n_tokens) if is_packed else Numbers(self.n_tokens)
        self.begins = np.zeros(self.n_tokens + 1, dtype=bool)
        """Whether a document begins with each token; PADDING is the last."""
        self.begins[self.folder.document_starts(0, self.n_tokens)] = True
        ends = self.folder.windows if is_packed else np.array([0, self.n_tokens])
        self.targets = np.append(np.arange(1, self.n_tokens + 1), PADDING)
        """The target of each token, and of PADDING."""
        self.targets[ends[1:] - 1] = PADDING
        seq_len = PACKED_FOR if is_packed else self.n_tokens - 1
        targets_only = ends[1:][np.diff(ends) == seq_len + 1] - 1
        tokens = set(range(self.n_tokens)) - set(targets_only.tolist())
        self.reader = Reader(seq_len * (len(ends) - 1), tokens)


def train(plan, sizes, seed, masked):
    """Read the stages of a plan, (seq_len, samples, weights); returns the epochs that each source has begun."""
    every = {name: Source(name, size) for name, size in sizes.items()}
    start = Start()
    for number, (seq_len, n_samples, weights) in enumerate(plan):
        mixture = Mixture(list(weights), list(weights.values()), seed, start)
        own = [every[name] for name in weights]
        sources = [
            each.kind(each.name, each.folder, seq_len, seed, False, start.lengths.get(each.name, ()), seed % 3 > 0)
            for each in own
        ]
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
            expected = own[index].targets[inputs]
            assert (targets == (np.where(own[index].begins[expected], PADDING, expected) if masked else expected)).all()
            if masked:
                begins = own[index].begins[inputs] | (np.diff(inputs, prepend=-2) != 1)
                begins[0] = starts[0] or own[index].begins[inputs[0]]  # it begins a document in any case
                is_padding = (inputs == PADDING) & (np.append(0, inputs[:-1]) == PADDING)
                assert (starts[:-1] == begins)[~is_padding].all()
            own[index].reader.read(inputs.tolist())
        if number + 1 < len(plan):
            read = mixture.read_before(start.sample + n_samples)
            start = start.following(start.sample + n_samples, read, (seq_len, plan[number + 1][0]))
    return {name: each.reader.epochs for name, each in every.items()}


def random_plan(dice):
    """Sources of token files, and one that is packed for sequences of PACKED_FOR, which it is first read in."""
    sizes = {name: dice.randint(9, 60) for name in ("a", "b", "c", "packed")}
    plan = [(PACKED_FOR, dice.randint(1, 12), {"packed": 1.0})] if dice.random() < 0.5 else []
    names = sorted(sizes.keys() - (set() if plan else {"packed"}))
    for _ in range(dice.randint(2, 4)):
        seq_len = dice.choice((*range(1, 9), PACKED_FOR, PACKED_FOR))
        weights = {name: dice.choice((1.0, 2.0, 5.0)) for name in dice.sample(names, dice.randint(1, 3))}
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


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("name", ["a", "packed"])
def test_the_samples_that_train_on_a_token_are_found(name, shuffle):
    """After changes of the length, and backward from the token; see `keel data find`."""
    dice = random.Random(name)
    for seed in range(12):
        own = Source(name, dice.randint(30, 60))
        earlier = [(PACKED_FOR, dice.randint(1, 9)), (dice.randint(1, 8), 12)][: dice.randint(1, 2)]
        source = own.kind(name, own.folder, dice.randint(2, 8), seed, earlier=earlier, shuffle=shuffle)
        first, end = earlier[-1][1], earlier[-1][1] + 60
        trained = {token: [] for token in range(own.n_tokens)}
        for ordinal in range(first, end):
            epoch, pieces = source.reads(ordinal)
            for begin, stop in pieces:
                for token in range(begin + 1, stop):
                    trained[token].append((epoch, ordinal))
        assert max(map(len, trained.values())) > 1
        for token, uses in trained.items():
            inputs = source.inputs_before(token, token + 1)
            assert list(ordinals_after(source.lengths, source.epochs, inputs, end)) == uses


def test_a_source_that_is_not_shuffled_is_read_token_by_token():
    """In each epoch from its beginning; where the length of the sequences changes, from the next token on."""
    earlier = []
    inputs = []
    first = 0
    for seq_len, until in ((4, 30), (8, 33), (3, 60)):
        source = TokenSource("a", Numbers(103), seq_len, seed=1, earlier=earlier, shuffle=False)
        for address in source.addresses(np.arange(first, until)).tolist():
            tokens = np.zeros(seq_len + 1, dtype=np.int64)
            source.read(address, tokens, None)
            inputs += tokens[:-1].tolist()
        earlier.append((seq_len, until))
        first = until
    # 30 windows of 4, of which 25 are the first epoch's; 3 of 8; of the 58 inputs that are left, 19 windows of 3.
    assert inputs == [*range(100), *range(20 + 24 + 57), *range(24)]


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
