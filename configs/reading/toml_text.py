"""Writes values and tables as TOML that reads back to equal ones."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from configs.reading.keys import KeyPath

Comment = Callable[[KeyPath], str]
"""Returns the comment to write after the key at a path."""
NOT_SET = "(not set)"


def value_text(value: Any) -> str:
    """Write one value as TOML, in which JSON's string escapes and Python's number formats are also valid."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON does not escape DEL
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(value_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key_text(key)} = {value_text(item)}" for key, item in value.items()) + "}"
    return str(value)


def text_or_not_set(value: Any) -> str:
    """Write one value as TOML, or say that it is not set (None)."""
    return NOT_SET if value is None else value_text(value)


def table_text(values: dict[str, Any], comment: Comment | None = None) -> str:
    """Write a whole document; keys without a value (None) are left out, or listed as comments if there are comments."""
    return "\n".join(_lines(values, (), comment)).lstrip("\n") + "\n"


def _lines(table: dict[str, Any], path: KeyPath, comment: Comment | None) -> Iterator[str]:
    """Write plain keys first: after the header of an inner table they would belong to that table."""
    inner = {key: value for key, value in table.items() if isinstance(value, dict) or _is_list_of_tables(value)}
    for key, value in table.items():
        if key not in inner:
            yield from _key_line(key, value, comment and comment((*path, key)))
    for key, value in inner.items():
        header = ".".join(_key_text(part) for part in (*path, key) if isinstance(part, str))
        if isinstance(value, dict):
            yield from ("", f"[{header}]", *_lines(value, (*path, key), comment))
            continue
        for index, item in enumerate(value):
            yield from ("", f"[[{header}]]", *_lines(item, (*path, key, index), comment))


def _key_line(key: str, value: Any, comment: str | None) -> Iterator[str]:
    text = f"# {key} is not set" if value is None else f"{_key_text(key)} = {value_text(value)}"
    if comment is not None:
        yield text if value is None else f"{text:<40}  # {comment}"
    elif value is not None:
        yield text


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _key_text(key: str) -> str:
    bare = key.replace("_", "").replace("-", "")
    return key if bare.isascii() and bare.isalnum() else value_text(key)
