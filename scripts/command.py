"""What the scripts' command lines share: help from the module's docstring, and how a command ends."""

import argparse
from collections.abc import Callable
from typing import TextIO

from configs.errors import KeelError
from trainer.report.console import Console


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """Make a parser with help from a module's docstring: a summary, a colon and the usage, then the details."""
    summary, _, details = (docstring or "").partition("\n\n")
    return argparse.ArgumentParser(description=summary.partition(":")[0] + ".", epilog=details)


def run_command(work: Callable[[Console], None], if_stopped: str, out: TextIO | None = None) -> int:
    """Run a script's work with a console; returns the exit code.

    Args:
        work: raises KeelError for what the user can fix.
        if_stopped: message after Ctrl-C.
        out: where the console prints (default: standard output).
    """
    with Console(out=out) as console:
        try:
            work(console)
        except KeelError as error:
            console.error(str(error))
            return error.exit_code
        except KeyboardInterrupt:
            console.error(if_stopped)
            return 130
    return 0
