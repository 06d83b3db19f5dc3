"""The page as one HTML file: words and tables are written here, curves are drawn by `page.js` with uPlot.

Nothing is loaded from anywhere: styles, scripts and data are part of the file, and its content security policy forbids
everything else. All that comes from a run folder is escaped, since it may be a stranger's.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from configs.reading.toml_text import value_text
from configs.untrusted import printable, shortened
from scripts.page.figures import axes, charts, marks, spans
from scripts.page.recorded import Recorded, differences, is_number
from scripts.page.thin import thin
from scripts.page.verdict import NOT_RECORDED, comparison, verdict
from trainer.report.metrics import Kind
from trainer.report.units import count, duration, size

_ASSETS = Path(__file__).parent
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_BINS = 120
_SAMPLES = 12
"""Samples of a prompt that the page has besides the last one."""
_SAMPLE_CHARACTERS = 4000
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


def page(runs: Sequence[Recorded], version: str) -> str:
    """Make the page that shows the runs together."""
    script = json.dumps(
        {"runs": [{"name": run.name, "marks": marks(run), "axes": axes(run)} for run in runs], "charts": charts(runs)},
        separators=(",", ":"),
        allow_nan=False,
    ).replace("<", "\\u003c")
    title = f"Keel: {', '.join(run.name for run in runs)}"
    body = "".join(
        [
            _header(runs),
            f'<section class="cards">{"".join(_card(run, number) for number, run in enumerate(runs))}</section>',
            _section("Differences", _differences(runs)) if len(runs) > 1 else "",
            _CONTROLS,
            '<div id="charts"></div>',
            _section("Where the time went", "".join(_time(run, n, len(runs)) for n, run in enumerate(runs))),
            _section("Stops and resumes", "".join(_launches(run, n, len(runs)) for n, run in enumerate(runs))),
            _section("Evaluation", _evaluation(runs)),
            _section("Samples", "".join(_samples(run, n, len(runs)) for n, run in enumerate(runs))),
            _section("Environment", _environment(runs)),
            _section("Configuration", "".join(_config(run, n, len(runs)) for n, run in enumerate(runs))),
        ]
    )
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{_text(title)}</title>
<style>{_asset("uplot/uPlot.min.css")}{_asset("page.css")}</style>
</head>
<body>
<main>
{body}
<footer>Made by Keel {escape(version)} on {escape(made)}. Curves: uPlot, © Leon Sorokin, MIT licence.</footer>
</main>
<script type="application/json" id="data">{script}</script>
<script>{_asset("uplot/uPlot.iife.min.js")}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _text(value: Any) -> str:
    return escape(printable(str(value)))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _dot(number: int) -> str:
    return f'<i class="dot" style="background:var(--run-{number % 8})"></i>'


def _run_heading(run: Recorded, number: int, n_runs: int) -> str:
    return f"<h3>{_dot(number)}{_text(run.name)}</h3>" if n_runs > 1 else ""


# --------------------------------------------------------------------------- top


def _header(runs: Sequence[Recorded]) -> str:
    title = _text(runs[0].name) if len(runs) == 1 else f"{len(runs)} runs"
    sentences = "".join(f"<p>{_text(sentence)}</p>" for sentence in comparison(runs)) if len(runs) > 1 else ""
    return f"<header><h1>{title}</h1>{sentences}</header>"


def _card(run: Recorded, number: int) -> str:
    tiles = "".join(f"<div><b>{_text(value)}</b><span>{_text(name)}</span></div>" for name, value in _figures(run))
    said = "".join(f'<li class="{each.mood}">{_text(each.text)}</li>' for each in verdict(run))
    return (
        f'<article class="card" style="--color:var(--run-{number % 8})">'
        f'<h2>{_text(run.name)}<span class="state {run.state}">{_text(run.state)}</span></h2>'
        f'<div class="tiles">{tiles}</div><ul class="verdict">{said}</ul></article>'
    )


def _figures(run: Recorded) -> Iterator[tuple[str, str]]:
    yield "step", f"{run.step:,}"
    forms = {
        "loss": ("loss", "{:.4f}".format),
        "validation_loss": ("validation loss", "{:.4f}".format),
        "validation_bits_per_byte": ("bits per byte", "{:.4f}".format),
        "tokens": ("tokens", count),
        "tokens_per_second": ("tokens/s", count),
        "mfu": ("MFU", "{:.1%}".format),
        "goodput": ("goodput", "{:.0%}".format),
    }
    for key, (name, form) in forms.items():
        value = run.last(key)
        if value is not None:
            yield name, form(value)
    peaks = run.column("memory_peak_bytes")[1]
    if peaks:
        yield "peak memory", size(max(peaks))


_CONTROLS = """<section><h2>Curves</h2><p class="hint">Drag over a chart to zoom all of them, double-click to zoom out;
on a touch screen, slide over a chart to read values.</p></section><div class="controls">
<span class="switch" data-choice="axis"><button value="step" class="on">Steps</button>
<button value="tokens">Tokens</button><button value="hours">Time</button></span>
<span class="switch" data-choice="range"><button value="1" class="on">All</button>
<button value="0.5">Last half</button><button value="0.1">Last tenth</button></span>
</div>
<noscript><p>The curves need JavaScript.</p></noscript>"""


# --------------------------------------------------------------------------- tables


def _table(head: Iterable[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table from cells of HTML, that scrolls if it is too wide."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr><th>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _heads(runs: Sequence[Recorded]) -> list[str]:
    return [f"{_dot(number)}{_text(run.name)}" for number, run in enumerate(runs)]


def _differences(runs: Sequence[Recorded]) -> str:
    rows = differences([run.config for run in runs])
    if not rows:
        return "<p>The configs are the same but for name and folder.</p>"
    cells = [[f"<code>{_text(key)}</code>", *(f"<code>{_text(v)}</code>" for v in values)] for key, values in rows]
    return _table(["key", *_heads(runs)], cells)


def _launches(run: Recorded, number: int, n_runs: int) -> str:
    if not run.launches:
        return ""
    ends = [*(launch.previous for launch in run.launches[1:]), run.status]
    rows = []
    for place, (launch, end) in enumerate(zip(run.launches, ends, strict=True), 1):
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(launch.started))
        reason = str(end.get("reason") or "").partition("\n")[0]
        state = end.get("state", "unknown") if place < len(run.launches) else run.state
        silent = state == "running" and place < len(run.launches)
        ended = f"{'ended without a word' if silent else state}{f': {reason}' if reason else ''}"
        step = end.get("step")
        facts = [launch.mesh, f"{launch.facts.get('device')} on {launch.facts.get('host')}"]
        reached = f"{step:,}" if isinstance(step, int) else "?"
        incarnation = launch.facts.get("incarnation")
        name = f"{place} (incarnation {incarnation})" if isinstance(incarnation, int) else str(place)
        rows.append([name, *map(_text, (began, f"{launch.step:,}", reached, *facts, ended))])
    head = ["launch", "began", "from step", "to step", "mesh", "device", "last status"]
    return _run_heading(run, number, n_runs) + _table(head, rows, "launches")


def _environment(runs: Sequence[Recorded]) -> str:
    columns = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = []
    for name in names:
        values = [column.get(name, "-") for column in columns]
        differs = ' class="differs"' if len(set(values)) > 1 else ""
        rows.append([_text(name), *(f"<span{differs}>{_text(value)}</span>" for value in values)])
    return _table(["", *_heads(runs)] if len(runs) > 1 else ["", ""], rows) if rows else ""


def _facts(run: Recorded) -> dict[str, str]:
    """The environment of the newest launch."""
    if not run.launches:
        return {}
    launch = run.launches[-1]
    environment = launch.facts.get("environment")
    facts = {"host": launch.facts.get("host"), "mesh": launch.mesh, "torch": launch.facts.get("torch")}
    facts |= environment if isinstance(environment, dict) else {}
    return {name: str(value) for name, value in facts.items()} | {"folder": str(run.folder)}


def _config(run: Recorded, number: int, n_runs: int) -> str:
    if not run.config:
        return ""
    lines = "\n".join(f"{_text(key)} = {_text(value_text(value))}" for key, value in run.config.items())
    name = f"{_dot(number)}{_text(run.name)}: " if n_runs > 1 else ""
    return f"<details><summary>{name}{len(run.config)} keys</summary><pre>{lines}</pre></details>"


def _evaluation(runs: Sequence[Recorded]) -> str:
    """The newest result of each task and measure, with its standard error and step."""
    found = [_results(run) for run in runs]
    names = list(dict.fromkeys(name for results in found for name in results))
    rows = [[_text(name), *(results.get(name, "-") for results in found)] for name in names]
    return _table(["task", *(_heads(runs) if len(runs) > 1 else ["result"])], rows) if rows else ""


def _results(run: Recorded) -> dict[str, str]:
    results = {}
    for record in run.records:
        tasks = record.get("evaluation")
        for task, measures in tasks.items() if isinstance(tasks, dict) else ():
            for measure, value in measures.items() if isinstance(measures, dict) else ():
                if is_number(value) and not measure.endswith("_stderr"):
                    error = measures.get(f"{measure}_stderr")
                    spread = f" ± {error:.4f}" if is_number(error) else ""
                    step = f"<small>step {record['step']:,}</small>"
                    results[f"{task}: {measure}"] = f"{value:.4f}{spread} {step}"
    return results


# --------------------------------------------------------------------------- time


def _time(run: Recorded, number: int, n_runs: int) -> str:
    wall, spent = run.wall_seconds(), run.seconds()
    if not wall or not spent:
        return ""
    spent = {kind: spent[kind] for kind in (*_KINDS, *(spent.keys() - set(_KINDS))) if spent.get(kind)}
    rest = max(0.0, wall - sum(spent.values()))
    words = {kind.key: kind.value for kind in Kind}
    shares = [(words.get(kind, kind), _color(kind), value) for kind, value in spent.items()]
    shares.append((NOT_RECORDED, "--kind-none", rest))
    bar = "".join(
        f'<i style="width:{100 * value / wall:.3f}%;background:var({color})" title="{_text(name)}"></i>'
        for name, color, value in shares
    )
    legend = "".join(
        f'<li><i class="dot" style="background:var({color})"></i>{_text(name)}'
        f"<b>{value / wall:.1%}</b><span>{duration(value)}</span></li>"
        for name, color, value in shares
        if value / wall >= 0.0005
    )
    return (
        f'{_run_heading(run, number, n_runs)}<div class="time"><div class="bar">{bar}</div>'
        f"{_stack(run, list(spent))}"
        f'<div class="ends"><span>first launch</span><span>{duration(wall)} later</span></div>'
        f'<ul class="legend">{legend}</ul></div>'
    )


def _color(kind: str) -> str:
    return f"--kind-{_KINDS.index(kind)}" if kind in _KINDS else "--kind-other"


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
                parts.append(f'<rect {box} style="fill:var({_color(kind)})"/>')
    label = "share of each kind of work over the wall clock"
    return (
        f'<svg class="stack" viewBox="0 0 {_BINS} 100" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


# --------------------------------------------------------------------------- samples


def _samples(run: Recorded, number: int, n_runs: int) -> str:
    by_prompt: dict[str, list[tuple[int, str]]] = {}
    for step, sample in _samples_of(run):
        by_prompt.setdefault(str(sample.get("prompt")), []).append((step, str(sample.get("text"))))
    if not by_prompt:
        return ""
    parts = [_run_heading(run, number, n_runs)]
    for prompt, texts in by_prompt.items():
        *earlier, (step, text) = texts
        kept = [earlier[i] for i in thin(range(len(earlier)), _SAMPLES)] if earlier else []
        older = "".join(_sample(prompt, text, step) for step, text in reversed(kept))
        more = f"<details><summary>{len(kept)} earlier</summary>{older}</details>" if kept else ""
        parts.append(f'<div class="sample">{_sample(prompt, text, step)}{more}</div>')
    return "".join(parts)


def _samples_of(run: Recorded) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for record in run.records:
        samples = record.get("samples")
        for sample in samples if isinstance(samples, list) else ():
            if isinstance(sample, dict):
                yield record["step"], sample


def _sample(prompt: str, text: str, step: int) -> str:
    shown = shortened(text, _SAMPLE_CHARACTERS)
    return f"<figure><figcaption>step {step:,}</figcaption><pre><b>{_text(prompt)}</b>{_text(shown)}</pre></figure>"
