"""Show runs as one page to look at: scripts/report.py RUN [RUN ...] --output FILE

RUN is a run folder, such as runs/debug. The page has the curves of all runs together, what differs between their
configs, where the time went, stops and resumes, samples, the environment, and what the records say in words. It is one
HTML file that loads nothing from anywhere.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.errors import UserError
from configs.files import write_atomically
from scripts.command import end, parser_of, run_command
from scripts.keel import VERSION
from scripts.page.html import page
from scripts.page.recorded import read_runs
from scripts.page.verdict import comparison, verdict
from trainer.report.console import Console
from trainer.report.units import size


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit code."""
    options = _parser().parse_args(arguments)

    def work(console: Console) -> None:
        runs = read_runs(options.runs)
        text = page(runs, VERSION)
        try:
            write_atomically(options.output, [text])
        except OSError as error:
            raise UserError(f"{options.output} can't be written: {error.strerror}") from None
        for run in runs:
            console.table(run.name, [("", sentence.text) for sentence in verdict(run)])
        for line in comparison(runs) if len(runs) > 1 else ():
            console.line(line)
        console.line(f"written: {options.output} ({size(len(text.encode()))})")

    return run_command(work, "stopped; no page was written")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    return parser


if __name__ == "__main__":
    end(main)
