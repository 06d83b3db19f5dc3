"""Compares the run keys of two configs, which a resume refuses to change unless allowed."""

from typing import Any

from configs.load import leaves
from configs.reading.keys import KeyPath, dotted, find
from configs.reading.toml_text import value_text
from configs.schema import is_run_key


def run_key_diff(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Compare the run keys of two complete configs, given as nested tables.

    A key that is missing on one side (saved before the key existed) counts as set to its default.

    Returns:
        One line per changed key, `"training.seed: 0 -> 1"`; empty if none changed.
    """
    before, after = _run_values(old), _run_values(new)
    lines = []
    for path in sorted(before.keys() | after.keys(), key=lambda path: list(map(str, path))):
        was, now = (values.get(path, _default(path)) for values in (before, after))
        if was != now:
            lines.append(f"{dotted(path)}: {_text(was)} -> {_text(now)}")
    return lines


def _run_values(config: dict[str, Any]) -> dict[KeyPath, Any]:
    return {path: value_at(config, path) for path in leaves(config) if is_run_key(dotted(path))}


def value_at(config: Any, path: KeyPath) -> Any:
    """Return the value at `path` in nested tables."""
    for part in path:
        config = config[part]
    return config


def _default(path: KeyPath) -> Any:
    key = find(path)
    return key.default if key else None


def _text(value: Any) -> str:
    return "(not set)" if value is None else value_text(value)
