"""What a run's records say, in words. Each sentence is a fact of the records, with the steps it speaks of."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from scripts.page.recorded import Launch, Recorded, is_number, was_not_finite
from scripts.page.rises import FEWEST, SIGMAS, TREND_FEWEST, WINDOW, Rise, rises, trend
from trainer.report.metrics import Kind
from trainer.report.units import count, duration, size

Mood = Literal["good", "plain", "watch", "bad"]
_SHOWN = 8
"""Steps that a sentence lists; it says how many more there are."""
_SLOW = 2.0
_DATA_SHARE = 0.05
_MEMORY_PERCENT = 95.0
_LAG_SHARE = 0.1
_FEW = 20
NOT_RECORDED = "stopped, or not recorded"
"""The rest of the wall clock: no launch, steps that were lost, and a launch's work after its last record."""


@dataclass(frozen=True)
class Sentence:
    """One sentence or two about a run."""

    mood: Mood
    """How a reader should take it; the page colors it."""
    text: str


def verdict(run: Recorded) -> list[Sentence]:
    """Judge a run by its records, the most important first."""
    parts = (
        _end,
        _loss,
        _validation,
        _rises,
        _incidents,
        _not_finite,
        _launches,
        _changes,
        _time,
        _speed,
        _memory,
        _lag,
        _read,
    )
    return [sentence for part in parts for sentence in part(run)]


# --------------------------------------------------------------------------- how it ended


def _end(run: Recorded) -> Iterator[Sentence]:
    reason = str(run.status.get("reason", "")).partition("\n")[0]
    because = f": {reason}" if reason else ""
    wanted = run.config.get("training.steps")
    of_all = f" of {wanted:,}" if isinstance(wanted, int) and wanted >= run.step else ""
    where = f"step {run.step:,}{of_all}"
    words: dict[str, tuple[Mood, str]] = {
        "done": ("good", f"Done: {where}."),
        "running": ("plain", f"Running, at {where}."),
        "preempted": ("watch", f"Stopped at {where}{because}. The same command resumes it."),
        "failed": ("bad", f"Failed at {where}{because}."),
        "silent": ("bad", f"At {where} it last said that it was running, over two minutes before this page was made."),
    }
    mood, text = words.get(run.state, ("watch", f"At {where}; how it ended is unknown (no readable status.json)."))
    tokens = run.last("tokens")
    yield Sentence(mood, text + (f" It has trained on {count(tokens)} tokens." if tokens else ""))


# --------------------------------------------------------------------------- loss


def _loss(run: Recorded) -> Iterator[Sentence]:
    steps, losses = run.column("loss")
    if not losses:
        yield Sentence("watch", "No step with a finite loss is logged.")
        return
    few = max(1, min(_FEW, len(losses) // 5))
    first, last = median(losses[:few]), median(losses[-few:])
    of = f"median of the {'first' if few == 1 else f'first {few}'}"
    moved = "fell" if last < first else "rose" if last > first else "stayed"
    ends = f"from {first:.4f} to {last:.4f}" if last != first else f"at {first:.4f}"
    how = "its first and last logged steps" if few == 1 else f"{of} and last {few} logged steps"
    yield Sentence("plain" if last <= first else "watch", f"The loss {moved} {ends} ({how}).")
    found = trend(losses)
    if found is None:
        yield Sentence(
            "plain", f"Whether it still falls can't be said of {len(losses)} logged steps ({TREND_FEWEST} are needed)."
        )
        return
    span = f"over the last quarter, from step {steps[found.first]:,} on"
    sentences: dict[int, tuple[Mood, str]] = {
        -1: ("good", f"It was still falling: by {abs(found.change):.4f} {span}."),
        0: ("plain", f"It neither fell nor rose clearly {span} (by Kendall's test at 1%)."),
        1: ("bad", f"It was rising: by {abs(found.change):.4f} {span}."),
    }
    yield Sentence(*sentences[found.direction])


def _validation(run: Recorded) -> Iterator[Sentence]:
    steps, losses = run.column("validation_loss")
    if not losses:
        return
    best = min(range(len(losses)), key=losses.__getitem__)
    bits = run.last("validation_bits_per_byte")
    text = f"The last validation loss is {losses[-1]:.4f}, at step {steps[-1]:,}"
    text += f" ({bits:.4f} bits per byte)" if bits is not None else ""
    if len(losses) > 1 and losses[best] == losses[-1]:
        yield Sentence("good", f"{text}: the lowest of {len(losses)}.")
    elif len(losses) > 1:
        higher = losses[-1] - losses[best]
        yield Sentence("watch", f"{text}: {higher:.4f} above the lowest, {losses[best]:.4f} at step {steps[best]:,}.")
    else:
        yield Sentence("plain", f"{text}.")


def _rises(run: Recorded) -> Iterator[Sentence]:
    steps, losses = run.column("loss")
    if len(losses) <= FEWEST:
        yield Sentence("plain", f"Rises can't be judged with {len(losses)} logged steps (over {FEWEST} are needed).")
        return
    found = rises(losses)
    if not found:
        limit = f"{SIGMAS:g} sigma, or more where fewer than {WINDOW} precede it"
        yield Sentence(
            "good", f"After the first {FEWEST} logged steps, no loss was far above those before it ({limit})."
        )
        return
    times = "once" if len(found) == 1 else f"{len(found)} times"
    each = [_rise(rise, steps, losses) for rise in found[:_SHOWN]]
    rest = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    at = "step" if len(found) == 1 else "steps"
    text = f"The loss rose {times} by more than 5 sigma, at {at} {'; '.join(each)}{rest}."
    yield Sentence("bad" if any(rise.back is None for rise in found) else "watch", text)


def _rise(rise: Rise, steps: Sequence[int], losses: Sequence[float]) -> str:
    height = f"{losses[rise.peak]:.4g} after {rise.median:.4g}, {_sigmas(rise.sigmas)} sigma"
    back = "not back at that level" if rise.back is None else f"back at step {steps[rise.back]:,}"
    return f"{steps[rise.peak]:,} ({height}; {back})"


def _sigmas(sigmas: float) -> str:
    return f"{sigmas:.1f}" if sigmas < 10 else f"{sigmas:,.0f}"


# --------------------------------------------------------------------------- what the run met


def _incidents(run: Recorded) -> Iterator[Sentence]:
    words = {
        "skip": "a spike of the loss was skipped",
        "rewind": "the run went back to a checkpoint from before a spike",
        "heal": "copies that differed between ranks were healed",
    }
    for what, steps in _by(run.incidents, "what").items():
        told = words.get(what, f"incidents of the kind {what!r}")
        yield Sentence("watch", f"{_times(len(steps))} {told}, at {_steps(steps)}.")


def _by(incidents: Iterable[Any], key: str) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for incident in incidents:
        grouped.setdefault(str(incident.get(key)), []).append(incident.get("spike_step") or incident["step"])
    return grouped


def _times(n: int) -> str:
    return "Once" if n == 1 else f"{n} times"


def _not_finite(run: Recorded) -> Iterator[Sentence]:
    steps = [record["step"] for record in run.records if was_not_finite(record)]
    if steps:
        text = f"{len(steps)} logged {_plural(steps)} had a loss or gradient norm that was not finite, and changed "
        yield Sentence("bad", f"{text}nothing: {_steps(steps)}.")


def _steps(steps: Sequence[int]) -> str:
    """ "steps 3, 17 and 2 more"."""
    more = f" and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else ""
    return f"{_plural(steps)} {', '.join(f'{step:,}' for step in steps[:_SHOWN])}{more}"


def _plural(steps: Sequence[int]) -> str:
    return "step" if len(steps) == 1 else "steps"


def _launches(run: Recorded) -> Iterator[Sentence]:
    launches = run.launches
    if len(launches) < 2:
        return
    told = [
        f"Launch {number} {_how_it_went_on(before, launch)}"
        for number, (before, launch) in enumerate(pairwise(launches), 2)
    ]
    text = f"{len(launches)} launches have logged steps. {'. '.join(told[:_SHOWN])}."
    more = f" {len(told) - _SHOWN} more are in the table." if len(told) > _SHOWN else ""
    yield Sentence("plain", text + more)


def _changes(run: Recorded) -> Iterator[Sentence]:
    for change in run.run_changes:
        changes = "; ".join(change.changes)
        yield Sentence("watch", f"On the resume from step {change.step:,}, run keys were changed: {changes}.")


def _how_it_went_on(before: Launch, launch: Launch) -> str:
    """From where a launch went on, on what if that has changed, and what the status had said before it."""
    step = launch.previous.get("step")
    lost = step - launch.step if isinstance(step, int) else 0
    again = f", so {lost} {'step was' if lost == 1 else 'steps were'} computed again" if lost > 0 else ""
    moved = f" on {launch.mesh}" if launch.mesh != before.mesh else ""
    return f"began from step {launch.step:,}{moved}{_after(launch)}{again}"


def _after(launch: Launch) -> str:
    """How the run had ended before: not always by the launch before it, since one may end before it logs a step."""
    before = launch.previous
    reason, step = f" ({before['reason']})" if before.get("reason") else "", before.get("step")
    words = {
        "done": f", after it was done at step {step}",
        "preempted": f", after a stop at step {step}{reason}",
        "failed": f", after a failure at step {step}{reason}",
        "running": f", after an end without a word at step {step} or later",
    }
    return words.get(str(before.get("state")), "")


# --------------------------------------------------------------------------- time, speed, memory


def _time(run: Recorded) -> Iterator[Sentence]:
    wall, spent = run.wall_seconds(), run.seconds()
    if not wall or not spent:
        yield Sentence("plain", "Where the time went was not recorded.")
        return
    shares = [(value / wall, _kind(kind)) for kind, value in spent.items() if kind != "training"]
    rest = max(0.0, wall - sum(spent.values()))
    shares.append((rest / wall, NOT_RECORDED))
    told = ", ".join(f"{share:.0%} {what}" for share, what in sorted(shares, reverse=True) if share >= 0.01)
    trained = min(1.0, spent.get("training", 0.0) / wall)
    text = f"{trained:.0%} of the {duration(wall)} since the first launch trained it (goodput)"
    yield Sentence("plain", f"{text}{f'; {told}' if told else ''}.")


def _kind(key: str) -> str:
    return next((kind.value for kind in Kind if kind.key == key), key)


def _speed(run: Recorded) -> Iterator[Sentence]:
    speeds, seconds = run.column("tokens_per_second")[1], run.column("step_seconds")[1]
    if not speeds:
        return
    flops = run.column("mfu")[1]
    utilization = f", MFU {median(flops):.1%}" if flops else ""
    yield Sentence("plain", f"Its median speed is {count(median(speeds))} tokens/s{utilization}.")
    slow = sum(each > _SLOW * median(seconds) for each in seconds)
    if slow:
        share = f"{slow} of {len(seconds)} logged lines"
        yield Sentence("watch", f"In {share} a step took over twice the median of {duration(median(seconds))}.")
    data = run.column("data_seconds")[1]
    waited = math.fsum(data) / math.fsum(seconds) if len(data) == len(seconds) and math.fsum(seconds) > 0 else 0.0
    if waited > _DATA_SHARE:
        yield Sentence("watch", f"{waited:.0%} of a step is spent waiting for data.")


def _memory(run: Recorded) -> Iterator[Sentence]:
    peak, reserved, percent = (
        max(run.column(key)[1], default=0.0)
        for key in ("memory_peak_bytes", "memory_reserved_peak_bytes", "memory_percent")
    )
    if peak:
        held = f", {size(reserved)} reserved ({percent:.0f}% of the device)" if reserved else " in a process"
        yield Sentence("watch" if percent > _MEMORY_PERCENT else "plain", f"Memory: at most {size(peak)}{held}.")
    retries = max(run.column("allocator_retries")[1], default=0.0)
    if retries:
        yield Sentence("watch", f"The allocator freed memory and tried again, up to {retries:,.0f} times in a launch.")


def _lag(run: Recorded) -> Iterator[Sentence]:
    compared = [record for record in run.records if is_number(record.get("lag_seconds"))]
    late = [
        record
        for record in compared
        if is_number(record.get("step_seconds")) and record["lag_seconds"] > _LAG_SHARE * record["step_seconds"]
    ]
    if late:
        rank, times = Counter(record.get("slowest_rank") for record in late).most_common(1)[0]
        yield Sentence(
            "watch",
            f"In {len(late)} of {len(compared)} comparisons a rank kept the others waiting for over "
            f"{_LAG_SHARE:.0%} of a step, in {times} of them rank {rank}.",
        )


def _read(run: Recorded) -> Iterator[Sentence]:
    if run.unreadable_lines:
        yield Sentence("watch", f"{run.unreadable_lines} lines of metrics.jsonl could not be read and are left out.")


# --------------------------------------------------------------------------- several runs


def comparison(runs: Sequence[Recorded]) -> list[str]:
    """How the losses of runs compare at the last step that all have logged; no claim about noise is made."""
    told = []
    for key, name in (("validation_loss", "validation loss"), ("loss", "loss")):
        columns = [dict(zip(*run.column(key), strict=True)) for run in runs]
        common = set.intersection(*(set(column) for column in columns)) if columns else set()
        if common:
            step = max(common)
            ranked = sorted((column[step], run.name) for column, run in zip(columns, runs, strict=True))
            each = ", ".join(f"{run} {loss:.4f}" for loss, run in ranked)
            told.append(f"At step {step:,}, the last that all have logged, the {name} is, from the lowest: {each}.")
    return told
