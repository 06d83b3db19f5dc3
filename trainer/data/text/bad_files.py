"""What of an input was not read: unreadable parts, counted against a limit, and files that are not text, counted."""

from collections import Counter
from collections.abc import Iterable

from configs.errors import UserError

_SHOWN = 20
PATIENCE = 100
"""Unreadable parts beyond the limit that are still collected, so that one message names them."""

HIDDEN = "hidden files and folders, and __pycache__"
BINARY = "binary files (they contain a NUL byte)"
LINKED = "folders that a link leads to a second time"


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
        self.skipped: Counter[str] = Counter()
        """Number of files and folders that were skipped because they are not text, by reason."""
        self.examples: dict[str, list[str]] = {}
        """The first files for each reason but HIDDEN."""

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
        """Count a file or folder that is skipped because it is not text."""
        self.skipped[reason] += 1
        if reason != HIDDEN and len(examples := self.examples.setdefault(reason, [])) < _SHOWN:
            examples.append(path)

    def merge(self, other: "BadFiles") -> None:
        """Take over what another one has collected, without checking the limit."""
        self.messages += other.messages
        self.skipped.update(other.skipped)
        for reason, paths in other.examples.items():
            examples = self.examples.setdefault(reason, [])
            examples += paths[: _SHOWN - len(examples)]

    def described(self) -> list[str]:
        """A line for each reason for which files were skipped."""
        examples = {reason: ", ".join(paths[:3]) for reason, paths in self.examples.items()}
        return [
            f"skipped: {count:,} {reason}" + (f": {examples[reason]}" if reason in examples else "")
            for reason, count in self.skipped.items()
        ]

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
