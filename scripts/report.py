"""Show runs as one page to look at: scripts/report.py RUN [RUN ...] --output FILE

RUN is a run folder, such as runs/debug, or a folder of run folders, such as runs. The page has the curves of all runs
together, what differs between their configs, where the time went, stops and resumes, samples, the environment, and
flags with their steps. It is one HTML file that loads nothing from anywhere. With --watch SECONDS the page is written
again while a run is running, and an open page shows it.
"""

import argparse
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from configs.errors import UserError
from configs.files import write_atomically
from scripts.command import end, parser_of, place, positive, run_command
from scripts.page.flags import flags
from scripts.page.html import page
from scripts.page.ranking import ranking
from scripts.page.recorded import Recorded, read_runs, run_folders
from trainer.report.console import Console
from trainer.report.units import aligned, size

_TOLD = 3
"""Runs whose flags are printed; of more, only the ranking is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit code."""
    options = _parser().parse_intermixed_args(arguments)

    def work(console: Console) -> None:
        runs = _read(options.runs, console)
        watched = options.watch if options.watch and _is_running(runs) else 0
        _write(options.output, runs, watched)
        _tell(console, runs)
        console.line(f"written: {options.output} ({size(options.output.stat().st_size)})")
        if options.open:
            webbrowser.open(options.output.resolve().as_uri())
        if watched:
            console.line(f"written again every {watched} s while a run is running; Ctrl-C ends this")
            _watch(options, console)

    return run_command(work, "stopped; no page was written")


def _read(names: Sequence[str], console: Console) -> list[Recorded]:
    paths = [place(name) for name in names]
    folders = [folder for path in paths for folder in run_folders(path)]
    return read_runs(folders, None if folders == [*paths] else console.warning)


def _is_running(runs: Sequence[Recorded]) -> bool:
    return any(run.state == "running" for run in runs)


def _write(output: Path, runs: Sequence[Recorded], renew_seconds: int) -> None:
    written = page(runs, renew_seconds)
    try:
        write_atomically(output, [written])
    except OSError as error:
        raise UserError(f"{output} can't be written: {error.strerror}") from None


def _watch(options: argparse.Namespace, console: Console) -> None:
    """Write the page again and again until no run is running; the last one does not load itself again."""
    try:
        while _is_running(runs := _read(options.runs, console)):
            _write(options.output, runs, options.watch)
            time.sleep(options.watch)
    except KeyboardInterrupt:
        pass
    _write(options.output, _read(options.runs, console), 0)
    console.line(f"written: {options.output}")


def _tell(console: Console, runs: Sequence[Recorded]) -> None:
    for run in runs if len(runs) <= _TOLD else ():
        flagged = [(flag.kind, str(flag)) for flag in flags(run)] or [("flags", "none")]
        console.table(run.name, [("state", f"{run.state} at step {run.step:,}"), *flagged])
    if len(runs) > 1:
        heads, rows = ranking(runs)
        table = [["run", *heads], *([runs[number].name, *cells] for number, cells in rows)]
        for line in aligned(table):
            console.line(line)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folder, or folder of run folders")
    add("--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    add("--open", action="store_true", help="open the page in a browser")
    add("--watch", type=positive, metavar="SECONDS", help="write the page again that often while a run is running")
    return parser


if __name__ == "__main__":
    end(main)
