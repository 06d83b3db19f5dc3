"""What a reader of a run should not overlook: at most eight flags, each a fact of the records with its step."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from scripts.page.recorded import Recorded, is_number, is_step, plain, was_not_finite
from trainer.report.units import brief, fixed, percent

_WINDOW = 32
"""Logged losses that a later loss is compared with; with fewer, it is not judged."""
_SIGMAS = 6.0
"""Gaussian noise exceeds the mean of 32 losses by so many of their standard deviations about once in a million."""
_LEAST_RISE = 1e-3
"""A spike exceeds the mean by at least this fraction: a loss that hardly varies has none by rounding."""
_STALL = 10.0
"""Times the median duration of a step."""
_LAG_SHARE = 0.1


@dataclass(frozen=True)
class Flag:
    """One fact about a run."""

    kind: str
    step: int
    text: str

    def __str__(self) -> str:
        return f"step {self.step:,}: {self.text}"


def flags(run: Recorded) -> list[Flag]:
    """The flags of a run, at most one of each kind."""
    kinds = (_ended, _not_finite, _incidents, _spike, _stall, _lag, _resume, _above_best)
    return [flag for kind in kinds for flag in kind(run)]


def _ended(run: Recorded) -> Iterator[Flag]:
    because = f": {run.reason}" if run.reason else ""
    texts = {
        "failed": f"failed{because}",
        "preempted": f"stopped{because}; the same command resumes it",
        "silent": "said that it was running, over two minutes before this page was made",
    }
    if run.state not in ("done", "running"):
        yield Flag("ended", run.step, texts.get(run.state, "how it ended is unknown (no readable status.json)"))


def _not_finite(run: Recorded) -> Iterator[Flag]:
    steps = [record["step"] for record in run.records if was_not_finite(record)]
    if steps:
        text = "loss or gradient norm was not finite, and nothing changed"
        yield Flag("non-finite", steps[0], text + _more(steps))


def _more(steps: Sequence[int]) -> str:
    return f" ({len(steps)} logged steps, the last {steps[-1]:,})" if len(steps) > 1 else ""


def _incidents(run: Recorded) -> Iterator[Flag]:
    names = {"skip": "spikes skipped", "rewind": "rewinds before a spike", "heal": "replicas healed"}
    counts = Counter(str(incident.get("what")) for incident in run.incidents)
    if counts:
        text = ", ".join(f"{names.get(what, what)}: {n}" for what, n in counts.items())
        yield Flag("skipped", run.incidents[0]["step"], text)


def spikes(losses: Sequence[float]) -> list[int]:
    """Indices of the losses far above those before them: the rule of `trainer.guards.spikes`, on logged losses."""
    values = np.asarray(losses, dtype=np.float64)
    if len(values) <= _WINDOW:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(values[:-1], _WINDOW)
    means = windows.mean(axis=1)
    limits = means + np.maximum(_SIGMAS * windows.std(axis=1), _LEAST_RISE * np.abs(means))
    return [_WINDOW + int(i) for i in np.flatnonzero(values[_WINDOW:] > limits)]


def _spike(run: Recorded) -> Iterator[Flag]:
    steps, losses = run.column("loss")
    found = spikes(losses)
    if found:
        highest = max(found, key=losses.__getitem__)
        before = median(losses[highest - _WINDOW : highest])
        text = f"loss {fixed(losses[highest])} after a median of {fixed(before)}"
        yield Flag("spike", steps[highest], text + _more([steps[i] for i in found]))


def _stall(run: Recorded) -> Iterator[Flag]:
    steps, seconds = run.column("step_seconds")
    usual = median(seconds) if seconds else 0.0
    slow = [i for i, each in enumerate(seconds) if each > _STALL * usual]
    if slow and usual > 0:
        longest = max(slow, key=seconds.__getitem__)
        text = f"took {brief(seconds[longest])}, the median is {brief(usual)}"
        yield Flag("stall", steps[longest], text + _more([steps[i] for i in slow]))


def _lag(run: Recorded) -> Iterator[Flag]:
    shares: dict[int, float] = {}
    ranks: dict[int, str] = {}
    for record in run.records:
        waited = record.get("lag_seconds")
        seconds = record.get("step_seconds")
        if is_number(waited) and is_number(seconds) and seconds > 0 and waited > _LAG_SHARE * seconds:
            shares[record["step"]] = waited / seconds
            ranks[record["step"]] = plain(record.get("slowest_rank"))
    if shares:
        worst = max(shares, key=shares.__getitem__)
        text = f"others waited {percent(shares[worst], 0)} of the step for rank {ranks[worst]}"
        yield Flag("lag", worst, text + _more([*shares]))


def _resume(run: Recorded) -> Iterator[Flag]:
    if len(run.launches) < 2:
        return
    before, last = run.launches[-2:]
    moved = f" on {last.mesh}" if last.mesh != before.mesh else ""
    reached = [(launch.previous.get("step"), launch.step) for launch in run.launches[1:]]
    lost = sum(max(0, end - start) for end, start in reached if is_step(end))
    yield Flag("resume", last.step, f"launch {len(run.launches)} began{moved}; steps computed again in all: {lost:,}")


def _above_best(run: Recorded) -> Iterator[Flag]:
    steps, losses = run.column("validation_loss")
    best = min(losses, default=0.0)
    if losses and losses[-1] > best:
        where = steps[losses.index(best)]
        text = f"validation loss {fixed(losses[-1])} is {fixed(losses[-1] - best)} above the best, of step {where:,}"
        yield Flag("above best", steps[-1], text)
