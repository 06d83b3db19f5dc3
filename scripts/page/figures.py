"""Which curves the page draws, from whatever keys the records have.

Known keys have a chart with a title and a unit. Any other key with numbers gets a chart of its own. A key with numbers
by name (`{"web": 3.1, "code": 2.2}`) gets a chart with a line for each name, and one with several measures of each name
(`{"web": {"loss": 3.1, "perplexity": 22.2}}`) a chart for each measure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from scripts.page.recorded import Recorded, is_number, was_not_finite
from scripts.page.rises import FEWEST, rises
from scripts.page.thin import smooth, thin

Unit = Literal["number", "count", "percent", "share", "bytes", "seconds", "small"]
"""How the page writes a value; "share" is 0 to 1, "small" in powers of ten."""
MOST_POINTS = 2000
"""Points of the widest chart's curves."""
_FEWER_POINTS = 800
_MAP_POINTS = 400
_SMOOTH_FROM, _SMOOTH_POINTS, _SMOOTH_BINS = 200, 16, 150
"""Points from which a curve gets a line of medians; points in a bin at least; bins at most."""
_LOG_FROM = 20.0
"""Largest value over the median from which a chart is logarithmic at first."""
_DOTS_BELOW = 40
"""Points of a curve of which each is shown."""
_TOGETHER = 8
"""Lines of all runs that share a chart; of more, each run has its own chart."""
MOST_NAMES = 64
"""Lines of one chart; of more names, evenly chosen ones are drawn, and the title says so."""


@dataclass(frozen=True)
class Line:
    """What one curve shows."""

    key: str
    label: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Figure:
    """A chart of known keys."""

    title: str
    lines: tuple[Line, ...]
    unit: Unit = "number"
    note: str = ""
    is_wide: bool = False
    may_be_log: bool = False
    if_nonzero: bool = False
    """Whether the chart is left out if all of its values are 0."""


FIGURES = (
    Figure(
        "Loss",
        (Line("loss", "training"), Line("validation_loss", "validation", dashed=True)),
        note="nats per token; the strong line is the median of each bin of the thin one",
        is_wide=True,
        may_be_log=True,
    ),
    Figure("Bits per byte", (Line("validation_bits_per_byte"),), note="validation"),
    Figure("Gradient norm", (Line("grad_norm"),), note="before clipping", may_be_log=True),
    Figure("Learning rate", (Line("lr"),), "small"),
    Figure("Tokens per second", (Line("tokens_per_second"),), "count", "of all ranks"),
    Figure("MFU", (Line("mfu"),), "share"),
    Figure("Step", (Line("step_seconds", "step"), Line("data_seconds", "waiting for data", dashed=True)), "seconds"),
    Figure(
        "Memory",
        (Line("memory_peak_bytes", "allocated"), Line("memory_reserved_peak_bytes", "reserved", dashed=True)),
        "bytes",
        "peak since the launch began, the largest of all ranks",
    ),
    Figure("Memory reserved", (Line("memory_percent"),), "percent", "of the device"),
    Figure(
        "Allocator",
        (Line("allocator_retries", "retries"), Line("allocator_ooms", "out of memory", dashed=True)),
        "count",
        "since the launch began",
        if_nonzero=True,
    ),
    Figure("Goodput", (Line("goodput"),), "share", "share of the time since the first launch that trained"),
    Figure("Lag of the slowest rank", (Line("lag_seconds"),), "seconds", "per step"),
    Figure("Load imbalance", (Line("load_imbalance"),), note="busiest expert over the mean"),
    Figure("Router entropy", (Line("router_entropy"),), note="nats"),
)
_ERROR = "_stderr"
"""How a measure ends that is the standard error of another, which the page's table has."""
_NOT_DRAWN = {"step", "tokens", "time", "seconds_by_kind", "launches", "incidents", "samples", "slowest_rank", "tflops"}
"""Keys that are in other parts of the page; TFLOP/s are proportional to tokens per second."""


@dataclass
class Chart:
    """A chart as the page's script gets it."""

    title: str
    unit: Unit
    note: str = ""
    wide: bool = False
    log: bool = False
    may_be_log: bool = False
    series: list[dict[str, Any]] = field(default_factory=list)


def charts(runs: Sequence[Recorded]) -> list[dict[str, Any]]:
    """All charts of the runs, those of known keys first."""
    known = {line.key for figure in FIGURES for line in figure.lines} | _NOT_DRAWN
    drawn = [_chart(figure, runs) for figure in FIGURES]
    others = sorted({key for run in runs for record in run.records for key in record} - known)
    for key in others:
        if any(is_number(record.get(key)) for run in runs for record in run.records):
            drawn.append(_chart(Figure(title_of(key), (Line(key),), may_be_log=True), runs))
        drawn += _charts_by_name(key, runs)
    return [vars(chart) for chart in drawn if chart.series]


def title_of(key: str) -> str:
    """A key as a title: "Validation loss by source"."""
    return key.replace("_", " ").capitalize()


def _chart(figure: Figure, runs: Sequence[Recorded]) -> Chart:
    chart = Chart(figure.title, figure.unit, figure.note, figure.is_wide, may_be_log=figure.may_be_log)
    most = MOST_POINTS if figure.is_wide else _FEWER_POINTS
    for number, run in enumerate(runs):
        for line in figure.lines:
            steps, values = run.column(line.key)
            if values and (any(values) or not figure.if_nonzero):
                chart.series += _curves(number, line, steps, values, most, smoothed=figure.may_be_log)
    chart.log = figure.may_be_log and any(_spans_decades(series["y"]) for series in chart.series)
    return chart


def _curves(
    run: int, line: Line, steps: Sequence[int], values: Sequence[float], most: int, smoothed: bool
) -> Iterator[dict[str, Any]]:
    """A thinned curve; a long noisy one is drawn faintly, below the medians of its bins."""
    facts = {"run": run, "label": line.label, "dashed": line.dashed}
    has_trend = smoothed and len(values) >= _SMOOTH_FROM
    kept = thin(values, most)
    x, y = [steps[i] for i in kept], [_short(values[i]) for i in kept]
    yield facts | {"faint": has_trend, "dots": len(x) < _DOTS_BELOW, "x": x, "y": y}
    if has_trend:
        middles, medians = smooth(values, min(_SMOOTH_BINS, len(values) // _SMOOTH_POINTS))
        yield facts | {
            "faint": False,
            "dots": False,
            "x": [steps[i] for i in middles],
            "y": [_short(value) for value in medians],
        }


Curves = dict[str, tuple[list[int], list[float]]]
"""Steps and values by name."""


def _charts_by_name(key: str, runs: Sequence[Recorded]) -> Iterator[Chart]:
    """A chart for each measure of a key's objects, or, if they are many lines, one for each run and measure."""
    found = [_by_measure(key, run) for run in runs]
    for measure in dict.fromkeys(measure for each in found for measure in each):
        title = f"{title_of(key)}: {title_of(measure).lower()}" if measure else title_of(key)
        of_runs = [(number, each[measure]) for number, each in enumerate(found) if measure in each]
        if len(runs) > 1 and sum(len(curves) for _, curves in of_runs) > _TOGETHER:
            for number, curves in of_runs:
                yield _chart_of_names(title, runs[number].name, {("", number): curves})
        else:
            several = len(of_runs) > 1
            note = runs[of_runs[0][0]].name if len(runs) > 1 and not several else ""
            named = {(runs[number].name if several else "", number): curves for number, curves in of_runs}
            yield _chart_of_names(title, note, named)


def _by_measure(key: str, run: Recorded) -> dict[str, Curves]:
    """The curves of a run's numbers by name, by measure ("" if there is only one)."""
    measures: dict[str, Curves] = {}
    for record in run.records:
        value = record.get(key)
        for name, item in value.items() if isinstance(value, dict) else ():
            for measure, number in item.items() if isinstance(item, dict) else (("", item),):
                if is_number(number) and not measure.endswith(_ERROR):
                    steps, values = measures.setdefault(measure, {}).setdefault(name, ([], []))
                    steps.append(record["step"])
                    values.append(number)
    return measures


def _chart_of_names(title: str, note: str, of_runs: dict[tuple[str, int], Curves]) -> Chart:
    lines = [
        (number, " · ".join(filter(None, (run, name))), *curve)
        for (run, number), curves in of_runs.items()
        for name, curve in curves.items()
    ]
    kept = thin(range(len(lines)), MOST_NAMES)
    which = f"{len(kept)} of {len(lines)} names" if len(kept) < len(lines) else ""
    chart = Chart(title, "number", ", ".join(filter(None, (note, which))), may_be_log=True)
    for place, i in enumerate(kept):
        run, label, steps, values = lines[i]
        for series in _curves(run, Line("", label), steps, values, _FEWER_POINTS // 2, smoothed=False):
            chart.series.append(series | {"place": place, "places": len(kept)})
    chart.log = all(_spans_decades(series["y"]) for series in chart.series)
    return chart


def _spans_decades(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) > _LOG_FROM * median(values)


def _short(value: float) -> float:
    """Six digits, which is more than a screen can show."""
    return float(f"{value:.6g}")


# --------------------------------------------------------------------------- marks, and other axes than steps


def marks(run: Recorded) -> list[dict[str, Any]]:
    """What happened at which step: kind (resume, rise, incident, not finite), step, and words."""
    found: list[dict[str, Any]] = []
    for launch in run.launches[1:]:
        hours = _short((launch.started - run.launches[0].started) / 3600)
        found.append({"kind": "resume", "step": launch.step, "hours": hours, "text": f"resumed on {launch.mesh}"})
    steps, losses = run.column("loss")
    if len(losses) > FEWEST:
        for rise in rises(losses):
            text = f"the loss rose to {losses[rise.peak]:.4g}"
            found.append({"kind": "rise", "step": steps[rise.peak], "text": text})
    for incident in run.incidents:
        found.append({"kind": "incident", "step": incident["step"], "text": str(incident.get("what"))})
    for record in run.records:
        if was_not_finite(record):
            found.append({"kind": "not finite", "step": record["step"], "text": str(record.get("skipped"))})
    return found


def axes(run: Recorded) -> dict[str, list[float]]:
    """Steps with the tokens and the hours since the first launch at them, between which the page interpolates."""
    known = [record for record in run.records if is_number(record.get("tokens")) and is_number(record.get("time"))]
    if not known:
        return {"step": [], "tokens": [], "hours": []}
    began = run.launches[0].started if run.launches else known[0]["time"]
    hours = [(record["time"] - began) / 3600 for record in known]
    kept = thin(hours, _MAP_POINTS)
    return {
        "step": [known[i]["step"] for i in kept],
        "tokens": [known[i]["tokens"] for i in kept],
        "hours": [_short(hours[i]) for i in kept],
    }


# --------------------------------------------------------------------------- time


def spans(run: Recorded, bins: int) -> list[dict[str, float]]:
    """The share of each kind of work in equal parts of the wall clock, from the first launch to the last record.

    What is missing to 1 was not recorded: no launch was running, or its steps were lost.
    """
    wall = run.wall_seconds()
    if not wall:
        return []
    shares: list[dict[str, float]] = [{} for _ in range(bins)]
    width = wall / bins
    for record in run.records:
        spent = record.get("seconds_by_kind")
        if not isinstance(spent, dict) or not is_number(record.get("time")):
            continue
        total = sum(value for value in spent.values() if is_number(value))
        stop = (record["time"] - run.launches[0].started) / width
        start = max(0.0, stop - total / width)
        for number in range(int(start), min(bins, int(stop) + 1)):
            overlap = min(stop, number + 1) - max(start, number)
            for kind, value in spent.items():
                if is_number(value) and total > 0 and overlap > 0:
                    shares[number][kind] = shares[number].get(kind, 0.0) + overlap * value / total
    return shares
