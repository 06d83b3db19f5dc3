"""A config as an earlier version of Keel kept it, with the keys that were removed since."""

from typing import Any

from configs.reading.removed import REMOVED


def add_removed_keys(values: dict[str, Any], **others: Any) -> None:
    """Add all removed keys to nested tables: with their defaults, but for `others`, by dotted name."""
    for name, (default, _) in REMOVED.items():
        _add(values, name.split("."), others.get(name, default))


def _add(tables: Any, path: list[str], value: Any) -> None:
    key, *rest = path
    if key == "N":
        for table in tables:
            _add(table, rest, value)
    elif rest:
        _add(tables.setdefault(key, {}), rest, value)
    else:
        tables[key] = value
