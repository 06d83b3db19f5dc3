"""The page as one HTML file: words and tables are written here, curves are drawn by `page.js` with uPlot.

Nothing is loaded from anywhere: styles, scripts and data are part of the file, and its content security policy allows
only these, by their hashes. All that comes from a run folder is escaped, since it may be a stranger's.
"""

import base64
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from configs.reading.toml_text import value_text
from configs.untrusted import printable, shortened
from scripts.keel import VERSION
from scripts.page.experts import BANDS, boxes, recent_shares
from scripts.page.figures import axes, charts, marks, spans, title_of
from scripts.page.flags import flags
from scripts.page.ranking import ranking
from scripts.page.recorded import Recorded, differences, is_date, is_number, is_step, number_text, plain
from scripts.page.thin import thin
from trainer.report.evaluations import error_of, is_error
from trainer.report.metrics import Kind
from trainer.report.units import brief, count, duration, fixed, percent, size

_ASSETS = Path(__file__).parent
_BINS = 120
_MANY = 3
"""Most runs with their cards above the curves and their parts unfolded; with more runs, curves come first."""
_HUES = 12
"""Colors of runs in page.css; further runs repeat them with a dash."""
_STATES = ("done", "running", "preempted", "failed", "silent")
_ABSURD = 50
"""Most values that can't be meant to be listed one by one; the page says how many more there are."""
_NOT_RECORDED = "stopped, or not recorded"
"""The rest of the wall clock: no launch, steps that were lost, and a launch's work after its last record."""
_COMPARED = ("planned", "measured")
_PRINTED = 12
"""Steps of a command after a save whose output the page has besides the newest one's."""
_PRINTED_CHARACTERS = 4000
_KINDS = [
    Kind.TRAINING.key,
    Kind.DATA.key,
    Kind.COMPILE.key,
    Kind.VALIDATION.key,
    Kind.CHECKPOINT.key,
    Kind.PREPARATION.key,
    Kind.STARTUP.key,
]
"""The order of kinds of work in pictures."""


def page(runs: Sequence[Recorded], renew_seconds: int = 0) -> str:
    """Make the page that shows the runs together; it loads itself again every `renew_seconds`, unless they are 0."""
    shown = [{"name": printable(run.name), "marks": marks(run), "axes": axes(run)} for run in runs]
    data = {"runs": shown, "charts": charts(runs), "renew_seconds": renew_seconds}
    values = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    title = f"Keel: {', '.join(run.name for run in runs) if len(runs) <= _MANY else f'{len(runs)} runs'}"
    cards = f'<section class="cards">{"".join(_card(run, number) for number, run in enumerate(runs))}</section>'
    curves = f'{_CONTROLS}<div id="charts"></div>'
    body = "".join(
        [
            _header(runs),
            *((curves, cards) if len(runs) > _MANY else (cards, curves)),
            section("Differences", _differences(runs)) if len(runs) > 1 else "",
            section("Where the time went", _each(_time, runs)),
            section("Load of each expert", _each(_experts, runs)),
            section("Planned and measured", _each(_plan, runs)),
            section("Stops and resumes", _each(_launches, runs)),
            section("Evaluation", _evaluation(runs)),
            section("Commands after a save", _each(_commands, runs)),
            section("Environment", _environment(runs)),
            section("Configuration", _each(_config, runs, is_folded=True)),
            section("Left out", _absurd(runs)),
        ]
    )
    renewed = f" It is renewed every {renew_seconds} s." if renew_seconds else ""
    credit = f"{renewed} Curves: uPlot, © Leon Sorokin, MIT licence."
    scripts = [_asset("uplot/uPlot.iife.min.js"), _asset("page.js")]
    return document(title, body, credit, _asset("uplot/uPlot.min.css"), values, scripts)


def document(
    title: str, body: str, credit: str = "", style: str = "", values: str = "", scripts: Sequence[str] = ()
) -> str:
    """Make a page of HTML around `body`, whose policy allows its own style and scripts alone.

    Args:
        credit: further words of the footer.
        style: comes before the pages' own.
        values: JSON for the scripts; "" if there is none.
    """
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    style += _asset("page.css")
    allowed = f"style-src {_hash(style)}"
    allowed += f"; script-src {' '.join(map(_hash, scripts))}" if scripts else ""
    data = f'<script type="application/json" id="data">{values}</script>\n' if values else ""
    body = f"""<main>
{body}
<footer>Made by Keel {escape(VERSION)} on {escape(made)}.{credit}</footer>
</main>
{data}{"".join(f"<script>{script}</script>" for script in scripts)}"""
    return whole_file(escaped(title), f"{allowed}; base-uri 'none'; form-action 'none'", style, body)


def whole_file(title: str, policy: str, style: str, body: str) -> str:
    """A file of HTML that loads nothing but what its content security policy allows; `title` and `body` are HTML."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; {policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _hash(text: str) -> str:
    """The source expression that allows an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def escaped(value: Any) -> str:
    return escape(printable(plain(value)))


def section(title: str, content: str) -> str:
    """A section of a page, or nothing if it has no content; `title` is HTML."""
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _color_of_run(number: int) -> str:
    """The class of a run's color, and of its dash if the colors are repeated."""
    return f"run-{number % _HUES}{' dashed' if number >= _HUES else ''}"


def _run_name(run: Recorded, number: int) -> str:
    return f'<i class="dot {_color_of_run(number)}"></i>{escaped(run.name)}'


def _each(part: Callable[[Recorded], str], runs: Sequence[Recorded], is_folded: bool = False) -> str:
    """A part of the page for each run that has it: below its name, or folded behind it."""
    parts = []
    for number, run in enumerate(runs):
        content = part(run)
        if content and (is_folded or len(runs) > _MANY):
            parts.append(f"<details><summary>{_run_name(run, number)}</summary>{content}</details>")
        elif content:
            parts.append((f"<h3>{_run_name(run, number)}</h3>" if len(runs) > 1 else "") + content)
    return "".join(parts)


# --------------------------------------------------------------------------- top


def _header(runs: Sequence[Recorded]) -> str:
    if len(runs) == 1:
        return f"<header><h1>{escaped(runs[0].name)}</h1></header>"
    heads, rows = ranking(runs)
    cells = [[_run_name(runs[number], number), *map(escaped, row)] for number, row in rows]
    table = _table(["run", *heads], cells, "ranking")
    return f"<header><h1>{len(runs)} runs</h1></header><section>{table}</section>"


def _card(run: Recorded, number: int) -> str:
    tiles = "".join(f"<div><b>{escaped(value)}</b><span>{escaped(name)}</span></div>" for name, value in _figures(run))
    lines = "".join(f"<li><b>{each.kind}</b> {escaped(each)}</li>" for each in flags(run))
    flagged = f'<ul class="flags">{lines}</ul>' if lines else ""
    known = run.state if run.state in _STATES else ""
    return (
        f'<article class="card {_color_of_run(number)}">'
        f'<h2>{escaped(run.name)}<span class="state {known}">{escaped(run.state)}</span></h2>'
        f'<div class="tiles">{tiles}</div>{flagged}</article>'
    )


def _figures(run: Recorded) -> Iterator[tuple[str, str]]:
    wanted = run.config.get("training.steps")
    yield f"step of {wanted:,}" if is_step(wanted) else "step", f"{run.step:,}"
    forms: dict[str, tuple[str, Callable[[float], str]]] = {
        "loss": ("loss, last logged", fixed),
        "validation_loss": ("validation loss, last", fixed),
        "validation_bits_per_byte": ("bits per byte, last", fixed),
        "tokens": ("tokens", count),
        "goodput": ("goodput", lambda share: percent(share, 0)),
    }
    for key, (name, form) in forms.items():
        value = run.last(key)
        if value is not None:
            yield name, form(value)
    medians: dict[str, tuple[str, Callable[[float], str]]] = {"tokens_per_second": ("tokens/s, median", count)}
    medians["mfu"] = ("MFU, median", percent)
    for key, (name, form) in medians.items():
        if values := run.column(key)[1]:
            yield name, form(median(values))
    peaks = run.column("memory_peak_bytes")[1]
    if peaks:
        yield "peak memory", size(max(peaks))


_CONTROLS = """<section><h2>Curves</h2><p class="hint">Drag over a chart to zoom: sideways all
charts, upward this one; double-click to zoom out. Click a run, or a line's name, to hide it. The page's address keeps
the view.</p></section>
<div class="controls">
<span class="switch" data-choice="axis"><button value="step">Steps</button><button value="tokens">Tokens</button
><button value="hours">Time</button></span>
<span class="switch" data-choice="last"><button value="1">All</button><button value="0.5">Last half</button
><button value="0.1">Last tenth</button></span>
<label>Smoothing <input id="smooth" type="range" min="0" max="50"> <output></output></label>
<span id="runs"></span>
</div>
<noscript><p>The curves need JavaScript.</p></noscript>"""


# --------------------------------------------------------------------------- tables


def _table(head: Iterable[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table from cells of HTML, that scrolls if it is too wide."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(map(_row, rows))
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(cells: Sequence[str]) -> str:
    rest = "".join(f"<td>{cell}</td>" for cell in cells[1:])
    return f"<tr><th>{cells[0]}</th>{rest}</tr>"


def _heads(runs: Sequence[Recorded]) -> list[str]:
    return [_run_name(run, number) for number, run in enumerate(runs)]


def _differences(runs: Sequence[Recorded]) -> str:
    known = [(number, run) for number, run in enumerate(runs) if run.config]
    if len(known) < 2:
        return ""
    rows = differences([run.config for _, run in known])
    if not rows:
        return "<p>The configs are the same but for name and folder.</p>"
    cells = [[f"<code>{escaped(key)}</code>", *(f"<code>{escaped(v)}</code>" for v in values)] for key, values in rows]
    return _table(["key", *(_run_name(run, number) for number, run in known)], cells)


def _launches(run: Recorded) -> str:
    if not run.launches:
        return ""
    ends = [*(launch.previous for launch in run.launches[1:]), run.status]
    rows = []
    for place, (launch, end) in enumerate(zip(run.launches, ends, strict=True), 1):
        reason = plain(end.get("reason") or "").partition("\n")[0]
        state = end.get("state", "unknown") if place < len(run.launches) else run.state
        silent = state == "running" and place < len(run.launches)
        ended = f"{'ended without a word' if silent else state}{f': {reason}' if reason else ''}"
        facts = [launch.mesh, f"{plain(launch.facts.get('device'))} on {plain(launch.facts.get('host'))}"]
        incarnation = launch.facts.get("incarnation")
        name = f"{place} (incarnation {incarnation})" if is_step(incarnation) else str(place)
        steps = [f"{launch.step:,}", _reached(end.get("step"))]
        rows.append([name, *map(escaped, (_date(launch.started), *steps, *facts, ended))])
    head = ["launch", "began", "from step", "to step", "mesh", "device", "last status"]
    changes = [f"step {change.step:,}: {'; '.join(change.changes)}" for change in run.run_changes]
    changed = f"<p>Run keys changed on the resume from {escaped('. From '.join(changes))}</p>" if changes else ""
    return _table(head, rows, "launches") + changed


def _date(seconds: Any) -> str:
    """Seconds since the epoch as local date and time."""
    if not is_date(seconds):
        return f"not a date: {number_text(seconds)}"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _reached(step: Any) -> str:
    return f"{step:,}" if is_step(step) else "?" if step is None else f"not a step: {number_text(step)}"


def _absurd(runs: Sequence[Recorded]) -> str:
    found = [(number, *each) for number, run in enumerate(runs) for each in run.absurd]
    rows = [[_run_name(runs[number], number), *map(escaped, each)] for number, *each in found[:_ABSURD]]
    more = f"<p>and {len(found) - _ABSURD:,} more</p>" if len(found) > _ABSURD else ""
    return _table(["run", "where", "key", "value"], rows) + more if rows else ""


def _environment(runs: Sequence[Recorded]) -> str:
    columns = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = []
    for name in names:
        values = [column.get(name, "-") for column in columns]
        differs = ' class="differs"' if len(set(values)) > 1 else ""
        rows.append([escaped(name), *(f"<span{differs}>{escaped(value)}</span>" for value in values)])
    return _table(["", *_heads(runs)] if len(runs) > 1 else ["", ""], rows) if rows else ""


def _facts(run: Recorded) -> dict[str, str]:
    """The environment of the newest launch."""
    if not run.launches:
        return {}
    launch = run.launches[-1]
    environment = launch.facts.get("environment")
    facts = {"host": launch.facts.get("host"), "mesh": launch.mesh, "torch": launch.facts.get("torch")}
    facts |= environment if isinstance(environment, dict) else {}
    return {name: plain(value) for name, value in facts.items()} | {"folder": str(run.folder)}


def _config(run: Recorded) -> str:
    lines = "\n".join(f"{escaped(key)} = {escaped(value_text(value))}" for key, value in run.config.items())
    return f"<pre>{lines}</pre>" if lines else ""


def _evaluation(runs: Sequence[Recorded]) -> str:
    """The newest result of each task and measure, with its standard error and step."""
    found = [_results(run) for run in runs]
    names = list(dict.fromkeys(name for results in found for name in results))
    rows = [[escaped(name), *(results.get(name, "-") for results in found)] for name in names]
    return _table(["task", *(_heads(runs) if len(runs) > 1 else ["result"])], rows) if rows else ""


def _results(run: Recorded) -> dict[str, str]:
    results = {}
    for record in run.records:
        tasks = record.get("evaluation")
        for task, measures in tasks.items() if isinstance(tasks, dict) else ():
            for measure, value in measures.items() if isinstance(measures, dict) else ():
                if is_number(value) and not is_error(measure):
                    error = error_of(measures, measure)
                    spread = f" ± {fixed(error)}" if is_number(error) else ""
                    step = f"<small>step {record['step']:,}</small>"
                    results[f"{task}: {measure}"] = f"{fixed(value)}{spread} {step}"
    return results


# --------------------------------------------------------------------------- time


def _time(run: Recorded) -> str:
    wall = run.wall_seconds()
    spent = run.seconds()
    if not wall or not spent:
        return ""
    spent = {kind: spent[kind] for kind in (*_KINDS, *(spent.keys() - set(_KINDS))) if spent.get(kind)}
    rest = max(0.0, wall - sum(spent.values()))
    words = {kind.key: kind.value for kind in Kind}
    shares = [Share(words.get(kind, kind), _color(kind), value) for kind, value in spent.items()]
    drawn, legend = bar([*shares, Share(_NOT_RECORDED, "kind-none", rest)], wall, duration)
    return (
        f'<div class="time">{drawn}{_stack(run, list(spent))}'
        f'<div class="ends"><span>first launch</span><span>{duration(wall)} later</span></div>{legend}</div>'
    )


class Share(NamedTuple):
    """A part of a bar."""

    name: str
    color: str
    value: float


def bar(shares: Iterable[Share], whole: float, form: Callable[[float], str]) -> tuple[str, str]:
    """Draw the shares of a whole; returns the bar and its legend, which leaves out what rounds to nothing."""
    boxes = []
    items = []
    left = 0.0
    for name, color, value in shares:
        width = 100 * value / whole
        box = f'class="{color}" x="{left:.3f}" width="{width:.3f}" height="1"'
        boxes.append(f"<rect {box}><title>{escaped(name)}: {form(value)}</title></rect>")
        if width >= 0.05:
            figures = f"<b>{percent(value / whole)}</b><span>{form(value)}</span>"
            items.append(f'<li><i class="dot {color}"></i>{escaped(name)}{figures}</li>')
        left += width
    drawn = f'<svg class="bar" viewBox="0 0 100 1" preserveAspectRatio="none">{"".join(boxes)}</svg>'
    return drawn, f'<ul class="legend">{"".join(items)}</ul>'


def _color(kind: str) -> str:
    return f"kind-{_KINDS.index(kind)}" if kind in _KINDS else "kind-other"


def _stack(run: Recorded, kinds: Sequence[str]) -> str:
    """The stacked picture: the wall clock from left to right, the share of each kind upward."""
    parts = []
    for place, shares in enumerate(spans(run, _BINS)):
        bottom = 100.0
        for kind in kinds:
            height = min(bottom, 100 * shares.get(kind, 0.0))
            bottom -= height
            if height >= 0.05:
                box = f'x="{place}" y="{bottom:.1f}" width="1.02" height="{height:.1f}"'
                parts.append(f'<rect class="{_color(kind)}" {box}/>')
    label = "share of each kind of work over the wall clock"
    return (
        f'<svg class="stack" viewBox="0 0 {_BINS} 100" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def _plan(run: Recorded) -> str:
    """What the run's last record says of its plan, the largest difference first, and the planned parts of a step."""
    rows = []
    for record in run.records[-1:]:
        compared, parts = (record.get(key) for key in ("plan", "planned_parts"))
        for key, pair in compared.items() if isinstance(compared, dict) else ():
            planned, measured = (pair.get(which) if isinstance(pair, dict) else None for which in _COMPARED)
            if is_number(planned) and is_number(measured):
                form = size if key.endswith("_bytes") else brief
                difference = percent(measured / planned - 1) if planned else "-"
                rows.append([escaped(title_of(key)), form(planned), form(measured), difference])
        for part, seconds in parts.items() if isinstance(parts, dict) else ():
            if is_number(seconds):
                rows.append([f"<small>{escaped(part)}</small>", brief(seconds), "-", "-"])
    return _table(["", *_COMPARED, "difference"], rows) if rows else ""


def _experts(run: Recorded) -> str:
    """A picture with a row for each layer and a column for each expert, over the run's last logged steps."""
    n_steps, layers = recent_shares(run)
    if not layers:
        return ""
    rows = "".join(_layer(place, *each) for place, each in enumerate(layers.items()))
    width = max(map(len, layers.values()))
    box = f'viewBox="0 0 {width} {len(layers)}" preserveAspectRatio="none"'
    names = [words for _, words in BANDS] + [f"over {BANDS[-1][0]:g}"]
    items = "".join(f'<li><i class="dot load-{i}"></i>{words}</li>' for i, words in enumerate(names))
    return (
        f'<div class="time"><svg class="loads" {box} role="img" aria-label="loads of experts">{rows}</svg>'
        f'<div class="ends"><span>expert 0</span><span>expert {width - 1}</span></div>'
        f'<ul class="legend">{items}</ul><p class="hint">A row is a layer, from {escaped(next(iter(layers)))} on top '
        f"to {escaped([*layers][-1])}; a color is an expert's tokens over the mean of its layer's, in the last "
        f"{n_steps} logged steps.</p></div>"
    )


def _layer(place: int, name: str, experts: Sequence[float]) -> str:
    most, least = (choose(range(len(experts)), key=experts.__getitem__) for choose in (max, min))
    said = f"expert {most} has {experts[most]:.2f} of an even share, expert {least} has {experts[least]:.2f}"
    drawn = (
        f'<rect class="load-{color}" x="{first}" y="{place}" width="{width}" height="1"/>'
        for color, first, width in boxes(experts)
    )
    return f"<g><title>layer {escaped(name)}: {said}</title>{''.join(drawn)}</g>"


# --------------------------------------------------------------------------- commands after a save


def _commands(run: Recorded) -> str:
    parts = []
    for name, steps in run.commands.items():
        *earlier, newest = steps
        kept = [earlier[i] for i in thin(range(len(earlier)), _PRINTED)] if earlier else []
        older = "".join(_printed(run, name, step) for step in reversed(kept))
        more = f"<details><summary>{len(kept)} earlier</summary>{older}</details>" if kept else ""
        parts.append(f'<div class="printed">{_printed(run, name, newest)}{more}</div>')
    return "".join(parts)


def _printed(run: Recorded, name: str, step: int) -> str:
    shown = shortened(run.printed(name, step), _PRINTED_CHARACTERS)
    return f"<figure><figcaption>{escaped(name)}, step {step:,}</figcaption><pre>{escaped(shown)}</pre></figure>"
