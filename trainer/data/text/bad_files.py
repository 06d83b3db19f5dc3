"""What of an input was not read: unreadable parts, counted against a limit, and files that are not text, counted."""

from collections.abc import Iterable, Mapping
from typing import Any

from configs.errors import UserError

_SHOWN = 20
PATIENCE = 100
"""Unreadable parts beyond the limit that are still collected, so that one message names them."""

HIDDEN = "hidden files and folders, and __pycache__"
BINARY = "binary files (they contain a NUL byte)"
LINKED = "folders that a link leads to a second time"


def skipped_lines(summary: Mapping[str, dict[str, Any]]) -> list[str]:
    """A line for each reason for which files were skipped."""
    return [
        f"skipped: {found['count']:,} {reason}" + ": " * bool(found["first"]) + ", ".join(found["first"][:3])
        for reason, found in summary.items()
    ]


class BadFiles:
    """The files and lines that could not be read; more than `limit` of them are an error that names them."""

    def __init__(self, limit: int | None = None, patience: int = 0) -> None:
        """Tolerate up to `limit` of them (None: none, and the error does not mention a limit).

        Args:
            patience: number of further ones that `add` still collects; then call `check` at the end.
        """
        self.limit = limit
        self._patience = patience
        self.messages: list[str] = []
        self.skipped: dict[str, list[str]] = {}
        """The files and folders that were skipped because they are not text, by reason."""

    def add(self, message: str) -> None:
        """Count one more.

        Raises:
            UserError: it exceeds the limit.
        """
        self.messages.append(message)
        if len(self.messages) > (self.limit or 0) + self._patience:
            self.check()

    def extend(self, messages: Iterable[str]) -> None:
        """Count several more.

        Raises:
            UserError: they exceed the limit; the error names them all.
        """
        self.messages += messages
        self.check()

    def skip(self, reason: str, path: str) -> None:
        """Note a file or folder that is skipped because it is not text."""
        self.skipped.setdefault(reason, []).append(path)

    def merge(self, messages: Iterable[str], skipped: Mapping[str, list[str]]) -> None:
        """Take over what another one has collected, without checking the limit."""
        self.messages += messages
        for reason, paths in skipped.items():
            self.skipped.setdefault(reason, []).extend(paths)

    def summary(self) -> dict[str, dict[str, Any]]:
        """The number of skipped files for each reason, and the first of them; of hidden ones only the number."""
        return {
            reason: {"count": len(paths), "first": paths[: 0 if reason == HIDDEN else _SHOWN]}
            for reason, paths in self.skipped.items()
        }

    def described(self) -> list[str]:
        """A line for each reason for which files were skipped."""
        return skipped_lines(self.summary())

    def check(self) -> None:
        """Raise UserError, which names them, if there are more than the limit."""
        if len(self.messages) <= (self.limit or 0):
            return
        shown = "\n".join(f"  {message}" for message in self.messages[:_SHOWN])
        if len(self.messages) > _SHOWN:
            shown += f"\n  ... and {len(self.messages) - _SHOWN:,} more"
        allowed = "" if self.limit is None else f", {self.limit} allowed (max_bad_files)"
        keys = "--max-bad-files, or data.prepare.max_bad_files in a job"
        choice = "" if self.limit is None else f", or allow that many to be skipped ({keys})"
        raise UserError(
            f"{len(self.messages)} unreadable file(s) or line(s){allowed}:\n{shown}\nFix or remove them{choice}"
        )
