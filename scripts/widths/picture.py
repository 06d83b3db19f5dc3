"""Line charts as one SVG file that needs nothing else: rows of panels, each with a few lines."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 210
_HEIGHT = 190
_LEFT = 46
_TOP = 30
_BOTTOM = 36
_RIGHT = 8
_TICKS: tuple[Sequence[float], ...] = (
    [n / 10 for n in range(10, 100)],
    [n / 5 for n in range(5, 50)],
    range(1, 10),
    (1, 1.5, 2, 3, 5, 7),
    (1, 2, 5),
    (1, 3),
    (1,),
)
"""Digits of values at an axis, from many to few."""
_MOST_TICKS = 6
_COLORS = ("#c7d3e3", "#9db4d3", "#7295c2", "#4a76b0", "#2a5a9a", "#123f7c")
"""Lines from light to dark: their order is that of steps, or of widths."""


@dataclass(frozen=True)
class Line:
    """One line of a panel."""

    label: str
    points: Sequence[tuple[float, float]]
    """x, y. A y that a logarithmic axis does not have, since it is not finite or not above 0, is left out."""
    marked: float | None = None
    """The x that a dot marks."""


@dataclass(frozen=True)
class Panel:
    """One chart with logarithmic axes."""

    title: str
    lines: Sequence[Line]
    ticks: Sequence[float] = ()
    """The x that have labels; none: those of the points."""


def picture(title: str, x_label: str, rows: Sequence[Sequence[Panel]], same_y: bool = False) -> str:
    """Draw rows of panels, whose first row has the legend of all; panels in a column have one y-axis.

    Args:
        title: stands above.
        x_label: stands under each panel.
        rows: the panels.
        same_y: one y-axis for all panels.
    """
    columns = max(map(len, rows))
    width = columns * _WIDTH + 100
    height = 34 + len(rows) * _HEIGHT
    parts = [_text(8, 18, title, 13, weight="bold")]
    everywhere = _span((panel for row in rows for panel in row), 1.1)
    for number, row in enumerate(rows):
        for column, panel in enumerate(row):
            span = everywhere if same_y else _span((other[column] for other in rows), 2)
            parts.append(f'<g transform="translate({column * _WIDTH} {28 + number * _HEIGHT})">')
            parts += [*_panel(panel, x_label, span), "</g>"]
    lines = rows[0][0].lines
    for number, line in enumerate(lines):
        y = 62 + 15 * number
        x = columns * _WIDTH + 6
        color = _color(number, len(lines))
        parts.append(f'<path d="M{x} {y}h16" stroke="{color}" stroke-width="2"/>{_text(x + 21, y + 4, line.label, 10)}')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _span(panels: Iterator[Panel], apart: float) -> tuple[float, float]:
    """The least and the largest y, as logarithms; at least a factor `apart`."""
    values = [math.log10(y) for panel in panels for line in panel.lines for _, y in line.points if 0 < y < math.inf]
    low = min(values, default=0.0)
    high = max(values, default=0.0)
    more = max(0.0, math.log10(apart) - (high - low)) / 2 + 0.04 * (high - low)
    return low - more, high + more


def _panel(panel: Panel, x_label: str, span: tuple[float, float]) -> Iterator[str]:
    low, high = span
    xs = sorted({math.log10(x) for line in panel.lines for x, _ in line.points})
    right = _WIDTH - _RIGHT
    bottom = _HEIGHT - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - xs[0]) / (xs[-1] - xs[0] or 1)
        up = (math.log10(y) - low) / (high - low)
        return _LEFT + 6 + across * (right - _LEFT - 12), bottom - up * (bottom - _TOP)

    yield _text(_LEFT, 20, panel.title, 11)
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#888"/>'
    for y in _ticks(low, high):
        at = place(10 ** xs[0], y)[1]
        yield f'<path d="M{_LEFT} {at:.1f}H{right}" stroke="#eee"/>{_text(_LEFT - 4, at + 3, f"{y:.3g}", 9, "end")}'
    for x in panel.ticks or [10**x for x in xs[:: math.ceil(len(xs) / 5)]]:
        yield _text(place(x, 10**low)[0], bottom + 13, f"{x:.4g}", 9, "middle")
    yield _text((_LEFT + right) / 2, bottom + 27, x_label, 9, "middle")
    for number, line in enumerate(panel.lines):
        color = _color(number, len(panel.lines))
        points = [(x, place(x, y)) for x, y in line.points if 0 < y < math.inf]
        path = " ".join(f"{across:.1f},{up:.1f}" for _, (across, up) in points)
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>'
        for across, up in (at for x, at in points if x == line.marked):
            yield f'<circle cx="{across:.1f}" cy="{up:.1f}" r="4" fill="{color}"/>'


def _ticks(low: float, high: float) -> list[float]:
    """Round values within, of which there are few."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    choices = [[factor * 10.0**n for n in powers for factor in factors] for factors in _TICKS]
    found = [[y for y in choice if low <= math.log10(y) <= high] for choice in choices]
    return next((each for each in found if 2 <= len(each) <= _MOST_TICKS), found[-1])


def _color(number: int, n: int) -> str:
    return _COLORS[round(number * (len(_COLORS) - 1) / max(1, n - 1))]


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="#222"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
