"""The values of a job: its file over the file's bases, the command line over all, each with where it was set.

A layer on top replaces single keys: tables are merged key by key, anything else (a list, too) as a whole.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from configs.errors import ConfigError
from configs.reading.keys import KeyPath, dotted
from configs.reading.line_numbers import line_numbers
from configs.reading.toml_text import value_text
from configs.untrusted import read_file, require_64_bits, require_shallow

MAX_FILE_BYTES = 256 << 10
"""Of a job file; the largest of Keel's own has 2 KB."""
MAX_BASES = 32
"""Job files that inherit from one another."""


@dataclass(frozen=True)
class Origin:
    """Where a value was set."""

    where: str
    """ "file:line", or "--key" for the command line."""
    layer: int
    """A layer above others has a larger number."""


_COMMAND_LINE = 1
_JOB_FILE = 0
_DEFAULTS = -MAX_BASES - 1


@dataclass
class Layers:
    """The merged values and, for every table, key and list item in them, where it was set."""

    file: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    left_out: dict[KeyPath, Origin] = field(default_factory=dict)
    """Keys that one layer sets and another overrules: where they were set and why they do nothing, and that layer."""

    def add(self, values: Mapping[str, Any], origins: Mapping[KeyPath, Origin]) -> None:
        """Put a layer on top."""
        self._merge(self.values, values, (), origins)

    def _merge(
        self, below: dict[str, Any], above: Mapping[str, Any], at: KeyPath, origins: Mapping[KeyPath, Origin]
    ) -> None:
        for key, value in above.items():
            path = (*at, key)
            if isinstance(value, dict) and isinstance(below.get(key), dict):
                self.origins[path] = origins[path]
                self._merge(below[key], value, path, origins)
                continue
            if key in below:
                self.origins = {other: of for other, of in self.origins.items() if other[: len(path)] != path}
            below[key] = value
            self.origins |= {inner: origins[inner] for inner in _paths(value, path) if inner in origins}

    def override(self, flag: str, path: KeyPath, value: Any) -> None:
        """Set one key from the command line; numbers in the path count the tables of a list.

        Raises:
            ConfigError: the path leads through something that is no table, or beyond the end of a list.
        """
        node: Any = self.values
        origin = Origin(flag, _COMMAND_LINE)
        for depth, part in enumerate(path[:-1]):
            if isinstance(node, list):
                node = _item(node, path[:depth], part)
            elif isinstance(node, dict):
                self.origins.setdefault(path[: depth + 1], origin)
                node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{dotted(path[:-1])} is no table, so it has no key {path[-1]}")
        last = str(path[-1])
        self._merge(node, {last: value}, path[:-1], dict.fromkeys(_paths(value, (*path[:-1], last)), origin))

    def leave_out(self, path: KeyPath, why: str, layer: int) -> None:
        """Take a key away that another layer overrules, so that its default holds."""
        node: Any = self.values
        for part in path[:-1]:
            node = node[part]
        del node[path[-1]]
        self.left_out[path] = Origin(f"{self.where(path)} {why}", layer)
        self.origins = {other: of for other, of in self.origins.items() if other[: len(path)] != path}

    def where(self, path: KeyPath) -> str:
        """Where a key was set; for one that was not, where its table begins; else the file."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]].where
        return self.file

    def layer(self, path: KeyPath) -> int:
        """The number of the layer by which a key has its value; for a default below all others."""
        origin = self.origins.get(path) or self.left_out.get(path)
        return origin.layer if origin else _DEFAULTS


def _item(items: list[Any], path: KeyPath, index: str | int) -> Any:
    if isinstance(index, int) and index < len(items):
        return items[index]
    raise ConfigError(f"{dotted(path)} is a list of {len(items)}, counted from 0, and has no item {index}")


def _paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """The paths of a value and all that is in it."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, item in items:
        yield from _paths(item, (*path, part))


def read_layers(file: Path) -> Layers:
    """Read a job file and its bases.

    Raises:
        ConfigError: a file is missing, unreadable or no TOML, or the bases lead back to the file.
    """
    layers = Layers(shown(file))
    _add_file(layers, file, ())
    return layers


def _add_file(layers: Layers, file: Path, chain: tuple[Path, ...]) -> None:
    text = _read(file)
    values = _parse(text, file)
    layer = _JOB_FILE - len(chain)
    origins = {path: Origin(f"{shown(file)}:{line}", layer) for path, line in line_numbers(text).items()}
    if "base" in values:
        base = _base(values.pop("base"), file, origins[("base",)].where, (*chain, file))
        _add_file(layers, base, (*chain, file))
    layers.add(values, origins)


def _base(value: Any, file: Path, where: str, chain: tuple[Path, ...]) -> Path:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: base must be the path of another job file, got {value_text(value)}")
    if len(chain) > MAX_BASES:
        raise ConfigError(f"{where}: more than {MAX_BASES} job files inherit from one another")
    base = file.parent / value
    if not base.is_file():
        raise ConfigError(f"{where}: base = {value_text(value)}: there is no file {shown(base)}")
    resolved = [link.resolve() for link in chain]
    if base.resolve() in resolved:
        circle = chain[resolved.index(base.resolve()) :]
        raise ConfigError(f"{where}: the bases go in a circle: {' -> '.join(map(shown, (*circle, base)))}")
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

# What tomli's messages most often mean, by their beginnings.
_HINTS = {
    "Invalid value": "strings stand in quotes; true, false and numbers do not",
    "Illegal character '\\n'": "the string is not closed on its line",
    "Cannot overwrite a value": "the key is set above already",
    "Cannot declare": "the table stands above already",
}


def _parse(text: str, file: Path) -> dict[str, Any]:
    try:
        values = tomli.loads(text)
        require_shallow(values)
        require_64_bits(values)  # as TOML 1.0 has it
    except tomli.TOMLDecodeError as error:
        hint = next((f" ({hint})" for start, hint in _HINTS.items() if error.msg.startswith(start)), "")
        message = f"{shown(file)}:{error.lineno}: not valid TOML: {error.msg}{hint}"
        raise ConfigError(message + _pointed_at(text, error, file)) from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, lists in lists in lists
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{shown(file)}: cannot be read: {reason}") from None
    return values


def _pointed_at(text: str, error: tomli.TOMLDecodeError, file: Path) -> str:
    """The line with the mistake. Nothing of a file that is no job file by its name: a base may lead anywhere."""
    line = text.replace("\r\n", "\n").split("\n")[error.lineno - 1]
    if file.suffix != ".toml" or len(line) > _MAX_LINE:
        return ""
    return f"\n    {line}\n    {' ' * (error.colno - 1)}^"


def shown(file: Path) -> str:
    """A path as a message shows it: relative to the current folder if it lies in it."""
    absolute = Path(os.path.abspath(file))  # unlike resolve(), it keeps the names of symbolic links
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
