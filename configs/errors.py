"""Errors that end in one message instead of a traceback, each with its exit code."""

from configs.untrusted import printable, shortened


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
