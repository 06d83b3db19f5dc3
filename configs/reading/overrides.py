"""Parses keys set on the command line: `--table.key VALUE` or `--table.key=VALUE`.

Values are written as in a job file; a bare word is a string, because the shell removes quotes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomli

from configs.errors import ConfigError
from configs.reading.keys import KeyPath, find, key_path
from configs.untrusted import require_64_bits


def words(keys: Mapping[str, object]) -> tuple[str, ...]:
    """Keys and their values as words of a command line."""
    return tuple(word for key, value in keys.items() for word in (f"--{key}", str(value)))


@dataclass(frozen=True)
class Override:
    """`--table.key VALUE`."""

    flag: str
    path: KeyPath
    value: Any


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """Parse `--table.key VALUE` and `--table.key=VALUE`; values are TOML, a bare word is a string.

    If a key is given twice, the last one applies, so that overrides can be appended to an earlier command.

    Raises:
        ConfigError: lists all mistakes among the words, one per line.
    """
    given: dict[str, str | None] = {}
    for flag, text in split_flags(words):
        given.pop(flag, None)
        given[flag] = text
    overrides: list[Override] = []
    mistakes: list[str] = []
    for flag, text in given.items():
        try:
            overrides.append(_override(flag, text))
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return overrides


def split_flags(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield pairs of flag and value, or None without a value; a word that belongs to no flag counts as a flag."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if not word.startswith("--"):
            yield word, None
        elif equals:
            yield flag, value
        else:
            yield flag, rest.pop(0) if rest and not rest[0].startswith("--") else None


def is_override(flag: str) -> bool:
    """Whether a flag is meant to set a key: one of a table, or a list of tables that is in none, `--stages '[]'`."""
    key = find((flag[2:],))
    return flag.startswith("--") and ("." in flag or (key is not None and key.type == "list of tables"))


def _override(flag: str, text: str | None) -> Override:
    if not is_override(flag) or not re.fullmatch(r"--[^.\s]+(\.[^.\s]+)*", flag):
        raise ConfigError(f"{flag}: unexpected on the command line; set keys as --table.key VALUE")
    if text is None:
        raise ConfigError(f"{flag}: needs a value: {flag} VALUE")
    path = key_path(flag[2:])
    value = _toml_value(flag, text)
    key = find(path)
    if key and key.type == "string" and not isinstance(value, (str, list, dict)):
        value = text  # a name such as 2024, as it was typed
    return Override(flag, path, value)


_BEFORE = "value = "


def _toml_value(flag: str, text: str) -> Any:
    try:
        parsed = tomli.loads(_BEFORE + text)
    except tomli.TOMLDecodeError as error:
        if text.lstrip()[:1] in ("[", "{", '"', "'"):
            column = error.colno - len(_BEFORE)
            hint = (
                '; strings in it need quotes: [{name = "a"}]' if error.msg.startswith(("Invalid", "Unclosed")) else ""
            )
            shown = f"\n    {text}\n    {' ' * (column - 1)}^"
            raise ConfigError(f"{flag}: not valid TOML: {error.msg} (column {column}){hint}{shown}") from None
        parsed = {}
    except (ValueError, RecursionError):
        raise ConfigError(f"{flag}: the value has a number with too many digits, or is nested too deeply") from None
    try:
        require_64_bits(parsed)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise ConfigError(f"{flag}: the value is not UTF-8")
    return parsed["value"] if parsed.keys() == {"value"} else text
