"""Where windows of tokens come from: a folder of token files, a keyed random number generator, the user's own class.

A source returns windows of seq_len + 1 tokens (the inputs, and the targets one position further) by *address*.
`addresses` maps many ordinals to addresses at once, so that the order's arithmetic is done in bulk; `read` then fetches
one window. Another source, text that is tokenized while training, is in `streaming`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from configs.errors import ConfigError, UserError
from configs.own_code import code_of, reason_of, takes
from configs.schema import Source
from trainer.data.lengths import Lengths, Read
from trainer.data.order import Epochs, derive_key
from trainer.data.token_file import TokenFolder

PADDING = -1  # in place of the tokens that a window lacks
_FIRST_WITHOUT_LOSS = -2


def without_loss(tokens: np.ndarray) -> np.ndarray:
    """Targets for tokens that give no loss: they count in none, and `known` finds the tokens again."""
    return _FIRST_WITHOUT_LOSS - tokens


def known(targets: np.ndarray) -> np.ndarray:
    """The tokens of targets, whether they give loss or not; PADDING for none."""
    return np.where(targets <= _FIRST_WITHOUT_LOSS, _FIRST_WITHOUT_LOSS - targets, targets)


class SampleSource(Protocol):
    """The loader's interface to a source."""

    @property
    def layout(self) -> str:
        """How its data are divided, for people; if this changes, the same ordinal means another window."""

    def addresses(self, ordinals: np.ndarray) -> np.ndarray:
        """The addresses of the source's `ordinals`-th samples; int64 of the same shape.

        Raises:
            UserError: a source that is read only once has no such sample.
        """

    def read(self, address: int, tokens: np.ndarray, starts: np.ndarray | None) -> np.ndarray | None:
        """Fetch a window into `tokens`, int64 of shape (seq_len + 1,); it may end with PADDING.

        If `starts` is given, bool of the same shape and all False, mark the tokens that start a document.

        Returns:
            The targets, int64 of shape (seq_len,), with PADDING for none, and negative (`without_loss`) where the token
            gives no loss; None: they are the tokens from the second on.
        """

    def state(self) -> dict[str, Any]:
        """The source's part of a checkpoint, as JSON: `fingerprint`, a hash of its content, and cursors."""

    def check_unchanged(self) -> None:
        """Raise UserError if files that are read at random have changed since the start."""


class TokenSource:
    """The windows of a folder of token files; window i has inputs [i * seq_len, (i + 1) * seq_len).

    The inputs are the folder's tokens but the last, and the target of each is the next token. So each token but the
    first is predicted once per epoch, and up to seq_len - 1 inputs after the last whole window are not used.
    """

    layout_name = "windows"

    def __init__(
        self,
        name: str,
        folder: TokenFolder,
        seq_len: int,
        seed: int,
        once: bool = False,
        earlier: Sequence[Sequence[int]] = (),
        shuffle: bool = True,
    ) -> None:
        """Read `folder` in epochs keyed by (seed, name).

        Args:
            name, folder, seq_len, seed: as said.
            shuffle: False: read the windows as they lie, in each epoch.
            earlier: how far it was read with windows of other lengths; the fields of each `lengths.Read`.
            once: read a single epoch, in the same order under every seed, for validation. It is shuffled as well,
                because the first windows of a folder are neighbors, and not a fair sample of it.

        Raises:
            UserError: the folder is too short for one window.
        """
        reads = [Read(*each) for each in earlier]
        self.folder = folder
        self._n_inputs = self._count_inputs()
        self.n_windows = self._n_inputs // seq_len
        if self.n_windows < 1:
            raise UserError(
                f"{folder.path}: too short for one window: it has {folder.n_tokens} tokens, and training.seq_len = "
                f"{seq_len} needs {seq_len} + 1 (the last target); prepare more text, or lower training.seq_len"
            )
        self._seq_len = seq_len
        self._once = once
        self._epoch = 0
        order_seed = (0 if once else seed) if shuffle else None
        self.epochs = Epochs(name, self.n_windows, order_seed)
        self.lengths = Lengths(name, self._n_inputs, order_seed, seq_len, reads) if reads else None
        """The order in place of `epochs`, if the source was read with windows of other lengths; otherwise None."""

    @property
    def layout(self) -> str:
        """The number of windows, and whether an epoch permutes them."""
        rest = f", {self.lengths.n_rest} of the rest of an epoch" if self.lengths else ""
        order = ", not shuffled" if self.epochs.seed is None else ""
        return f"{self.n_windows} {self.layout_name}{rest}{order}"

    def addresses(self, ordinals: np.ndarray) -> np.ndarray:
        """The first input of each window; implements `SampleSource`.

        Windows of the rest of an epoch, which may have inputs of several places, are numbered behind all inputs.
        """
        if self._once and ordinals.size and ordinals.max() >= self.n_windows:
            raise UserError(
                f"{self.folder.path}: holds {self.folder.n_tokens} tokens = {self.n_windows} sequences of "
                f"{self._seq_len}; validation.sequences asks for {int(ordinals.max()) + 1}: lower it, or prepare more "
                "text"
            )
        self._check_at_new_epoch(int(ordinals.max(initial=0)) // self.n_windows)
        if self.lengths is None:
            return self.epochs.window(ordinals) * self._seq_len
        is_rest, windows = self.lengths.locate(ordinals)
        return np.where(is_rest, self._n_inputs + windows, windows * self._seq_len)

    def reads(self, ordinal: int) -> tuple[int, list[tuple[int, int]]]:
        """The epoch of the source's `ordinal`-th sample, and the tokens [start, stop) of each piece of its window."""
        address = int(self.addresses(np.array([ordinal]))[0])
        found = [self._tokens_of(*piece) for piece in self.pieces(address)]
        pieces = [(first, first + n) for first, n in found if n]
        if self.lengths is None:
            return ordinal // self.n_windows, pieces
        after = ordinal - self.lengths.first - self.lengths.n_rest
        return self.lengths.epoch + (1 + after // self.n_windows if after >= 0 else 0), pieces

    def inputs_before(self, start: int, stop: int) -> np.ndarray:
        """The inputs whose targets are tokens [start, stop) of the folder; int64."""
        return np.arange(max(0, start - 1), min(self._n_inputs, stop - 1))

    def _count_inputs(self) -> int:
        return self.folder.n_tokens - 1

    def _check_at_new_epoch(self, epoch: int) -> None:
        if self._once or epoch > self._epoch:  # a source read once gets its addresses at the start of each pass
            self._epoch = epoch
            self.check_unchanged()

    def read(self, address: int, tokens: np.ndarray, starts: np.ndarray | None) -> np.ndarray | None:
        """Fetch the window whose first input is `address`."""
        pieces = self.pieces(address)
        if len(pieces) > 1 or address >= self._n_inputs:
            return self._read_pieces(pieces, tokens, starts)
        first, n = self._tokens_of(*pieces[0])
        found, gives_none = self.folder.read_with_mask(first, n)
        tokens[:n] = found
        tokens[n:] = PADDING
        if starts is not None:
            starts[self.folder.document_starts(first, n)] = True
            starts[n : n + 1] = True
        return masked_targets(tokens, gives_none, starts)

    def expect(self, address: int) -> None:
        """Have the window whose first input is `address` brought in the background, which will be read soon."""
        for piece in self.pieces(address):
            self.folder.expect(*self._tokens_of(*piece))

    def pieces(self, address: int) -> list[tuple[int, int]]:
        """The inputs of a window, as ranges [start, stop), in their order."""
        if self.lengths is None or address < self._n_inputs:
            return [(address, address + self._seq_len)]
        inputs = self.lengths.inputs(address - self._n_inputs)
        ends = [*(np.flatnonzero(np.diff(inputs) != 1) + 1).tolist(), len(inputs)]
        return [(int(inputs[a]), int(inputs[b - 1]) + 1) for a, b in pairwise([0, *ends])]

    def _tokens_of(self, start: int, stop: int) -> tuple[int, int]:
        """The first token and the number of tokens of a piece with inputs [start, stop): these, and the last target."""
        return start, stop - start + 1

    def _read_pieces(
        self, pieces: Sequence[tuple[int, int]], tokens: np.ndarray, starts: np.ndarray | None
    ) -> np.ndarray:
        """Fetch a window of several pieces, each of which begins like a document; see `SampleSource.read`."""
        targets = np.full(len(tokens) - 1, PADDING, dtype=np.int64)
        tokens[:] = PADDING
        filled = 0
        for start, stop in pieces:
            first, n = self._tokens_of(start, stop)
            found, gives_none = self.folder.read_with_mask(first, n)
            tokens[filled] = PADDING  # not the last target of the piece before
            tokens[filled : filled + n] = found
            following = found if gives_none is None else np.where(gives_none, without_loss(found), found)
            targets[filled : filled + max(0, n - 1)] = following[1:]
            if starts is not None:
                begins = self.folder.document_starts(first, n)
                starts[filled + begins] = True
                targets[filled + begins[begins > 0] - 1] = PADDING  # as in any window: documents are separate
                starts[filled] = True
                if n <= stop - start:  # the padding is a document, too
                    starts[filled + n] = True
            filled += stop - start
        return targets

    def state(self) -> dict[str, Any]:
        """The folder's fingerprint, and the seed of the order, None if it is not shuffled; there are no cursors."""
        return {"fingerprint": self.folder.fingerprint, "order_seed": self.epochs.seed}

    def check_unchanged(self) -> None:
        """Check the size and modification time of every file; also done at the start of each epoch."""
        self.folder.check_unchanged()


def masked_targets(tokens: np.ndarray, gives_none: np.ndarray | None, starts: np.ndarray | None) -> np.ndarray | None:
    """The targets of a window, as `SampleSource.read` returns them.

    Args:
        tokens: of the window.
        gives_none: which of its first tokens, those before the padding, give no loss; None: no loss mask.
        starts: as for `SampleSource.read`; documents are separate.
    """
    if gives_none is None:
        return None
    targets = tokens[1:].copy()
    masked = targets[: len(gives_none) - 1]
    masked[gives_none[1:]] = without_loss(masked[gives_none[1:]])
    if starts is not None:
        targets[starts[1:]] = PADDING
    return targets


class SyntheticSource:
    """Uniform random tokens, each window keyed by (seed, name, ordinal); for benchmarks and proofs."""

    def __init__(self, name: str, vocab_size: int, seed: int, document_length: int | None = None) -> None:
        """Draw ids below `vocab_size`, in documents of this mean length; None: each window is one document."""
        self._vocab_size = vocab_size
        self._document_length = document_length
        self._key = derive_key("synthetic", seed, name)

    @property
    def layout(self) -> str:
        """Empty, since every window is drawn independently."""
        return ""

    def addresses(self, ordinals: np.ndarray) -> np.ndarray:
        """The ordinals themselves."""
        return ordinals

    def read(self, address: int, tokens: np.ndarray, starts: np.ndarray | None) -> None:
        """Draw window number `address`."""
        generator = np.random.Generator(np.random.Philox(key=np.array([self._key, address], dtype=np.uint64)))
        tokens[:] = generator.integers(0, self._vocab_size, len(tokens))
        if starts is not None and self._document_length is not None:
            starts[:] = generator.random(len(starts)) < 1 / self._document_length

    def state(self) -> dict[str, Any]:
        """The fingerprint: everything besides the seed that the draws depend on."""
        documents = "" if self._document_length is None else f", documents of {self._document_length}"
        return {"fingerprint": f"synthetic, vocabulary {self._vocab_size}{documents}"}

    def check_unchanged(self) -> None:
        """Do nothing: there are no files."""


_METHODS = ("addresses", "check_unchanged", "read", "state")


class OwnSource:
    """A source of the user's own, whose windows are checked: a token that is none would be an error of the device's."""

    def __init__(
        self, settings: Source, seq_len: int, vocab_size: int, seed: int, earlier: Sequence[Sequence[int]] = ()
    ) -> None:
        """Open it: its class is called with these arguments, with `earlier` by name and only if it is not empty.

        Args:
            settings: the source's table in the job.
            seq_len: a window has one token more.
            vocab_size: tokens are below it.
            seed: of the order; 0 for validation.
            earlier: how far it was read with windows of other lengths; the fields of each `lengths.Read`.

        Raises:
            ConfigError: it can't be opened, or lacks a method of `SampleSource`.
        """
        self._name = f'source "{settings.name}" of kind "{settings.kind}"'
        self._vocab_size = vocab_size
        found = code_of(settings.kind)
        if earlier and not takes(settings.kind, "earlier"):
            raise ConfigError(
                f"{self._name} was read in sequences of {earlier[-1][0]} before, and is in sequences of {seq_len} now, "
                "and its class takes no argument `earlier`, by which it could go on (docs/own_models.md); leave it "
                "out, or give it another name, under which it begins again"
            )
        try:
            others = {"earlier": [Read(*each) for each in earlier]} if earlier else {}
            self._source = found(settings, seq_len, vocab_size, seed, **others)
        except UserError:
            raise
        except Exception as error:
            raise ConfigError(f"{self._name} cannot be opened: {reason_of(error)}") from None
        if missing := [name for name in _METHODS if not callable(getattr(self._source, name, None))]:
            raise ConfigError(f"{self._name} lacks {', '.join(missing)} of trainer.data.sources.SampleSource")

    @property
    def layout(self) -> str:
        """Its own; "" if it has none."""
        return str(getattr(self._source, "layout", ""))

    def addresses(self, ordinals: np.ndarray) -> np.ndarray:
        """Its own."""
        return self._source.addresses(ordinals)

    def read(self, address: int, tokens: np.ndarray, starts: np.ndarray | None) -> None:
        """Fetch a window, whose targets are its tokens.

        Raises:
            UserError: it has an id that is no token's.
        """
        self._source.read(address, tokens, starts)
        if tokens.min() < PADDING or tokens.max() >= self._vocab_size:
            wrong = tokens[(tokens < PADDING) | (tokens >= self._vocab_size)][0]
            raise UserError(
                f"{self._name}: the window at {address} has the token {wrong}, and the vocabulary is {self._vocab_size}"
            )

    def state(self) -> dict[str, Any]:
        """Its own, which must have the fingerprint of its content."""
        state = self._source.state()
        if not isinstance(state, dict) or "fingerprint" not in state:
            raise ConfigError(f'{self._name}: state() must return a dict with a "fingerprint" of its content')
        return state

    def check_unchanged(self) -> None:
        """Its own."""
        self._source.check_unchanged()
