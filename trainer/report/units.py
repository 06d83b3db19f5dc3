"""Durations, counts and sizes as people read and write them."""

import argparse
import math
import re
from collections.abc import Sequence

INDENT = "  "
"""Indentation of rows under a title."""
WIDTH = 80
"""Characters of a line, so that it fits any terminal; only paths may be longer."""
_LONGEST = 1e11
"""Seconds that a duration can have; more, and numbers from `_MOST` on, are shown as such."""
_MOST = 1e18
_ROUNDED_UP = 1.0005
"""What is this much below the next digit or unit is shown as that: three digits of 999.6 M are 1.00 B."""


def fixed(number: float) -> str:
    """Format a loss or the like with four decimals: "3.8925"; what can't be one is shown as such: "1e+18"."""
    return f"{number:.4f}" if abs(number) < 1e6 else f"{number:.4g}"


def percent(share: float, decimals: int = 1) -> str:
    """Format a share as percent: "12.5%"; what can't be one is shown as such: "1e+20%"."""
    return f"{share:.{decimals}%}" if abs(share) < 1e4 else f"{100 * share:.3g}%"


def duration(seconds: float) -> str:
    """Format seconds in the two units that matter: "4.1 s", "2 min 31 s", "5 h 04 min", "3 d 02 h"."""
    if not seconds < _LONGEST:
        return f"{seconds:g} s"
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def brief(seconds: float) -> str:
    """Format seconds as `duration` does, below one in milliseconds, so that parts of a step can be compared."""
    return duration(seconds) if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"  # above, that would be "1e+03 ms"


def count(number: float) -> str:
    """Format a number to three digits with the field's suffix: 0.187, 950, "3.34 M", "1.24 B", "15.6 T"."""
    if not abs(number) < _MOST:
        return f"{number:.3g}"
    for factor, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if number * _ROUNDED_UP >= factor:
            return _three_digits(number / factor) + suffix
    if number >= 1e4:
        return _three_digits(number / 1e3) + " K"
    return f"{number:.3g}" if abs(number) < 10 else f"{number:,.0f}"


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size(n_bytes: float) -> str:
    """Format bytes to three digits: "512 MiB", "25.6 GiB"."""
    if not abs(n_bytes) < _MOST:
        return f"{n_bytes:.3g} bytes"
    for factor, suffix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if n_bytes * _ROUNDED_UP >= factor:
            return f"{_three_digits(n_bytes / factor)} {suffix}"
    return f"{_three_digits(n_bytes / 2**10)} KiB"


def parse_size(text: str) -> int:
    """Parse "500MB", "1.5 GiB" or "123" into bytes.

    Raises:
        argparse.ArgumentTypeError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.upper())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 500MB or 5GB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _three_digits(number: float) -> str:
    return f"{number:.{max(0, 2 - int(math.log10(max(number * _ROUNDED_UP, 1))))}f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines, with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
