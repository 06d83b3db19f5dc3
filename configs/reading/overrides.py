"""Keys set on the command line: `--table.key VALUE` or `--table.key=VALUE`.

Values are written as in a job file; a bare word is a string, since the shell eats the quotes.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tomli

from configs.errors import ConfigError
from configs.reading.keys import KeyPath, key_path


@dataclass(frozen=True)
class Override:
    """`--table.key VALUE`."""

    flag: str
    path: KeyPath
    value: Any


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """Read `--table.key VALUE` and `--table.key=VALUE`; values are TOML, a bare word is a string.

    Of a key given twice the last one counts, in its place, so that a person can add to the end of an earlier command.

    Raises:
        ConfigError: all the mistakes among the words, one a line.
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
    """Pairs of flag and value, the value None if none follows; a word that belongs to no flag is a flag by itself."""
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


def _override(flag: str, text: str | None) -> Override:
    if not re.fullmatch(r"--[^.\s]+(\.[^.\s]+)+", flag):
        raise ConfigError(f"{flag}: unexpected on the command line; keys are set as --table.key VALUE")
    if text is None:
        raise ConfigError(f"{flag}: needs a value: {flag} VALUE")
    return Override(flag, key_path(flag[2:]), _toml_value(flag, text))


def _toml_value(flag: str, text: str) -> Any:
    try:
        parsed = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError as error:
        if text.lstrip()[:1] in ("[", "{", '"', "'"):
            raise ConfigError(f"{flag}: {text} is not valid TOML: {error.msg}") from None
        parsed = {}
    except (ValueError, RecursionError):
        raise ConfigError(f"{flag}: a number of too many digits, or nested too deep") from None
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise ConfigError(f"{flag}: the value is not UTF-8")
    return parsed["value"] if parsed.keys() == {"value"} else text
