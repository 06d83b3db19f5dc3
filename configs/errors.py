"""Errors that end in one message instead of a traceback, each with its exit code."""

from collections.abc import Sequence

from configs.untrusted import printable, shortened

SHOWN = 8


class KeelError(Exception):
    """A mistake that the user can fix; its text says what is wrong, where, and what to do."""

    exit_code = 1

    def __str__(self) -> str:
        """The message, made printable: names and values in it may come from an untrusted file."""
        return printable(shortened(super().__str__()))


class UserError(KeelError):
    """Something outside the config: a file, a folder, a package, a checkpoint."""


class ConfigError(KeelError):
    """Something in the job file or on the command line."""

    exit_code = 78


def listed(items: Sequence[str], separator: str = "\n  ", most: int = SHOWN) -> str:
    """List the first `most` items for a message, each on its own line by default, and say how many more there are."""
    more = len(items) - most
    before_more = " " if separator == ", " else separator
    return separator.join(items[:most]) + (f"{before_more}and {more} more" if more > 0 else "")
