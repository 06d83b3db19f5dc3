"""Finds the line of every key in a TOML text.

TOML parsers return values without their positions, but an error message needs the line. This scanner reads a text that
the parser has already accepted, so it validates nothing: it only has to find where keys and values begin and end
(TOML 1.0, toml.io/en/v1.0.0).
"""

import re

import tomli

from configs.reading.keys import KeyPath

_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_KEY = re.compile(r"""[ \t]*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)[ \t]*(\.?)""")
_SCALAR = re.compile(
    r'''"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?'{3,5}'''  # strings of several lines; up to two quotes may precede the end
    r"""|"(?:[^"\\]|\\.)*"|'[^']*'|[^,\]}#\n]+""",
    re.DOTALL,
)


def line_numbers(text: str) -> dict[KeyPath, int]:
    """Line, counted from 1, at which each table, key and list item of a valid TOML text first stands."""
    return _Scanner(text.replace("\r\n", "\n")).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.counted, self.line = 0, 1  # offset up to which lines were counted, and the line there
        self.lines: dict[KeyPath, int] = {}
        self.n_tables: dict[KeyPath, int] = {}  # number of [[tables]] seen so far in each list

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._next() != "":
            line = self._line()
            if self.text.startswith("[[", self.at):
                table = self._header(2, is_list=True)
            elif self.text.startswith("[", self.at):
                table = self._header(1, is_list=False)
            else:
                self._key_and_value(table)
                continue
            self._note(table, line)
        return self.lines

    def _next(self) -> str:
        """Skip blanks and comments; returns the character after them, "" at the end."""
        self._skip(_BLANK)
        return self.text[self.at : self.at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self.text, self.at)
        assert match is not None, f"not TOML at offset {self.at}"
        self.at = match.end()
        return match

    def _line(self) -> int:
        self.line += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        return self.line

    def _note(self, path: KeyPath, line: int) -> None:
        """Record a key and the tables that it is the first to name: `a.b.c = 1` creates a and a.b."""
        for end in range(1, len(path) + 1):
            self.lines.setdefault(path[:end], line)

    def _key(self) -> KeyPath:
        parts: list[str] = []
        while True:
            part, dot = self._skip(_KEY).groups()
            parts.append(tomli.loads(f"key = {part}")["key"] if part[0] in "\"'" else part)
            if not dot:
                return tuple(parts)

    def _header(self, brackets: int, is_list: bool) -> KeyPath:
        self.at += brackets
        *parents, last = self._key()
        self.at += brackets
        path: KeyPath = ()
        for part in parents:
            path = self._latest((*path, part))
        path = (*path, last)
        if is_list:
            self.n_tables[path] = self.n_tables.get(path, 0) + 1
        return self._latest(path)

    def _latest(self, path: KeyPath) -> KeyPath:
        """Resolve a list of tables in a header, where its name means the latest item."""
        return (*path, self.n_tables[path] - 1) if path in self.n_tables else path

    def _key_and_value(self, table: KeyPath) -> None:
        line = self._line()
        path = (*table, *self._key())
        self._note(path, line)
        self.at += 1  # the equals sign
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        opening = self._next()
        if opening not in "[{":
            self._skip(_SCALAR)
            return
        self.at += 1
        index = 0
        while self._next() not in "]}":
            if opening == "{":
                self._key_and_value(path)
            else:
                self._note((*path, index), self._line())
                self._value((*path, index))
            index += 1
            if self._next() == ",":
                self.at += 1
        self.at += 1
