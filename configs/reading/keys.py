"""The schema as a flat list of dotted keys, for the help text, the error messages and the command line.

The list is derived from pydantic's JSON schema, which has types, bounds, defaults and docstrings in one plain form, so
that a key added to `schema.py` is known everywhere. `N` denotes an index into a list of tables: `data.sources.N.path`.
"""

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from configs.only_with import Condition, conditions
from configs.schema import Config, Table

KeyPath = tuple[str | int, ...]
"""Path of a value in a job file: table names, indices of lists, key."""


@dataclass(frozen=True)
class Key:
    """A key or a table of the schema."""

    name: str
    """Dotted name."""
    type: str
    """The values that it accepts, in words: "integer > 0"; "table" for a table."""
    required: bool
    default: Any
    """None: no default value; the docstring says what applies."""
    choices: tuple[str, ...]
    """The strings that it accepts, if limited to some."""
    doc: str
    conditions: tuple[Condition, ...]
    """What it needs in order to have an effect."""

    @property
    def is_table(self) -> bool:
        return self.type in ("table", "list of tables")


@cache
def schema_keys() -> dict[str, Key]:
    """All keys and tables of a job file by dotted name, in the order of `schema.py`."""
    schema = Config.model_json_schema()
    return {key.name: key for key in _walk(Config, schema, schema["$defs"], "")}


def find(path: KeyPath) -> Key | None:
    """Return the key at a path, or None if the schema has none."""
    return schema_keys().get(general(path))


def general(path: KeyPath) -> str:
    """`("data", "sources", 0, "name")` -> `"data.sources.N.name"`, the name of the key in all items."""
    return ".".join("N" if isinstance(part, int) else part for part in path)


def dotted(path: Sequence[str | int]) -> str:
    """`("data", "sources", 0, "name")` -> `"data.sources.0.name"`, the form of a command-line flag."""
    return ".".join(map(str, path))


def key_path(name: str) -> KeyPath:
    """Invert `dotted`; a part made of digits is an index."""
    return tuple(int(part) if part.isascii() and part.isdigit() else part for part in name.split("."))


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield path and value of each key in nested tables and lists of tables; plain and empty lists are values."""
    is_tables = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    if isinstance(value, dict) or is_tables:
        for part, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, part))
    else:
        yield path, value


def flat(tables: dict[str, Any]) -> dict[str, Any]:
    """The values of nested tables by dotted name."""
    return {dotted(path): value for path, value in leaves(tables)}


def tables_in(annotation: Any) -> list[type[Table]]:
    """Return the table classes in a field's type: the type itself, or those inside a union or a list."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    return [table for inner in getattr(annotation, "__args__", ()) for table in tables_in(inner)]


def _walk(of: type[Table], table: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[Key]:
    for name, field in table["properties"].items():
        shape = _without_null(field)
        if "oneOf" in shape:
            yield from _walk_choice(of, name, definitions, prefix)
            continue
        item = shape.get("items", {})
        reference = shape.get("$ref") or item.get("$ref")
        inner = definitions[reference.rsplit("/", 1)[1]] if reference else None
        doc = (
            (inner or {}).get("description", "") if reference and "items" not in shape else field.get("description", "")
        )
        kind = ("list of tables" if item else "table") if inner else _words(shape)
        required = name in table.get("required", [])
        needs = tuple(conditions(of.model_fields[name]))
        yield Key(prefix + name, kind, required, field.get("default"), _choices(shape), doc, needs)
        if inner:
            (of_inner,) = tables_in(of.model_fields[name].annotation)
            yield from _walk(of_inner, inner, definitions, f"{prefix}{name}.{'N.' if item else ''}")


def _walk_choice(of: type[Table], name: str, definitions: dict[str, Any], prefix: str) -> Iterator[Key]:
    """The keys of a table that is one of several, such as [model]; what each of them has is merged."""
    tables = tables_in(of.model_fields[name].annotation)
    yield Key(prefix + name, "table", True, None, (), of.model_fields[name].description or "", ())
    found: dict[str, Key] = {}
    for table in tables:
        for key in _walk(table, definitions[table.__name__], definitions, f"{prefix}{name}."):
            found[key.name] = _merged(found[key.name], key) if key.name in found else key
    yield from found.values()


def _merged(first: Key, second: Key) -> Key:
    """A key that several tables have, each with values of its own: the one that says which table it is."""
    choices = first.choices + second.choices
    words = f"{first.type}{' | ' if second.choices else ' or '}{second.type}"
    doc = f"{first.doc} {second.doc}"
    return Key(first.name, words, False, first.default, choices, doc, first.conditions)


def _without_null(field: dict[str, Any]) -> dict[str, Any]:
    """Remove null: an optional field is `anyOf: [shape, null]` in the JSON schema, but TOML has no null."""
    shapes = [shape for shape in field.get("anyOf", [field]) if shape.get("type") != "null"]
    return shapes[0] if len(shapes) == 1 else {"anyOf": shapes}


def _choices(shape: dict[str, Any]) -> tuple[str, ...]:
    branches = shape.get("anyOf", [])
    if branches and all(branch.get("type") == "string" for branch in branches):  # names, or code of the user's own
        return tuple(chain.from_iterable(map(_choices, branches)))
    return (shape["const"],) if "const" in shape else tuple(shape.get("enum", ()))


def _words(shape: dict[str, Any]) -> str:
    """Describe a JSON schema type in words: `{"type": "integer", "exclusiveMinimum": 0}` -> "integer > 0"."""
    if "anyOf" in shape:
        return " or ".join(map(_words, shape["anyOf"]))
    if choices := _choices(shape):
        return " | ".join(map(json.dumps, choices))
    if shape["type"] == "boolean":
        return "true or false"
    if shape["type"] == "array":
        count = f"{shape['minItems']} " if "minItems" in shape and shape["minItems"] == shape.get("maxItems") else ""
        choices = _choices(shape["items"])
        bounds = " | ".join(map(json.dumps, choices)) or _bounds(shape["items"])
        return f"list of {count}{shape['items']['type']}s" + (f", each {bounds}" if bounds else "")
    form = f"such as {json.dumps(shape['examples'][0])}" if "examples" in shape else ""
    return f"{shape['type']} {_bounds(shape)}{form}".rstrip()


def _bounds(shape: dict[str, Any]) -> str:
    if "maxLength" in shape:
        return f"of {shape['minLength']} to {shape['maxLength']} characters"
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    return " and ".join(f"{sign} {_number(shape[name])}" for name, sign in signs.items() if name in shape)


def _number(bound: float) -> str:
    """Write a bound without superfluous digits: 1.0 as "1", 2**63 as "2**63"."""
    exponent = int(bound).bit_length() - 1
    return f"2**{exponent}" if bound > 10**6 and bound == 2**exponent else f"{bound:g}"


# Other frameworks' names for Keel's keys.
_ALIASES = {
    "learning_rate": "optimizer.lr",
    "hidden_size": "model.dim",
    "intermediate_size": "model.ffn_dim",
    "num_hidden_layers": "model.n_layers",
    "num_attention_heads": "model.n_heads",
    "num_key_value_heads": "model.n_kv_heads",
    "tie_word_embeddings": "model.tie_embeddings",
    "num_experts": "model.n_experts",
    "num_experts_per_tok": "model.experts_per_token",
    "batch_size": "training.global_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size",
    "max_steps": "training.steps",
}


def nearest(name: str) -> str | None:
    """Return the key, in any table, that an unknown dotted name most likely means; None if none is near.

    That is another framework's name for it, or the nearest spelling; of keys of one name, the one in the same table.
    """
    table, _, leaf = name.lower().replace("-", "_").replace(".n.", ".N.").rpartition(".")
    if leaf in _ALIASES:
        return _ALIASES[leaf]
    keys = {key.rpartition(".")[2]: key for key in reversed(schema_keys())}
    keys |= {key.rpartition(".")[2]: key for key in schema_keys() if key.rpartition(".")[0] == table}
    own = [word for word, key in keys.items() if key.rpartition(".")[0] == table]
    if swapped := [word for word in own if sorted(word) == sorted(leaf)]:  # dmi for dim is no near spelling
        return keys[swapped[0]]
    # The table says more than a letter or two: model.delta.heads is model.delta.key_heads rather than model.n_heads.
    for words, cutoff in ((keys, 0.9), (own, 0.7), (keys, 0.78)):
        if near := difflib.get_close_matches(leaf, words, 1, cutoff):
            return keys[near[0]]
    return None
