"""What every entry point of Keel does first, and how it prints: a process may begin without streams or a folder."""

import io
import os
import sys

from configs.errors import ConfigError, OutageError


def prepare_streams() -> None:
    """Make the standard streams usable; call it before anything else.

    Those that are closed (`train.py ... >&-`) are opened to nothing. Otherwise a file of the run gets a stream's
    number, and what a library in C says is written into that file. Characters that an encoding lacks are escaped.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - stays open
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="backslashreplace")


def require_current_folder() -> None:
    """Check that the current folder exists: paths are relative to it, and torch's libraries end without it.

    Raises:
        ConfigError: it has been removed.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"the current folder can't be found ({error.strerror}); change to one that exists") from None


def silence_stdout() -> None:
    """Write nothing more to a standard output that has failed; otherwise Python reports the error again on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def cannot_print(error: OSError) -> OutageError:
    """The error of a standard output that can't be written."""
    return OutageError(f"the output can't be written: {error.strerror}")
