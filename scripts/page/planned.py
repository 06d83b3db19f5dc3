"""The page of `keel plan --html`: what each kind of rank holds at its peak, and where a step's time goes, as bars."""

from collections.abc import Callable, Mapping, Sequence

from scripts.page.html import Share, bar, document, escaped, section
from scripts.plan_tables import PART_WORDS
from trainer.planning.pipeline_order import Pass
from trainer.planning.timeline import UPDATE, RankLine
from trainer.report.console import Row
from trainer.report.units import brief, size

_ORDER = (
    *("products", "attention", "Gated DeltaNet", "elementwise", "head and loss", "recomputation"),
    "slower products beside fsdp",
)
"""Parts of a step that compute, which come first; then what is exposed, the bubble, and the update."""
_LAST = ("pipeline bubble", "optimizer", "waiting for the host")
_WAITS = "waiting for the slowest rank"
_FREE = "free"
_COLORS = 12
_MOST_PASSES = 4000
"""Boxes of one page's timeline, so that a browser draws it at once."""


def planned_page(
    title: str,
    tables: Mapping[str, Sequence[Row]],
    held: Mapping[int, Mapping[str, float]],
    device_bytes: int | None,
    steps: Mapping[int, Mapping[str, float]],
    stages: tuple[str, str] = ("", ""),
    lines: Sequence[RankLine] = (),
) -> str:
    """Make the page.

    Args:
        tables: of the plan, by heading.
        held: bytes by part, by rank of the pipeline.
        device_bytes: the memory of a GPU, None if unknown.
        steps: seconds of a step by part, by rank of the pipeline; empty without a device.
        stages: of a run with several, words for those that memory and a step are shown of.
        lines: when each rank of the pipeline passes micro-batches and updates; empty without a device.
    """
    of_memory, of_step = stages
    room = max(device_bytes or 0, *(sum(parts.values()) for parts in held.values()))
    memory = {rank: {**parts, _FREE: room - sum(parts.values())} for rank, parts in held.items()}
    longest = max((sum(parts.values()) for parts in steps.values()), default=0.0)
    times = {rank: _in_order(parts, longest) for rank, parts in steps.items()}
    sections = [f"<header><h1>{escaped(title)}</h1></header>"]
    sections.append(section(f"Memory at the peak{of_memory}", _bars(memory, size)))
    if times:
        sections.append(section(f"One step{of_step}, by kind of work", _bars(times, brief)))
    if lines:
        sections.append(section(f"One step{of_step}, by micro-batch", _timeline(lines)))
    sections += [section(heading, _table(rows)) for heading, rows in tables.items()]
    return document(title, "".join(sections))


def _in_order(parts: Mapping[str, float], longest: float) -> dict[str, float]:
    """The parts as a timeline: what computes, what is exposed by axis, the bubble, the update, and the wait."""
    exposed = [part for part in parts if part not in (*_ORDER, *_LAST)]
    names = [name for name in (*_ORDER, *exposed, *_LAST) if name in parts]
    return {name: parts[name] for name in names} | {_WAITS: longest - sum(parts.values())}


def _bars(by_rank: Mapping[int, Mapping[str, float]], form: Callable[[float], str]) -> str:
    """A bar for each rank, in which a part has the same color."""
    names = dict.fromkeys(name for parts in by_rank.values() for name in parts)
    colors = {name: f"run-{number % _COLORS}" for number, name in enumerate(names)}
    colors |= dict.fromkeys((_FREE, _WAITS), "kind-none")
    bars = []
    for rank, parts in by_rank.items():
        heading = f"<h3>rank {rank} of the pipeline</h3>" if len(by_rank) > 1 else ""
        shares = [Share(PART_WORDS.get(name, name), colors[name], value) for name, value in parts.items()]
        bars.append(f'{heading}<div class="time">{"".join(bar(shares, sum(parts.values()), form))}</div>')
    return "".join(bars)


def _timeline(lines: Sequence[RankLine]) -> str:
    """A line for each rank, with a box for each pass of a micro-batch and the update, and one below for FSDP."""
    all_passes = sorted((each for line in lines for each in line.passes), key=lambda each: each.start)
    shown = all_passes[:_MOST_PASSES]
    until = max(each.end for each in shown)
    drawn = [(style, row) for line in lines for style, row in (("passes", line.passes), ("beside", line.fsdp)) if row]
    kinds = dict.fromkeys(each.work.kind for row in (shown, *(row for _, row in drawn)) for each in row)
    colors = {kind: f"run-{number}" for number, kind in enumerate(kinds)}
    rows = []
    for style, row in drawn:
        boxes = "".join(_box(each, until, colors) for each in row if each.start <= shown[-1].start)
        rows.append(f'<svg class="{style}" viewBox="0 0 100 1" preserveAspectRatio="none">{boxes}</svg>')
    legend = "".join(f'<li><i class="dot {color}"></i>{escaped(kind)}</li>' for kind, color in colors.items())
    part = f", the first {len(shown):,} of {len(all_passes):,} passes" if len(shown) < len(all_passes) else ""
    who = "Ranks of the pipeline from the first down" if len(lines) > 1 else "Any rank"
    fsdp = ", FSDP in a thin line below" if len(drawn) > len(lines) else ""
    words = f"{who}{fsdp}, for {brief(until)}{part}."
    return f'<div class="time">{"".join(rows)}<ul class="legend">{legend}</ul><p class="hint">{words}</p></div>'


def _box(each: Pass, until: float, colors: Mapping[str, str]) -> str:
    kind, stage, micro_batch = each.work
    odd = " odd" if micro_batch % 2 else ""
    place = f'x="{100 * each.start / until:.3f}" width="{100 * each.seconds / until:.3f}" height="1"'
    what = kind if kind == UPDATE else f"{kind} of micro-batch {micro_batch}, stage {stage}"
    words = f"{what}: {brief(each.seconds)} at {brief(each.start)}"
    return f'<rect class="{colors[kind]}{odd}" {place}><title>{escaped(words)}</title></rect>'


def _table(rows: Sequence[Row]) -> str:
    body = "".join(f"<tr><th>{escaped(label)}</th><td>{escaped(words)}</td></tr>" for label, words in rows)
    return f'<div class="scroll"><table><tbody>{body}</tbody></table></div>'
