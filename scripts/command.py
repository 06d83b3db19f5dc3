"""What the scripts' command lines have in common: help from the module's docstring, and how a command ends."""

import argparse
from collections.abc import Callable

from configs.errors import KeelError
from trainer.report.console import Console


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring: a summary, a colon and the usage, then the details."""
    summary, _, details = (docstring or "").partition("\n\n")
    return argparse.ArgumentParser(description=summary.partition(":")[0] + ".", epilog=details)


def run_command(work: Callable[[Console], None], if_stopped: str) -> int:
    """Do a script's work with a console, and return the exit code.

    Args:
        work: raises KeelError for what is the user's to mend.
        if_stopped: what to say after Ctrl-C.
    """
    with Console() as console:
        try:
            work(console)
        except KeelError as error:
            console.error(str(error))
            return error.exit_code
        except KeyboardInterrupt:
            console.error(if_stopped)
            return 130
    return 0
