"""The load of each expert and layer, as shares: tokens over the mean of the layer's experts, 1 is even."""

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from scripts.page.recorded import Recorded, is_number
from trainer.report.starving import SHARE, STEPS

BANDS = ((SHARE, f"under {SHARE:g}"), (0.5, "to 0.5"), (0.8, "to 0.8"), (1.25, "to 1.25"), (2.0, "to 2"))
"""Where each color of the picture ends, and its words; above the last there is one more."""


def shares(value: Any) -> dict[str, list[float]]:
    """The shares by layer of a record's `tokens_per_expert`, without layers that have no tokens or no numbers."""
    layers = value.items() if isinstance(value, dict) else ()
    return {
        layer: [tokens * len(counts) / sum(counts) for tokens in counts]
        for layer, counts in layers
        if isinstance(counts, list) and all(is_number(n) and n >= 0 for n in counts) and sum(counts) > 0
    }


def recent_shares(run: Recorded) -> tuple[int, dict[str, list[float]]]:
    """The mean shares by layer of the run's last logged steps, as many as a starving expert is looked for in."""
    found = [each for record in run.records[-STEPS:] if (each := shares(record.get("tokens_per_expert")))]
    newest = found[-1] if found else {}
    alike = [each for each in found if _widths(each) == _widths(newest)]
    return len(alike), {layer: [*map(fmean, zip(*(each[layer] for each in alike), strict=True))] for layer in newest}


def _widths(layers: dict[str, list[float]]) -> dict[str, int]:
    return {layer: len(experts) for layer, experts in layers.items()}


def boxes(experts: Sequence[float]) -> list[tuple[int, int, int]]:
    """Number of the color, first expert and number of experts of each part of a row of the picture."""
    parts = []
    first = 0
    for color, alike in groupby(sum(share >= end for end, _ in BANDS) for share in experts):
        width = len([*alike])
        parts.append((color, first, width))
        first += width
    return parts
