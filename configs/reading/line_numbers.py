"""Finds the line of every key in a TOML text.

TOML parsers return values without their positions, but an error message needs the line. The text is valid, and is read
line by line: headers and the beginnings of `key = ...`. What stands inside a value is found at the line of its key; a
line inside a string or list of several lines that looks like a key or header is taken for one.
"""

import re

from configs.reading.keys import KeyPath

_NAME = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_DOTTED = rf"{_NAME}(?:\s*\.\s*{_NAME})*"
_HEADER = re.compile(rf"\s*\[(\[?)\s*({_DOTTED})\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(rf"\s*({_DOTTED})\s*=")


def line_numbers(text: str) -> dict[KeyPath, int]:
    """Line, counted from 1, at which each table and key of a valid TOML text first stands."""
    lines: dict[KeyPath, int] = {}
    n_items: dict[KeyPath, int] = {}  # of each list of tables
    table: KeyPath = ()
    for number, line in enumerate(text.split("\n"), 1):
        if header := _HEADER.match(line):
            table = _table(header[2], is_list=bool(header[1]), n_items=n_items)
            path = table
        elif key := _KEY.match(line):
            path = (*table, *_parts(key[1]))
        else:
            continue
        for end in range(1, len(path) + 1):
            lines.setdefault(path[:end], number)
    return lines


def _table(name: str, is_list: bool, n_items: dict[KeyPath, int]) -> KeyPath:
    """The path that a header names: the name of a list of tables means its latest item."""
    parts = _parts(name)
    path: KeyPath = ()
    for depth, part in enumerate(parts, 1):
        path = (*path, part)
        if is_list and depth == len(parts):
            n_items[path] = n_items.get(path, 0) + 1
        if path in n_items:
            path = (*path, n_items[path] - 1)
    return path


def _parts(name: str) -> list[str]:
    return [part.strip("\"'") for part in re.findall(_NAME, name)]
