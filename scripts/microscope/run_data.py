"""A run's data as its order has them: what a step reads, when a token is trained on, and how often a source was."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from checkpoint.find import kept_tokenizer, require_run
from configs.errors import UserError
from configs.load import load
from configs.schema import Source
from scripts.microscope.history import History, read_history
from scripts.microscope.inverse import ordinals, sample_of
from trainer.data.order import Mixture
from trainer.data.packing import PackedSource, packed_for
from trainer.data.sources import TokenSource
from trainer.data.token_file import TokenFolder
from trainer.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Reading:
    """A sample of the run, and what it reads."""

    sample: int
    source: str
    epoch: int | None
    """The source's epoch, from 0; None if the source has no epochs."""
    tokens: tuple[int, int] | None
    """The window's tokens [start, stop) in the source's folder; None if the source has no token files."""


@dataclass(frozen=True)
class Use:
    """A sample that trains on a token."""

    epoch: int
    sample: int
    step: int | None
    """The step that trains on it; None if the run passed the sample over after a spike of the loss."""


@dataclass(frozen=True)
class Ledger:
    """The part of a source that a run has read."""

    source: str
    samples: int
    tokens: int
    """Positions of the samples, with the padding of packed windows."""
    passed_over: int
    """Samples that the run passed over after spikes of the loss; they count in no other figure."""
    epochs: float | None
    """Times that the source was read; None if it has no epochs."""


class RunData:
    """The data of the run in a folder."""

    def __init__(self, folder: Path) -> None:
        """Read the run's config and history.

        Raises:
            UserError: the folder is not a run's, or its newest checkpoint is damaged.
        """
        require_run(folder)
        self._folder = folder
        self.config = load(str(folder / "config.toml"), is_stored=True).config
        self.history: History = read_history(folder, self.config)
        self.sources: dict[str, Source] = {source.name: source for source in self.config.data.sources}
        weights = [source.weight for source in self.sources.values()]
        self.mixture = Mixture(list(self.sources), weights, self.config.training.seed, self.history.start)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer; None if it has none."""
        path = self.config.tokenizer.path and (kept_tokenizer(self._folder) or self.config.tokenizer.path)
        return load_tokenizer(path, self.config.model.vocab_size) if path else None

    @cache  # noqa: B019 - lives as long as the process
    def tokens_of(self, name: str) -> TokenSource:
        """A source of token files, opened without reading its tables (unless it is packed) or tokens.

        Raises:
            UserError: there is no such source, or it is not one of token files.
        """
        source = self.sources.get(name)
        if source is None:
            raise UserError(f"the run has no source {name!r}; its sources: {', '.join(self.sources)}")
        if source.kind != "tokens":
            raise UserError(
                f'the source {name!r} is of kind {source.kind!r}: only documents of token files (kind = "tokens") can '
                "be looked up"
            )
        assert source.path is not None  # configs.checks ensures it
        is_packed = packed_for(Path(source.path)) is not None  # then the lengths of all documents decide the windows
        folder = TokenFolder(source.path, self.config.model.vocab_size, check_content=is_packed)
        kind = PackedSource if is_packed else TokenSource
        return kind(name, folder, self.config.training.seq_len, self.config.training.seed)

    def readings(self, step: int) -> Iterator[Reading]:
        """The data that each sample of a step reads, in order.

        Raises:
            UserError: the step was trained with the mixture of the run that this one was forked from.
        """
        samples = np.array(self.history.samples(step))
        if samples[0] < self.mixture.start.sample:
            raise UserError(
                f"step {step}: this run was forked from another at sample {self.mixture.start.sample} and has its own "
                "mixture from there on; ask for an earlier step in that run's folder"
            )
        names = list(self.sources)
        for sample, index, ordinal in zip(samples.tolist(), *self.mixture.locate(samples), strict=True):
            name = names[index]
            if self.sources[name].kind != "tokens":
                yield Reading(sample, name, None, None)
                continue
            source = self.tokens_of(name)
            window = int(source.epochs.window(np.array([ordinal]))[0])
            yield Reading(sample, name, int(ordinal) // source.n_windows, source.span(window))

    def uses(self, name: str, start: int, stop: int) -> Iterator[Use]:
        """The samples that train on a target in tokens [start, stop) of a source, up to training.steps, in order.

        A window's targets are its tokens but the first, and so a token is trained on once per epoch: the first of the
        source (of each window, if it is packed), and those after the last whole window, never. Of a run that was forked
        with another mixture, only its own samples.
        """
        source = self.tokens_of(name)
        windows = source.windows_of(start, stop)
        end = self.history.samples(max(self.config.training.steps, self.history.last_step)).stop
        index = list(self.sources).index(name)
        first = self.mixture.start.read.get(name, 0)
        n_ordinals = self._read_before(name, end)
        for epoch in range(first // source.n_windows, -(-n_ordinals // source.n_windows)):
            found = np.sort(ordinals(source.epochs, windows, epoch))
            for ordinal in found[(found >= first) & (found < n_ordinals)].tolist():
                sample = sample_of(self.mixture, index, ordinal)
                yield Use(epoch, sample, self.history.step_of(sample))

    def ledger(self, step: int) -> list[Ledger]:
        """The part of each source that the run has read by the end of a step."""
        trained = self.history.trained(step)
        seq_len = self.config.training.seq_len
        rows = []
        for name, source in self.sources.items():
            counts = [[self._read_before(name, n) for n in (each.start, each.stop)] for each in trained]
            samples = sum(stop - start for start, stop in counts)
            furthest = counts[-1][1] if counts else 0
            epochs = samples / self.tokens_of(name).n_windows if source.kind == "tokens" else None
            rows.append(Ledger(name, samples, samples * seq_len, furthest - samples, epochs))
        return rows

    def _read_before(self, name: str, sample: int) -> int:
        """How many samples of a source come before `sample`, in a forked run also those of the run that it left."""
        return self.mixture.read_before(sample)[name] if sample >= self.mixture.start.sample else 0
