"""Turns pydantic's errors into messages that name the place, what is expected, and the nearest key."""

import difflib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from configs.own_code import EXAMPLE
from configs.reading.keys import Key, KeyPath, dotted, find, general, key_path, nearest, schema_keys
from configs.reading.merge import Layers
from configs.reading.removed import REMOVED
from configs.reading.toml_text import value_text
from configs.schema import TABLES_OF_MODEL, tag_of_model

MAX_EXPLAINED = 200
"""The number of mistakes in a job that are explained."""


@dataclass(frozen=True)
class Mistake:
    """Something wrong with the value at a path."""

    path: KeyPath
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def explain(error: ValidationError, layers: Layers) -> list[Mistake]:
    """Return one mistake per key, in the order of the schema.

    A missing key is not reported if an unknown one is probably that key misspelled; nor are the missing and the unknown
    keys of a model whose architecture is wrong. Only the first MAX_EXPLAINED are explained, because finding the nearest
    key takes milliseconds.
    """
    first = _errors(error)[:MAX_EXPLAINED]
    if any(item["loc"][:2] == ("model", "architecture") for item in first):
        judged = ("missing", "extra_forbidden")
        first = [item for item in first if item["loc"][0] != "model" or item["type"] not in judged]
    found = {(_known(item["loc"]), item["type"] in ("missing", "extra_forbidden")): item for item in first}
    unknown = [item["loc"] for item in found.values() if item["type"] == "extra_forbidden"]
    meant = {_suggestion(path) for path in unknown}
    mistakes = [_unknown(path, layers) for path in unknown]
    for item in found.values():
        if item["type"] == "missing" and dotted(item["loc"]) not in meant:
            mistakes.append(_missing(item["loc"], layers))
        elif item["type"] not in ("missing", "extra_forbidden"):
            mistakes.append(_wrong(item["loc"], layers))
    return mistakes


def wrong_paths(error: ValidationError) -> Iterator[KeyPath]:
    """Yield the keys without a right value: wrong ones, missing ones, and likely meanings of unknown ones."""
    for item in _errors(error):
        yield _known(item["loc"])
        if item["type"] == "extra_forbidden" and (meant := _suggestion(item["loc"])):
            yield key_path(meant)


def _errors(error: ValidationError) -> list[dict[str, Any]]:
    """The errors, with the paths of a job file: pydantic adds which of the tables [model] it took."""
    found: list[dict[str, Any]] = [{**item} for item in error.errors()]
    for item in found:
        if item["loc"][:1] == ("model",):
            item["loc"] = (*item["loc"][:1], *item["loc"][2:])
    return found


def _known(path: KeyPath) -> KeyPath:
    """Cut a path after its key, without what is inside its value or pydantic's tag of a union's branch."""
    outer = (path[:end] for end in range(1, len(path)))
    return next((name for name in outer if (key := find(name)) and not key.is_table), path)


def _suggestion(path: KeyPath) -> str | None:
    near = nearest(general(path))
    for part in path:
        if near and isinstance(part, int):
            near = near.replace(".N.", f".{part}.", 1)
    return near


def _unknown(path: KeyPath, layers: Layers) -> Mistake:
    if remedy := _remedy(general(path)):
        kind = "key" if general(path) in REMOVED else "table"
        return Mistake(path, layers.where(path), f"{dotted(path)} is no longer a {kind}; {remedy}")
    if find(path) and path[0] == "model":
        return Mistake(path, layers.where(path), _of_another_architecture(path, layers))
    is_table = isinstance(layers.value(path), dict)
    name = f"table [{dotted(path)}]" if is_table else f"key {dotted(path)}"
    return Mistake(path, layers.where(path), f"unknown {name}; {_advice(path)}")


def _of_another_architecture(path: KeyPath, layers: Layers) -> str:
    """What to do with a key of [model] that another architecture has."""
    model = layers.values["model"]
    own = tag_of_model(model)
    if own == "hf":
        what = "the shape of the model comes from model.hf; leave it out, or set a field of it in model.hf_overrides"
    elif own == "own":
        what = "leave it out; what its class takes stands in [model.options]"
    else:
        is_options = path[1] in TABLES_OF_MODEL["own"].model_fields
        name = f'"{EXAMPLE}", a model of your own' if is_options else '"hf"'
        what = f"leave it out, or set architecture = {name}"
    return f'{dotted(path)} is no key of architecture "{model.get("architecture", own)}"; {what}'


def _remedy(name: str) -> str:
    """What to do instead of a removed key, or of a table all of whose keys were removed; "" if it is neither."""
    return next((remedy for key, (_, remedy) in REMOVED.items() if f"{key}.".startswith(f"{name}.")), "")


def _advice(path: KeyPath) -> str:
    if near := _suggestion(path):
        key = schema_keys().get(near)
        return f"did you mean {f'[{near}]' if key and key.type == 'table' else near}?"
    if len(path) > 1:
        return f"[{_table(path[:-1])}] has {', '.join(_keys_of(path[:-1]))}"
    return (
        f"there are {', '.join(f'[{name}]' for name, key in schema_keys().items() if '.' not in name and key.is_table)}"
    )


def _missing(path: KeyPath, layers: Layers) -> Mistake:
    key = find(path)
    assert key is not None
    if key.type == "table":
        needed = ", ".join(name for name, inner in _keys_of(path).items() if inner.required)
        remedy = f"it needs {needed}" if needed else "add it"
        return Mistake(path, layers.file, f"the table [{dotted(path)}] is missing; {remedy}")
    table = _table(path[:-1])
    return Mistake(
        path, layers.where(path[:-1]), f"[{table}] lacks {path[-1]} ({key.type}): {' '.join(key.doc.split())}"
    )


def _wrong(path: KeyPath, layers: Layers) -> Mistake:
    known = _known(path)
    where = layers.where(path)
    value = layers.value(known)
    key = find(known)
    if key and key.type == "list of tables" and value == []:
        return Mistake(known, where, f"{dotted(known)} is empty; it needs at least one table [[{dotted(known)}]]")
    if key is None:  # an item of a list of tables
        return Mistake(known, where, f"{dotted(known)} must be a table, got {_short(value)}")
    one_of = "one of " if len(key.choices) > 1 else _article(key.type)
    hint = _hint(key, value)
    if key.type == "list of tables" and isinstance(value, dict):
        hint = f"; write [[{dotted(known)}]]"
    return Mistake(known, where, f"{dotted(known)} must be {one_of}{key.type}, got {_short(value)}{hint}")


def _hint(key: Key, value: Any) -> str:
    if not isinstance(value, str):
        return "; write it in quotes" if key.type == "string" and not isinstance(value, (list, dict)) else ""
    near = difflib.get_close_matches(value, [each for each in key.choices if isinstance(each, str)], 1, 0.5)
    if near:
        return f"; did you mean {value_text(near[0])}?"
    is_quoted = key.type.startswith(("integer", "number", "true")) and _is_value(value)
    return "; write it without the quotes" if is_quoted else ""


def _is_value(text: str) -> bool:
    """Whether a text is a number or a truth value."""
    with suppress(ValueError):
        float(text)
        return True
    return text.lower() in ("true", "false")


def _article(kind: str) -> str:
    if kind.startswith(("true", '"')):
        return ""
    return "an " if kind[0] in "aeiou" else "a "


def _short(value: Any, width: int = 60) -> str:
    text = value_text(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def _table(path: KeyPath) -> str:
    """`("data", "sources", 0)` -> "[data.sources]", as its header is written."""
    name = ".".join(part for part in path if isinstance(part, str))
    return f"[{name}]" if isinstance(path[-1], int) else name


def _keys_of(table: KeyPath) -> dict[str, Key]:
    prefix = f"{general(table)}."
    return {
        name.removeprefix(prefix): key
        for name, key in schema_keys().items()
        if name.startswith(prefix) and "." not in name.removeprefix(prefix)
    }
