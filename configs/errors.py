"""Errors that end in one message instead of a traceback, each with its exit code."""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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

    may_pass = False
    """Whether the same command may succeed at another time, with nothing changed."""


class OutageError(UserError):
    """Something that the machine, the network or another rank lacks at this time."""

    may_pass = True


class ConfigError(KeelError):
    """Something in the job file or on the command line, or in a file that they name: the same command fails again."""

    exit_code = 78


_PASSING = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT)


@contextmanager
def files_that_fail() -> Iterator[None]:
    """Turn an OSError about a file into a UserError: a folder that may not be entered, a name that is too long."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        kind = OutageError if error.errno in _PASSING else UserError
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        place = (error.filename2 if is_full else None) or error.filename  # of a copy, the disk that is full
        raise kind(f"{place}: {error.strerror}") from error


@contextmanager
def mistakes_of_the_job() -> Iterator[None]:
    """Turn a UserError into a ConfigError: what is found wrong before a run begins, in the job or in a file or folder
    that it names, is a mistake in the job, unless it may pass."""
    try:
        with files_that_fail():
            yield
    except UserError as error:
        if error.may_pass:
            raise
        raise ConfigError(str(error)) from None


def quotient(number: int, divisor: int) -> str:
    """A division that leaves a rest, as messages show it: "7 / 2 = 3.50"."""
    return f"{number} / {divisor} = {number / divisor:.2f}"


def listed(items: Sequence[str], separator: str = "\n  ", most: int = SHOWN) -> str:
    """List the first `most` items for a message, each on its own line by default, and say how many more there are."""
    more = len(items) - most
    before_more = " " if separator == ", " else separator
    return separator.join(items[:most]) + (f"{before_more}and {more} more" if more > 0 else "")
