"""What the scripts' command lines share: help from the module's docstring, and how a command ends."""

import argparse
from collections.abc import Callable
from typing import TextIO

from configs.errors import KeelError
from trainer.report.console import Console

INPUT_HELP = "file, folder, glob pattern, hub:NAME[:CONFIG][@REVISION][#SPLIT], or python_stdlib"
TEXT_KEY_HELP = "field or column that holds the text in files of records (default: %(default)s)"


def separator(text: str) -> str:
    """Parse a separator of documents from a command line, where line ends and tabs are hard to type."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


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
