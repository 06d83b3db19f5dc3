"""Turns the order of samples into a rank's micro-batches, prepared ahead by one background thread.

The run fixes the order (see `order`); a rank only picks its part. Step t of the run holds the samples [t G, (t + 1) G),
where G is training.global_batch_size. They are split into micro-steps of dp x b samples, where b is
training.micro_batch_size, and rank r takes the r-th b of each. A step therefore has the same samples at any number of
ranks and any micro-batch size, and one counter is the run's whole position in its data.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from configs.architectures.llama_keys import n_further
from configs.errors import ConfigError, UserError
from configs.layout import micro_batch_size
from configs.own_code import is_import_path
from configs.schema import Config
from configs.schema import Source as SourceConfig
from trainer.data.order import Mixture, Start
from trainer.data.packing import PackedSource, packed_for
from trainer.data.prefetch import Prefetcher
from trainer.data.sources import PADDING, OwnSource, SampleSource, SyntheticSource, TokenSource, known
from trainer.data.text.streaming import TextSource, merge_states
from trainer.data.token_file import TokenFolder
from trainer.data.tokenizer import Tokenizer, load_tokenizer

IGNORED = -100
"""The target that counts in no loss (the default of torch's cross entropies)."""
_PREFETCHED_STEPS = 2
_SAMPLES_PER_PLAN = 1024  # samples whose order is computed at once: a call costs much more than a sample
_NO_SAMPLE = -1
_EXPECTED_SAMPLES = 128
"""The most windows that are requested before they are read, if that takes long, beside those of the next step: half of
what a process keeps in memory, so that they are still there when they are read."""
_EXPECTED_TOKENS = 1 << 18
"""The same limit in tokens."""
Located = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A step's samples, the index of each one's source, and its address there, of shape (micro-batches, micro_batch)."""


@dataclass(frozen=True)
class MicroBatch:
    """The samples that a rank computes at once; all tensors are int64 of shape (micro_batch, seq_len)."""

    tokens: torch.Tensor
    targets: torch.Tensor
    """The token after each token, or IGNORED."""
    positions: torch.Tensor | None
    """Position within the part of the document that is in the window, from 0; only with data.document_mask."""
    document_ids: torch.Tensor | None
    """The document's number within its window, from 0; only with data.document_mask."""
    samples: list[int]
    """Indices of the samples in the run; further rows are padding, with all targets IGNORED."""
    source: str | None = None
    """Name of the source that all samples are from, as in a validation; None: several, or no sample."""
    further: torch.Tensor | None = None
    """What each module that predicts further tokens (model.multi_token) sees at each token, and its target, or IGNORED:
    (micro_batch, seq_len, depth, 2); only for a model with such modules."""

    def digest(self) -> int:
        """The sum of a 32-bit hash of each sample with its number: no cutting of a batch changes the sum over it."""
        tensors = [tensor for tensor in (self.tokens, self.targets, self.positions) if tensor is not None]
        total = 0
        for row, sample in enumerate(self.samples):
            content = b"".join(tensor[row].numpy().tobytes() for tensor in tensors)
            total += xxhash.xxh3_64_intdigest(content, seed=sample) >> 32
        return total

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Copy to `device`, except the document ids, which are counted first; copies from pinned memory don't block."""
        names = ("tokens", "targets", "positions", "further")
        tensors = {name: t.to(device, non_blocking=True) for name in names if (t := getattr(self, name)) is not None}
        return replace(self, **tensors)


class Step(NamedTuple):
    """One optimizer step's micro-batches, and the sources' states after they were read."""

    micro_batches: list[MicroBatch]
    states: dict[str, dict[str, Any]]


@dataclass(eq=False)
class BatchReader:
    """Reads the samples of a mixture of sources into micro-batches, of windows of seq_len + 1 tokens."""

    mixture: Mixture
    sources: dict[str, SampleSource]
    """Each source by its name, in the mixture's order."""
    seq_len: int
    document_mask: bool
    pin_memory: bool
    n_further: int
    """Targets of each token beyond the next one (`MicroBatch.further`)."""

    def steps(self, plans: Iterable[np.ndarray]) -> Iterator[Step]:
        """Read samples, of shape (steps, micro-batches, micro_batch) each; _NO_SAMPLE becomes padding."""
        for rows in self._announced(self._located(plans)):
            yield Step([self._micro_batch(*row) for row in zip(*rows, strict=True)], self.states())

    def _located(self, plans: Iterable[np.ndarray]) -> Iterator[Located]:
        """The samples of each step, with their sources and addresses."""
        for samples in plans:
            yield from zip(samples, *self.locate(samples), strict=True)

    def _announced(self, steps: Iterator[Located]) -> Iterator[Located]:
        """The same steps, of which sources that are slow to read know a while before each is read."""
        expect = {
            index: source.expect
            for index, source in enumerate(self.sources.values())
            if isinstance(source, TokenSource) and source.folder.place.is_far
        }
        if not expect:
            yield from steps
            return
        most = min(_EXPECTED_SAMPLES, _EXPECTED_TOKENS // self.seq_len)
        ahead: deque[Located] = deque()
        for step in steps:
            ahead.append(step)
            for source, address in zip(step[1].flat, step[2].flat, strict=True):
                if source in expect:
                    expect[source](int(address))
            if len(ahead) * step[0].size > max(step[0].size, most):
                yield ahead.popleft()
        yield from ahead

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The index of each sample's source (-1 for padding), and the sample's address there."""
        sources, ordinals = self.mixture.locate(samples)
        sources[samples == _NO_SAMPLE] = -1
        addresses = np.zeros_like(ordinals)
        for index, source in enumerate(self.sources.values()):
            chosen = sources == index
            if chosen.any():
                addresses[chosen] = source.addresses(ordinals[chosen])
        return sources, addresses

    @property
    def start(self) -> Start:
        """Where the mixture starts."""
        return self.mixture.start

    def states(self) -> dict[str, dict[str, Any]]:
        """The sources' states, by name."""
        return {name: source.state() for name, source in self.sources.items()}

    def check_unchanged(self) -> None:
        """Raise UserError if the content of a source's files has changed since the start."""
        for source in self.sources.values():
            source.check_unchanged()

    def _micro_batch(self, samples: np.ndarray, sources: np.ndarray, addresses: np.ndarray) -> MicroBatch:
        windows = np.zeros((len(samples), self.seq_len + 1), dtype=np.int64)
        starts = np.zeros(windows.shape, dtype=bool) if self.document_mask else None
        by_index = list(self.sources.values())
        given: dict[int, np.ndarray] = {}  # targets that are not just the next tokens
        for row, (index, address) in enumerate(zip(sources.tolist(), addresses.tolist(), strict=True)):
            if index >= 0:
                own_targets = by_index[index].read(address, windows[row], None if starts is None else starts[row])
                if own_targets is not None:
                    given[row] = own_targets
        targets = self._tensor(windows[:, 1:])
        targets[torch.from_numpy((sources < 0)[:, None] | (windows[:, 1:] == PADDING))] = IGNORED
        _fill_padding(windows)
        positions = document_ids = None
        if starts is not None:
            targets[torch.from_numpy(starts[:, 1:])] = IGNORED
            positions, document_ids = map(self._tensor, _documents(starts[:, :-1]))
        following = targets.numpy().copy() if self.n_further else targets.numpy()
        for row, own_targets in given.items():
            targets[row] = torch.from_numpy(np.where(own_targets < 0, IGNORED, own_targets))
            if self.n_further:
                tokens_behind = known(own_targets)
                following[row] = np.where(tokens_behind == PADDING, IGNORED, tokens_behind)
        kept = samples[samples != _NO_SAMPLE].tolist()
        names = list(self.sources)
        read_from = np.unique(sources[sources >= 0]).tolist()
        source = names[read_from[0]] if len(read_from) == 1 else None
        tokens = self._tensor(windows[:, :-1])
        further = None
        if self.n_further:
            behind = following, targets.numpy()
            further = self._tensor(further_tokens(windows[:, :-1], *behind, document_ids, self.n_further))
        return MicroBatch(tokens, targets, positions, document_ids, kept, source, further)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        """A contiguous copy, in pinned memory if it goes to a GPU."""
        return torch.empty(array.shape, dtype=torch.int64, pin_memory=self.pin_memory).copy_(torch.from_numpy(array))


def _fill_padding(windows: np.ndarray) -> None:
    """Repeat each window's own tokens in its padding, which nothing before it sees; a window without any has zeros.

    A router counts them with the text. One token for all padding would have one choice of experts: these would have
    less of the text, by the biases or the auxiliary loss.
    """
    for window in windows:
        is_padding = window == PADDING
        if is_padding.any():
            window[is_padding] = np.resize(window[~is_padding], is_padding.sum())


def further_tokens(
    tokens: np.ndarray,
    following: np.ndarray,
    targets: np.ndarray,
    document_ids: torch.Tensor | None,
    depth: int,
) -> np.ndarray:
    """The token that each module sees at each token, and its target: (batch, seq, depth, 2).

    Both are IGNORED beyond the window, in another document, or where the next tokens are not the window's, as at the
    border of two places of a source. A token that gives no loss is seen, and is no target. They are computed before
    sequences are cut for any mesh.

    Args:
        tokens: (batch, seq).
        following: (batch, seq), the token after each, whether it gives loss or not, or IGNORED.
        targets: (batch, seq), the same without those that give none.
        document_ids: (batch, seq); None without a mask.
        depth: how many tokens beyond the next one.
    """
    seq_len = tokens.shape[1]
    follows = following[:, :-1] == tokens[:, 1:]
    if document_ids is not None:
        ids = document_ids.numpy()
        follows &= ids[:, :-1] == ids[:, 1:]
    seen, goals = found = np.full((2, *targets.shape, depth), IGNORED, dtype=np.int64)
    unbroken = np.ones_like(targets, dtype=bool)
    for distance in range(min(depth + 1, seq_len)):
        if distance > 0:
            unbroken = unbroken[:, :-1] & follows[:, distance - 1 :]
            goals[:, : seq_len - distance, distance - 1] = np.where(unbroken, targets[:, distance:], IGNORED)
        if distance < depth:
            seen[:, : seq_len - distance, distance] = np.where(unbroken, following[:, distance:], IGNORED)
    return np.moveaxis(found, 0, -1)


def _documents(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions in, and numbers of, the documents that start where `starts`, bool (batch, seq), is set."""
    index = np.arange(starts.shape[1])
    begins = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    return index - begins, np.cumsum(starts, axis=1) - starts[:, :1]


@dataclass(eq=False)
class DataLoader:
    """A rank's optimizer steps, each a list of micro-batches.

    In training, iteration is endless and continues where it was; in validation, each `iter` begins a new pass.
    """

    make_steps: Callable[[int], Iterator[Step]]
    """The steps from a sample on, which `reader` reads."""
    reader: BatchReader
    next_sample: int
    samples_per_step: int
    restarts: bool
    """Whether each `iter` begins a new pass."""
    order: dict[str, Any]
    """What `_order_of` returns."""
    left: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The states of sources that earlier stages of the run have read."""
    _prefetcher: Prefetcher[Step] | None = None

    def __post_init__(self) -> None:
        self._states = self.reader.states()

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        if self.restarts:
            self.close()
        return self

    def __next__(self) -> list[MicroBatch]:
        """The next step's micro-batches; raises what reading them raised."""
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(partial(self.make_steps, self.next_sample), _PREFETCHED_STEPS)
        step = next(self._prefetcher)
        self.next_sample += self.samples_per_step
        self._states = step.states
        return step.micro_batches

    def state_dict(self) -> dict[str, Any]:
        """The run's position in its data after the steps returned so far, as JSON.

        `next_sample` alone determines what comes next, in the order that `order` describes. `sources` makes resuming
        there fast, and reveals a change of the data. `merge_state_dicts` merges the states of several ranks.
        """
        start = self.reader.start.to_json()
        position = {"next_sample": self.next_sample, "order": self.order, "sources": self.left | self._states}
        return position | ({"start": start} if start else {})

    def check_unchanged(self) -> None:
        """Raise UserError if token files have changed since they were opened, so that their fingerprint is wrong."""
        self.reader.check_unchanged()

    def close(self) -> None:
        """End the background thread."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None


def build_loader(
    config: Config,
    dp_rank: int,
    dp_size: int,
    start_sample: int,
    validation: bool = False,
    states: dict[str, dict[str, Any]] | None = None,
    order: dict[str, Any] | None = None,
    start: Start | None = None,
) -> DataLoader:
    """The loader of rank `dp_rank` of `dp_size` data-parallel ranks.

    Args:
        start_sample: the first sample; must be at the end of a step.
        validation: read validation.sequences samples of validation.sources instead, one source after the other. Every
            pass is the same, and has the same number of micro-batches on all ranks (a source's last may be padded).
        states, order: on a resume, `sources` and `order` of the merged state dict.
        start: where the mixture starts, if the run had another one before.

    Raises:
        ConfigError: the weights differ too much, the tokenizer's size is not the model's, the samples have another
            order than `order`, or a validation has no sample of one of its sources.
        UserError: data is missing, damaged, too short, or (unless job.allow_run_change) differs from `states`' data.
    """
    states = states or {}
    start = start or Start()
    sources = _build_sources(config, validation, states, start)
    configs = config.validation.sources if validation else config.data.sources
    mixture = Mixture([c.name for c in configs], [c.weight for c in configs], _seed(config, validation), start)
    own_order = _order_of(config, mixture, sources)
    if order is not None:
        _check_same_order(order, own_order)
    plan = partial(_training_samples, config, dp_rank, dp_size)
    pin_memory = config.job.device != "cpu" and torch.cuda.is_available()
    further = 0 if validation else n_further(config.model)
    seq_len = config.training.seq_len
    reader = BatchReader(mixture, sources, seq_len, config.data.document_mask, pin_memory, further)
    if validation:
        # Makes the sources check now, and on all ranks, that they have enough samples.
        read_from, _ = reader.locate(np.arange(config.validation.sequences))
        _check_all_are_read(config, read_from)
        plan = partial(_validation_samples, config, dp_rank, dp_size, read_from)
    device = torch.cuda.current_device() if pin_memory else None

    def make_steps(first_sample: int) -> Iterator[Step]:
        if device is not None:
            torch.cuda.set_device(device)  # a new thread defaults to GPU 0, and pinning would open a context there
        yield from reader.steps(plan(first_sample))

    if validation:
        return DataLoader(make_steps, reader, 0, 0, restarts=True, order=own_order)
    left = {name: state for name, state in states.items() if name not in sources}
    return DataLoader(make_steps, reader, start_sample, config.training.global_batch_size, False, own_order, left)


def merge_state_dicts(state_dicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge all ranks' state dicts after the same step into one."""
    names = state_dicts[0]["sources"]
    sources = {name: merge_states([each["sources"][name] for each in state_dicts]) for name in names}
    return {**state_dicts[0], "sources": sources}


def _training_samples(config: Config, dp_rank: int, dp_size: int, start_sample: int) -> Iterator[np.ndarray]:
    """A rank's samples from `start_sample` on, endlessly: (steps, micro-batches, micro_batch) at a time."""
    size = config.training.global_batch_size
    micro_batch = micro_batch_size(config.training)
    slots = np.arange(size).reshape(-1, dp_size, micro_batch)[:, dp_rank]
    n_steps = max(1, _SAMPLES_PER_PLAN // slots.size)
    while True:
        yield start_sample + size * np.arange(n_steps)[:, None, None] + slots
        start_sample += n_steps * size


def _validation_samples(
    config: Config, dp_rank: int, dp_size: int, sources: np.ndarray, start_sample: int
) -> Iterator[np.ndarray]:
    """A rank's samples of a validation: for each source (steps, 1, micro_batch), padded with _NO_SAMPLE.

    A micro-batch has one source's samples only, so that its loss is that source's. `sources` holds each sample's.
    """
    at_once = dp_size * micro_batch_size(config.training)
    for source in np.unique(sources):
        samples = start_sample + np.flatnonzero(sources[start_sample:] == source)
        padding = np.full(-len(samples) % at_once, _NO_SAMPLE)
        yield np.concatenate((samples, padding)).reshape(-1, dp_size, at_once // dp_size)[:, dp_rank : dp_rank + 1]


def _check_all_are_read(config: Config, sources: np.ndarray) -> None:
    """Raise ConfigError if one of validation.sources is the source of no sample."""
    for index, source in enumerate(config.validation.sources):
        if not np.any(sources == index):
            raise ConfigError(
                f"validation.sequences {config.validation.sequences} has no sequence of the source {source.name!r} "
                f"(weight {source.weight:g}); raise validation.sequences, or that weight"
            )


def _seed(config: Config, validation: bool) -> int:
    """The seed of the order; runs with different seeds are validated on the same sequences."""
    return 0 if validation else config.training.seed


def _build_sources(
    config: Config, validation: bool, states: dict[str, dict[str, Any]], start: Start
) -> dict[str, SampleSource]:
    configs = config.validation.sources if validation else config.data.sources
    tokenizer = None
    if config.tokenizer.path is not None and any(source.kind != "synthetic" for source in configs):
        tokenizer = load_tokenizer(config.tokenizer.path, config.model.vocab_size)
    sources = {
        source.name: _build_source(source, config, validation, tokenizer, states.get(source.name), start)
        for source in configs
    }
    if not config.job.allow_run_change:
        _check_unchanged(sources, states)
    return sources


def _build_source(
    source: SourceConfig,
    config: Config,
    validation: bool,
    tokenizer: Tokenizer | None,
    state: dict[str, Any] | None,
    start: Start,
) -> SampleSource:
    seq_len = config.training.seq_len
    earlier = start.lengths.get(source.name, ())
    vocab_size = config.model.vocab_size
    seed = _seed(config, validation)
    if is_import_path(source.kind):
        return OwnSource(source, seq_len, vocab_size, seed, earlier)
    if source.kind == "synthetic":
        return SyntheticSource(source.name, vocab_size, seed, source.document_length)
    assert source.path is not None  # configs.checks ensures it, and text's tokenizer
    if source.kind == "tokens":
        folder = TokenFolder(source.path, vocab_size, tokenizer.hash if tokenizer else None, data=config.data)
        packed = packed_for(folder.place)
        if packed not in (None, seq_len) and source.name not in start.read:
            raise UserError(
                f"{source.path}: packed for training.seq_len = {packed}, but the job has {seq_len}; its documents fit "
                f"windows of that length only: set training.seq_len = {packed}, or prepare the text again"
            )
        if packed is not None and not source.shuffle:
            raise UserError(
                f"{source.path}: packed by best fit, longest documents first, so with shuffle = false the source would "
                "not have the order of its text; prepare the folder without packing, or leave shuffle out"
            )
        kind = TokenSource if packed is None else PackedSource
        return kind(source.name, folder, seq_len, seed, validation, earlier, source.shuffle)
    assert tokenizer is not None
    return TextSource(source.path, source.text_key, tokenizer, seq_len, not validation, state, earlier)


def _check_unchanged(sources: dict[str, SampleSource], states: dict[str, dict[str, Any]]) -> None:
    """Raise UserError if a source's content has changed since its state was saved."""
    for name, source in sources.items():
        if name in states and states[name]["fingerprint"] != source.state()["fingerprint"]:
            raise UserError(
                f"the data of the source {name!r} has changed since the checkpoint, so the run would not continue with "
                "the samples that it has not seen; restore the old data, or set job.allow_run_change = true (token "
                "files must have the same length as before)"
            )


def _order_of(config: Config, mixture: Mixture, sources: dict[str, SampleSource]) -> dict[str, Any]:
    """Everything that decides which sample has which number, except the content of the data; as JSON."""
    order: dict[str, Any] = {"training.seq_len": config.training.seq_len, "training.seed": config.training.seed}
    for index, (name, source) in enumerate(sources.items()):
        share = f"{mixture.counts[index]} of {mixture.block_length} samples"
        order[f"data.sources.{index}"] = ", ".join(filter(None, (name, share, source.layout)))
    return order


def _check_same_order(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ConfigError unless the samples have the same numbers as when `before` was saved."""
    lines = [
        f"\n  {key}: {before.get(key, '(none)')} -> {now.get(key, '(none)')}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
    if lines:
        raise ConfigError(
            f"the samples of this run now come in another order than at the checkpoint:{''.join(lines)}\n"
            "Resuming in the new order would repeat one part of the epoch and skip another, so job.allow_run_change "
            "does not cover it. Change it back; or let keel fork begin another run at this checkpoint, whose sources "
            "go on where this run has left them; or start a new run with these weights: --checkpoint.init_from "
            "CHECKPOINT --job.output_dir NEW_FOLDER (its optimizer, schedule and data start at the beginning)"
        )
