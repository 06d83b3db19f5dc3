"""Merges the values of a job, each with where it was set: bases, then the job file, then the command line.

A higher layer replaces single keys: tables are merged key by key, other values (including lists) as a whole.
"""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from configs.errors import ConfigError
from configs.files import is_file, whole
from configs.own_code import is_import_path
from configs.reading.keys import KeyPath, dotted, find
from configs.reading.line_numbers import line_numbers
from configs.reading.toml_text import value_text
from configs.untrusted import read_file, require_64_bits, require_shallow

JOB_FILES = Path(__file__).parents[1]
"""Folder of the shipped jobs: where a bare name is looked up if there is no such file."""
MAX_FILE_BYTES = 256 << 10
"""Maximum size of a job file; the largest of Keel's own has 2 KB."""
MAX_BASES = 32
"""Maximum length of a chain of bases."""


Places = Callable[[KeyPath], str]
"""Returns where the value at a path was set: "file:line", or "--key" for the command line."""


@dataclass
class Layers:
    """The merged values, and where each table, key and list item was set."""

    file: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def add(self, values: Mapping[str, Any], places: Places) -> None:
        """Add a layer on top; a [model] of another architecture replaces the one below."""
        model = values.get("model")
        if isinstance(model, dict) and "architecture" in model:
            self._forget_other_shape(model["architecture"])
        self._merge(self.values, values, (), places)

    def _forget_other_shape(self, architecture: Any) -> None:
        """Remove the keys of [model] from files, if they are of another architecture; an unknown one is no other."""
        below = self.values.get("model")
        key = find(("model", "architecture"))
        is_known = is_import_path(architecture) or (key is not None and architecture in key.choices)
        if is_known and isinstance(below, dict) and below.get("architecture", "llama") != architecture:
            for key in list(below):
                self._remove_what_files_set(("model", key))

    def _remove_what_files_set(self, path: KeyPath) -> None:
        """Remove a key or table, but not what the command line has set in it."""
        value = self.value(path)
        if not any(where.startswith("--") for other, where in self.origins.items() if other[: len(path)] == path):
            self.remove(path)
        elif isinstance(value, dict):
            for key in list(value):
                self._remove_what_files_set((*path, key))

    def _merge(self, below: dict[str, Any], above: Mapping[str, Any], at: KeyPath, places: Places) -> None:
        for key, value in above.items():
            path = (*at, key)
            if isinstance(value, dict) and isinstance(below.get(key), dict):
                self.origins[path] = places(path)
                self._merge(below[key], value, path, places)
                continue
            if key in below:
                self._forget(path)
            below[key] = value
            self.origins |= {inner: places(inner) for inner in _paths(value, path)}

    def _forget(self, path: KeyPath) -> None:
        self.origins = {other: where for other, where in self.origins.items() if other[: len(path)] != path}

    def override(self, flag: str, path: KeyPath, value: Any) -> None:
        """Set one key from the command line; numbers in the path are indices into lists of tables.

        Index 0 of a list that is not set, or empty, creates the item.

        Raises:
            ConfigError: the path leads through a value that is not a table, or beyond the end of a list.
        """
        node: Any = self.values
        for depth, part in enumerate(path[:-1]):
            inner = path[: depth + 1]
            if isinstance(node, list):
                if not node and part == 0:
                    node.append({})
                    self.origins[inner] = flag
                node = _item(node, path[:depth], part)
            elif isinstance(node, dict):
                self.origins.setdefault(inner, flag)
                key = find(inner)
                node = node.setdefault(part, [] if key and key.type == "list of tables" else {})
        if isinstance(node, list):
            raise ConfigError(f"{dotted(path[:-1])} is a list; {_how_to_set(node, path)}")
        if not isinstance(node, dict):
            raise ConfigError(f"{dotted(path[:-1])} is not a table, so it has no key {path[-1]}")
        last = str(path[-1])
        if path == ("model", "architecture"):
            self._forget_other_shape(value)
        self._merge(node, {last: value}, path[:-1], lambda _: flag)

    def unset(self) -> None:
        """Remove the keys that are set to "none" and have no value by default, so that this applies."""
        for path in list(self.origins):
            key = find(path)
            value = self.value(path)
            if value == "none" and key and key.default is None and not key.required:
                self.remove(path)

    def value(self, path: KeyPath) -> Any:
        """The value at a path."""
        node: Any = self.values
        for part in path:
            node = node[part]
        return node

    def remove(self, path: KeyPath) -> None:
        """Remove a key, so that its default applies."""
        del self.value(path[:-1])[path[-1]]
        self._forget(path)

    def where(self, path: KeyPath) -> str:
        """Where a key was set; if it was not, where its table begins; otherwise the file."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return self.file


def _how_to_set(items: list[Any], path: KeyPath) -> str:
    """How to set what `path` names in a list."""
    name = dotted(path[:-1])
    if not any(isinstance(item, dict) for item in items):
        return f"set all of it: --{name} {shlex.quote(value_text(items))}"
    key = f"{path[-1]}.KEY" if isinstance(path[-1], int) else f"0.{path[-1]}"
    return f"set a key of one of its items: --{name}.{key} VALUE"


def _item(items: list[Any], path: KeyPath, index: str | int) -> Any:
    if isinstance(index, int) and index < len(items):
        return items[index]
    raise ConfigError(f"{dotted(path)} has no item {index}; it is a list of {len(items)}, counted from 0")


def _paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the paths of a value and everything in it."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, item in items:
        yield from _paths(item, (*path, part))


def read_layers(file: Path) -> Layers:
    """Read a job file and its bases.

    Raises:
        ConfigError: a file is missing, unreadable or not TOML, or the bases form a circle.
    """
    layers = Layers(shown(file))
    _add_file(layers, file, ())
    return layers


def _add_file(layers: Layers, file: Path, chain: tuple[Path, ...]) -> None:
    text = _read(file)
    values = _parse(text, file)
    lines = line_numbers(text)

    def place(path: KeyPath) -> str:
        known = (path[:end] for end in range(len(path), 0, -1) if path[:end] in lines)
        line = lines.get(next(known, ()))
        return f"{shown(file)}:{line}" if line else shown(file)

    if "base" in values:
        base = _base(values.pop("base"), file, place(("base",)), (*chain, file))
        _add_file(layers, base, (*chain, file))
    layers.add(values, place)


def _base(value: Any, file: Path, where: str, chain: tuple[Path, ...]) -> Path:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: base must be the path of another job file, got {value_text(value)}")
    if len(chain) > MAX_BASES:
        raise ConfigError(f"{where}: more than {MAX_BASES} job files inherit from one another; merge some of them")
    base = file.parent / value
    is_shipped_name = Path(value).name == value
    try:
        # A job's own name can only mean the shipped job of that name, such as the one that it was copied from.
        if is_shipped_name and is_file(JOB_FILES / value) and (not is_file(base) or base.samefile(file)):
            base = JOB_FILES / value
        is_there = is_file(base)
    except OSError as error:
        raise ConfigError(f"{where}: base = {value_text(value)} cannot be read: {error.strerror}") from None
    if not is_there:
        among = f" (nor is it one of the jobs in {shown(JOB_FILES)})" if is_shipped_name else ""
        raise ConfigError(f"{where}: base = {value_text(value)}: no such file: {whole(file.parent / value)}{among}")
    resolved = [link.resolve() for link in chain]
    if base.resolve() in resolved:
        circle = chain[resolved.index(base.resolve()) :]
        raise ConfigError(f"{where}: the bases form a circle: {' -> '.join(map(shown, (*circle, base)))}")
    return base


def _read(file: Path) -> str:
    try:
        return read_file(file, MAX_FILE_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{shown(file)}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{shown(file)}:{line}: byte {error.object[error.start]:#x} is not UTF-8") from None


_MAX_LINE = 500

# What tomli's messages usually mean, by how they begin.
_HINTS = {
    "Invalid value": "strings need quotes; true, false and numbers have none",
    "Illegal character '\\n'": "the string is not closed on its line",
    "Cannot overwrite a value": "the key was already set above",
    "Cannot declare": "the table was already declared above",
}


def _parse(text: str, file: Path) -> dict[str, Any]:
    try:
        values = tomli.loads(text)
        require_shallow(values)
        require_64_bits(values)  # the range of integers in TOML 1.0
    except tomli.TOMLDecodeError as error:
        hint = next((f" ({hint})" for start, hint in _HINTS.items() if error.msg.startswith(start)), "")
        message = f"{shown(file)}:{error.lineno}: not valid TOML: {error.msg}{hint}"
        raise ConfigError(message + _pointed_at(text, error, file)) from None
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, deeply nested lists
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{shown(file)}: cannot be read: {reason}") from None
    return values


def _pointed_at(text: str, error: tomli.TOMLDecodeError, file: Path) -> str:
    """Show the line with the mistake, but not of a file without the suffix .toml: a base may name any file."""
    line = text.replace("\r\n", "\n").split("\n")[error.lineno - 1]
    if file.suffix != ".toml" or len(line) > _MAX_LINE:
        return ""
    return f"\n    {line}\n    {' ' * (error.colno - 1)}^"


def shown(file: Path) -> str:
    """Write a path as messages show it: relative to the current folder if it is inside."""
    absolute = Path(os.path.abspath(file))  # unlike resolve(), it keeps the names of symbolic links
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
