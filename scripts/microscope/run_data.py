"""A run's data as its order has them: what a step reads, when a token is trained on, and how often a source was."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from checkpoint.find import kept_tokenizer, require_run
from configs.errors import UserError
from configs.load import load
from configs.run_stages import stage_of, stage_of_position
from configs.schema import Config, Source
from scripts.microscope.history import History, read_history
from scripts.microscope.inverse import ordinals, ordinals_after, sample_of
from trainer.data.order import Mixture, Start
from trainer.data.packing import PackedSource, packed_for
from trainer.data.place import place_of
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
    pieces: Sequence[tuple[int, int]]
    """The window's tokens [start, stop) in the source's folder; several where an epoch goes on in another length, none
    if the source has no token files."""


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


class View:
    """A stretch of the run that reads one mixture in sequences of one length: a stage."""

    def __init__(self, config: Config, start: Start) -> None:
        """See a stage's data from `start` on."""
        self.start = start
        self.seq_len = config.training.seq_len
        self.sources: dict[str, Source] = {source.name: source for source in config.data.sources}
        weights = [source.weight for source in self.sources.values()]
        self.mixture = Mixture(list(self.sources), weights, config.training.seed, start)
        self._config = config

    def next(self, sample: int, config: Config) -> "View":
        """The view of the stage that begins with `sample`."""
        following = View(config, self.start)
        same = (following.seq_len, following.sources, following.mixture.counts.tolist())
        if same == (self.seq_len, self.sources, self.mixture.counts.tolist()):
            return following
        lengths = self.seq_len, following.seq_len
        return View(config, self.start.following(sample, self.mixture.read_before(sample), lengths))

    @cache  # noqa: B019 - lives as long as the process
    def tokens_of(self, name: str) -> TokenSource:
        """A source of token files, opened without reading its tables (unless it is packed) or tokens."""
        path = self.sources[name].path
        assert path is not None  # configs.checks ensures it
        place = place_of(path, self._config.data)
        is_packed = packed_for(place) is not None  # then the lengths of all documents decide the windows
        folder = TokenFolder(place, self._config.model.vocab_size, check_content=is_packed)
        kind = PackedSource if is_packed else TokenSource
        earlier = self.start.lengths.get(name, ())
        shuffle = self.sources[name].shuffle
        return kind(name, folder, self.seq_len, self._config.training.seed, earlier=earlier, shuffle=shuffle)


class RunData:
    """The data of the run in a folder."""

    def __init__(self, folder: Path) -> None:
        """Read the run's config and history.

        Raises:
            UserError: the folder is not a run's, or its newest checkpoint is damaged.
        """
        require_run(folder)
        self._folder = folder
        job = load(str(folder / "config.toml"), is_stored=True)
        self.config = job.config
        self._stages = job.stages
        self.history: History = read_history(folder, job.stages)
        self.views = self._views()
        self.sources: dict[str, Source] = {name: each for view in self.views for name, each in view.sources.items()}

    def _views(self) -> list[View]:
        """The views of all stages; of a forked run, of those since its fork."""
        views = self._chain(0, Start())
        saved = self.history.start
        steps = self.history.last_step
        begins = saved.sample == self.history.samples(steps + 1).start
        now = self._stages.index(stage_of_position(self._stages, steps, begins))
        if views[now].start == saved:
            return views
        return self._chain(now, saved)

    def _chain(self, first: int, start: Start) -> list[View]:
        views = [View(self._stages[first].config, start)]
        for stage in self._stages[first + 1 :]:
            # Of its own first step they may be later ones: the run may have gone back to its border after a spike.
            views.append(views[-1].next(self.history.samples(stage.border.after).stop, stage.config))
        return views

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer; None if it has none."""
        path = self.config.tokenizer.path and (kept_tokenizer(self._folder) or self.config.tokenizer.path)
        return load_tokenizer(path, self.config.model.vocab_size) if path else None

    def tokens_of(self, name: str) -> TokenSource:
        """A source of token files, as its first stage reads it.

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
        return next(view for view in self.views if name in view.sources).tokens_of(name)

    def view_of(self, step: int) -> View:
        """The view of a step's stage.

        Raises:
            UserError: the step was trained with the mixture of the run that this one was forked from.
        """
        gone = len(self._stages) - len(self.views)
        place = self._stages.index(stage_of(self._stages, step)) - gone
        if place < 0 or self.history.samples(step).start < self.views[0].start.sample:
            raise UserError(
                f"step {step}: this run was forked from another at sample {self.views[0].start.sample} and has its own "
                "mixture from there on; ask for an earlier step in that run's folder"
            )
        return self.views[place]

    def readings(self, step: int) -> Iterator[Reading]:
        """The data that each sample of a step reads, in order; raises as `view_of`."""
        view = self.view_of(step)
        samples = np.array(self.history.samples(step))
        names = list(view.sources)
        for sample, index, ordinal in zip(samples.tolist(), *view.mixture.locate(samples), strict=True):
            name = names[index]
            if view.sources[name].kind != "tokens":
                yield Reading(sample, name, None, ())
                continue
            source = view.tokens_of(name)
            yield Reading(sample, name, *source.reads(int(ordinal)))

    def uses(self, name: str, start: int, stop: int) -> Iterator[Use]:
        """The samples that train on a target in tokens [start, stop) of a source, up to training.steps, in order.

        A window's targets are its tokens but the first, and so a token is trained on once per epoch: the first of the
        source (of each window, if it is packed), and those after the last whole window, never. Of a run that was forked
        with another mixture, only its own samples.
        """
        self.tokens_of(name)
        last = self.history.samples(max(self.config.training.steps, self.history.last_step)).stop
        ends = [min(last, view.start.sample) for view in self.views[1:]] + [last]
        for view, end in zip(self.views, ends, strict=True):
            if name in view.sources and end > view.start.sample:
                n_ordinals = view.mixture.read_before(end)[name]
                index = list(view.sources).index(name)
                for epoch, ordinal in _ordinals(view, name, start, stop, n_ordinals):
                    sample = sample_of(view.mixture, index, ordinal)
                    yield Use(epoch, sample, self.history.step_of(sample))

    def ledger(self, step: int) -> list[Ledger]:
        """The part of each source that the run has read by the end of a step."""
        trained = self.history.trained(step)
        furthest = trained[-1].stop if trained else 0
        return [self._ledger(name, trained, furthest) for name in self.sources]

    def _ledger(self, name: str, trained: Sequence[range], furthest: int) -> Ledger:
        samples = 0
        tokens = 0
        epochs = 0.0
        begins = [0, *(view.start.sample for view in self.views[1:])]
        for view, begin, end in zip(self.views, begins, [*begins[1:], furthest], strict=True):
            parts = [(max(begin, each.start), min(end, each.stop)) for each in trained]
            n = sum(self._read_before(name, b, view) - self._read_before(name, a, view) for a, b in parts if a < b)
            samples += n
            n_tokens = n * view.seq_len
            if any(a < view.start.sample <= b for a, b in parts):  # also those of the run that this one has left
                cuts = [(view.seq_len, 0), *view.start.lengths.get(name, ())]
                n_tokens += sum((length - view.seq_len) * (b - a) for (_, a), (length, b) in pairwise(cuts))
            tokens += n_tokens
            if n and view.sources[name].kind == "tokens":
                epochs += n_tokens / view.seq_len / view.tokens_of(name).n_windows
        last = [view for view in self.views if view.start.sample < furthest][-1:] or self.views[:1]
        passed_over = max(0, self._read_before(name, furthest, last[0]) - samples)
        return Ledger(name, samples, tokens, passed_over, epochs if self.sources[name].kind == "tokens" else None)

    def _read_before(self, name: str, sample: int, view: View) -> int:
        """How many samples of a source come before `sample`, in a forked run also those of the run that it left."""
        return view.mixture.read_before(sample).get(name, 0) if sample >= view.start.sample else 0


def _ordinals(view: View, name: str, start: int, stop: int, end: int) -> Iterator[tuple[int, int]]:
    """The epoch and the ordinal of a view's samples that have a target in tokens [start, stop), up to the `end`-th."""
    source = view.tokens_of(name)
    inputs = source.inputs_before(start, stop)
    if source.lengths:
        yield from ordinals_after(source.lengths, source.epochs, inputs, end)
        return
    windows = np.unique(inputs // view.seq_len)
    windows = windows[windows < source.n_windows]
    first = view.start.read.get(name, 0)
    for epoch in range(first // source.n_windows, -(-end // source.n_windows)):
        found = np.sort(ordinals(source.epochs, windows, epoch))
        yield from ((epoch, ordinal) for ordinal in found[(found >= first) & (found < end)].tolist())
