"""Which curves the page draws, from whatever keys the records have.

Known keys have a chart with a title and a unit. Any other key with numbers gets a chart of its own. A key with numbers
by name (`{"web": 3.1, "code": 2.2}`) gets a chart with a line for each name, and one with several measures of each name
(`{"web": {"loss": 3.1, "perplexity": 22.2}}`) a chart for each measure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from configs.untrusted import printable
from scripts.page.experts import shares
from scripts.page.flags import spikes
from scripts.page.recorded import Recorded, is_date, is_duration, is_number, was_not_finite
from scripts.page.thin import bin_means, thin
from trainer.report.evaluations import is_error

Unit = Literal["number", "count", "percent", "share", "bytes", "seconds", "small"]
"""How the page writes a value; "share" is 0 to 1, "small" in powers of ten."""
MOST_POINTS = 2000
"""Points of the widest chart's curves."""
_FEWER_POINTS = 800
_MAP_POINTS = 400
_LOG_FROM = 20.0
"""Largest value over the median from which a chart is logarithmic at first."""
_DOTS_BELOW = 40
"""Number of points below which a curve shows each."""
MOST_NAMES = 64
"""Lines of one chart; of more names, evenly chosen ones are drawn, and the title says so."""


@dataclass(frozen=True)
class Line:
    """A curve's key and look."""

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
    is_noisy: bool = False
    """Whether the page draws a mean over neighbouring steps, too."""
    if_nonzero: bool = False
    """Whether the chart is left out if all of its values are 0."""


FIGURES = (
    Figure(
        "Loss",
        (
            Line("loss", "training"),
            Line("validation_loss", "validation", dashed=True),
            Line("validation_average_loss", "validation of the average", dashed=True),
        ),
        note="nats per token",
        is_wide=True,
        may_be_log=True,
        is_noisy=True,
    ),
    Figure("Bits per byte", (Line("validation_bits_per_byte"),), note="validation"),
    Figure("Perplexity", (Line("validation_perplexity"),), note="validation: the exponential of its loss"),
    Figure("Gradient norm", (Line("grad_norm"),), note="before clipping", may_be_log=True, is_noisy=True),
    Figure("Learning rate", (Line("lr"),), "small", "of the step, before any group's scale"),
    Figure("Tokens per second", (Line("tokens_per_second"),), "count", "of all ranks", is_noisy=True),
    Figure("MFU", (Line("mfu"),), "share", "of the device's peak FLOP/s", is_noisy=True),
    Figure(
        "Step",
        (Line("step_seconds", "step"), Line("data_seconds", "waiting for data", dashed=True)),
        "seconds",
        "mean duration since the line before",
        is_noisy=True,
    ),
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
    Figure("Load imbalance", (Line("load_imbalance"),), note="busiest expert over the mean", is_noisy=True),
    Figure(
        "Steps computed again", (Line("repeated_steps"),), note="a buffer of experts was too small", if_nonzero=True
    ),
    Figure("Divergence from the teacher", (Line("distillation_loss"),), note="nats per token", is_noisy=True),
    Figure("Largest attention logit", (Line("max_attention_logit"),), note="of any head, before the clip"),
    Figure("Router entropy", (Line("router_entropy"),), note="nats, mean over tokens and layers"),
    Figure(
        "Gradient noise scale",
        (Line("grad_noise_scale"),),
        note="of this step alone, in sequences",
        may_be_log=True,
        is_noisy=True,
    ),
    Figure(
        "Gradient noise",
        (Line("grad_noise_trace"),),
        note="summed variance of one sequence's gradient",
        may_be_log=True,
        is_noisy=True,
    ),
    Figure(
        "Gradient signal",
        (Line("grad_signal"),),
        note="squared norm of an infinite batch's gradient, an estimate that may be negative",
        may_be_log=True,
        is_noisy=True,
    ),
)
NOTES: dict[str, tuple[str, Unit]] = {
    "validation_by_source": ("of each source's own tokens", "number"),
    "tokens_per_expert": ("by layer, in even shares: the expert's tokens over the mean of its layer's", "number"),
    "router_entropies": ("by layer, in nats, mean over tokens", "number"),
    "phase_seconds": ("per step, outside of collectives, on the rank that spent the most", "seconds"),
    "layer_grad_norms": ("2-norm before clipping", "number"),
    "layer_activation_rms": ("root mean square of the residual stream after each block", "number"),
    "evaluation": ("by task", "number"),
    "multi_token_losses": ("in nats, by how many tokens beyond the next one", "number"),
}
"""What charts of keys with numbers by name say of them, and their unit."""
_NOT_DRAWN = {"step", "tokens", "time", "seconds_by_kind", "launches", "incidents", "samples", "slowest_rank", "tflops"}
_NOT_DRAWN |= {"plan", "planned_parts", "validation_stopped"}
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
    smooth: bool = False
    names: list[str] = field(default_factory=list)
    """Names that the reader chooses one of: with several runs, colors mean runs."""
    series: list[dict[str, Any]] = field(default_factory=list)


def charts(runs: Sequence[Recorded]) -> list[dict[str, Any]]:
    """All charts of the runs, those of known keys first."""
    known = {line.key for figure in FIGURES for line in figure.lines} | _NOT_DRAWN
    drawn = [_chart(figure, runs) for figure in FIGURES]
    others = sorted({key for run in runs for record in run.records for key in record} - known)
    for key in others:
        if any(is_number(record.get(key)) for run in runs for record in run.records):
            note = f"{printable(key)} in metrics.jsonl"
            drawn.append(_chart(Figure(title_of(key), (Line(key),), note=note, may_be_log=True, is_noisy=True), runs))
        drawn += _charts_by_name(key, runs)
    return [vars(chart) for chart in drawn if chart.series]


def title_of(key: str) -> str:
    """A key as a title: "Validation loss by source"."""
    return printable(key.replace("_", " ").capitalize())


def _chart(figure: Figure, runs: Sequence[Recorded]) -> Chart:
    chart = Chart(figure.title, figure.unit, figure.note, figure.is_wide, False, figure.may_be_log, figure.is_noisy)
    most = MOST_POINTS if figure.is_wide else _FEWER_POINTS
    for number, run in enumerate(runs):
        for line in figure.lines:
            steps, values = run.column(line.key)
            if values and (any(values) or not figure.if_nonzero):
                chart.series.append(_curve(number, line, steps, values, most))
                if figure.is_noisy and len(values) > most:
                    middles, means = bin_means(values, most // 2)
                    chart.series[-1] |= {"mean_x": [steps[i] for i in middles], "mean_y": [*map(_short, means)]}
    chart.log = figure.may_be_log and any(_spans_decades(series["y"]) for series in chart.series)
    return chart


def _curve(run: int, line: Line, steps: Sequence[int], values: Sequence[float], most: int) -> dict[str, Any]:
    """A curve, thinned to about `most` points."""
    kept = thin(values, most)
    facts = {"run": run, "label": printable(line.label), "dashed": line.dashed, "dots": len(kept) < _DOTS_BELOW}
    return facts | {"x": [steps[i] for i in kept], "y": [_short(values[i]) for i in kept]}


Curves = dict[str, tuple[list[int], list[float]]]
"""Steps and values by name."""


def _charts_by_name(key: str, runs: Sequence[Recorded]) -> Iterator[Chart]:
    """A chart for each measure of a key's objects.

    Of a single run it has a line for each name. Of several it has a line for each run, and the reader chooses the name.
    """
    found = [_by_measure(key, run) for run in runs]
    if key == "validation_by_source" and all(len(curves) == 1 for each in found for curves in each.values()):
        return  # it would repeat the validation of all sources
    note, unit = NOTES.get(key, (f"{printable(key)} in metrics.jsonl", "number"))
    for measure in dict.fromkeys(measure for each in found for measure in each):
        title = f"{title_of(key)}: {title_of(measure).lower()}" if measure else title_of(key)
        names = list(dict.fromkeys(name for each in found for name in each.get(measure, {})))
        kept = [names[i] for i in thin(range(len(names)), MOST_NAMES)]
        which = f"; {len(kept)} of {len(names)} names" if len(kept) < len(names) else ""
        chart = Chart(title, unit, f"{note}{which}", may_be_log=True)
        chart.names = [printable(name) for name in kept] if len(runs) > 1 else []
        for number, each in enumerate(found):
            for place, name in enumerate(kept):
                if name in each.get(measure, {}):
                    series = _curve(number, Line("", name), *each[measure][name], _FEWER_POINTS // 2)
                    chart.series.append(series if chart.names else series | {"place": place, "places": len(kept)})
        chart.log = all(_spans_decades(series["y"]) for series in chart.series)
        yield chart


def _by_measure(key: str, run: Recorded) -> dict[str, Curves]:
    """The curves of a run's numbers by name, by measure ("" if there is only one)."""
    measures: dict[str, Curves] = {}
    for record in run.records:
        value = record.get(key)
        if key == "tokens_per_expert":
            value = {
                layer: {"most loaded": max(experts), "least loaded": min(experts)}
                for layer, experts in shares(value).items()
            }
        for name, item in value.items() if isinstance(value, dict) else ():
            for measure, number in item.items() if isinstance(item, dict) else (("", item),):
                if is_number(number) and not is_error(measure):  # the page's table has them
                    steps, values = measures.setdefault(measure, {}).setdefault(name, ([], []))
                    steps.append(record["step"])
                    values.append(number)
    return measures


def _spans_decades(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) > _LOG_FROM * median(values)


def _short(value: float) -> float:
    """Six digits, which is more than a screen can show."""
    return float(f"{value:.6g}")


# --------------------------------------------------------------------------- marks, and other axes than steps


def marks(run: Recorded) -> list[dict[str, Any]]:
    """The events of a run: kind (resume, stage, spike, incident, not finite), step, and words."""
    found: list[dict[str, Any]] = []
    for launch in run.launches[1:]:
        if is_date(launch.started) and run.began is not None:
            hours = _short((launch.started - run.began) / 3600)
            found.append(
                {"kind": "resume", "step": launch.step, "hours": hours, "text": printable(f"resumed on {launch.mesh}")}
            )
    steps, losses = run.column("loss")
    for number, after in enumerate(run.borders, 2):
        if steps and after < steps[-1]:
            found.append({"kind": "stage", "step": after, "text": f"stage {number} begins"})
    for i in spikes(losses):
        found.append({"kind": "spike", "step": steps[i], "text": f"spike: {losses[i]:.4g}"})
    for incident in run.incidents:
        found.append({"kind": "incident", "step": incident["step"], "text": printable(str(incident.get("what")))})
    for record in run.records:
        if was_not_finite(record):
            found.append({"kind": "not finite", "step": record["step"], "text": printable(str(record.get("skipped")))})
    return found


def axes(run: Recorded) -> dict[str, list[float]]:
    """Steps with the tokens and the hours since the first launch at them, between which the page interpolates."""
    known = [record for record in run.records if is_number(record.get("tokens")) and is_date(record.get("time"))]
    if not known:
        return {"step": [], "tokens": [], "hours": []}
    began = known[0]["time"] if run.began is None else run.began
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
    if not wall or run.began is None:
        return []
    shares: list[dict[str, float]] = [{} for _ in range(bins)]
    width = wall / bins
    for record in run.records:
        spent = record.get("seconds_by_kind")
        if not isinstance(spent, dict) or not is_date(record.get("time")):
            continue
        total = sum(value for value in spent.values() if is_duration(value))
        stop = (record["time"] - run.began) / width
        start = max(0.0, stop - total / width)
        for number in range(int(start), min(bins, int(stop) + 1)):
            overlap = min(stop, number + 1) - max(start, number)
            for kind, value in spent.items():
                if is_duration(value) and total > 0 and overlap > 0:
                    shares[number][kind] = shares[number].get(kind, 0.0) + overlap * value / total
    return shares
