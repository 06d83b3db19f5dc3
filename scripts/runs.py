"""List, compare and clean up runs: scripts/runs.py [FOLDER]

  [FOLDER]                 list the runs in a folder and in the folders of it (default: runs)
  compare RUN RUN ...      runs side by side: state, step, loss, speed, and the keys in which their configs differ
  clean RUN_OR_FOLDER ...  show what could be removed; --remove removes it, after a question

A run is a folder with a status.json, such as runs/debug. A run that says that it is running, but has not renewed its
status for two minutes, is listed as silent. What `clean` removes is listed first. --what says what that is:

  leftovers    what interrupted saves have left, and the checkpoints of abandoned lines (the default)
  checkpoints  these, and all checkpoints but the newest
  everything   all that Keel has written in a run folder, which must be named itself; other files in it stay
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint.incarnation import FOLDER, newest_number
from checkpoint.lock import BeingRead, FolderInUse, lock
from configs.errors import UserError
from configs.files import whole
from scripts.command import end, parser_of, run_command
from scripts.page.cleaning import WHAT, Doomed, removable, remove_emptied, remove_one
from scripts.page.recorded import SILENT_SECONDS, Recorded, differences, read_runs
from trainer.lifecycle import read_status
from trainer.report.console import Console
from trainer.report.metrics import METRICS_NAME
from trainer.report.units import count, duration, fixed, percent, size

_TAIL_BYTES = 1 << 16
UNREADABLE = "unreadable"
"""State of a folder that this user may not read; it may be a run."""
_Command = Callable[[argparse.Namespace, Console], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    command: _Command = _list
    parser = _parser()
    if words and words[0] in _COMMANDS:
        command, add_arguments = _COMMANDS[words.pop(0)]
        parser = argparse.ArgumentParser(description=command.__doc__)
        add_arguments(parser)
    options = parser.parse_args(words)
    return run_command(lambda console: command(options, console), "stopped")


# --------------------------------------------------------------------------- list


def _list(options: argparse.Namespace, console: Console) -> None:
    """List the runs in a folder."""
    if not options.folder.is_dir():
        raise UserError(f"{whole(options.folder)}: no such folder")
    runs = sorted(runs_in(options.folder), key=lambda run: run[1]["time"], reverse=True)
    if not runs:
        raise UserError(f"{options.folder}: no runs here (a run is a folder with a status.json)")
    width = max(len(str(folder)) for folder, _ in runs)
    console.line(f"{'run':<{width}}  {'state':<10}{'step':>10}{'loss':>10}{'tokens/s':>13}  age")
    for folder, status in runs:
        console.line(_line(folder, status, width))


def runs_in(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the runs in a folder and in the folders of it, each with its status."""
    for each in (folder, *sorted(folder.glob("*")), *sorted(folder.glob("*/*"))):
        try:
            if (each / "status.json").is_file() and (status := read_status(each)):
                yield each, status
        except OSError as error:
            yield each, {"state": UNREADABLE, "step": 0, "reason": error.strerror or "", "time": time.time()}


def _line(folder: Path, status: dict[str, Any], width: int) -> str:
    if status["state"] == UNREADABLE:
        return f"{folder!s:<{width}}  {UNREADABLE}: {status['reason']}"
    age = max(0.0, time.time() - status["time"])
    state = "silent" if status["state"] == "running" and age > SILENT_SECONDS else status["state"]
    last = _last_record(folder / METRICS_NAME)
    loss = last.get("loss")
    speed = last.get("tokens_per_second")
    numbers = f"{status['step']:>10,}{_number(loss, '.4f'):>10}{_number(speed, ',.0f'):>13}"
    reason = "" if state in ("running", "done") or not status["reason"] else f"  {status['reason'].splitlines()[0]}"
    return f"{folder!s:<{width}}  {state:<10}{numbers}  {duration(age)}{reason}"


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else "-"


def _last_record(path: Path) -> dict[str, Any]:
    """The last complete line of a step in a run's metrics; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "loss" in record:
            return record
    return {}


# --------------------------------------------------------------------------- compare


def _compare(options: argparse.Namespace, console: Console) -> None:
    """Show runs side by side, and the keys in which their configs differ."""
    runs = read_runs(options.runs)
    figures = [_figures(run) for run in runs]
    rows = [(name, [each[name] for each in figures]) for name in figures[0]]
    _print_columns(console, [("run", [run.name for run in runs]), *rows])
    differ = differences([run.config for run in runs])
    console.line()
    if differ:
        _print_columns(console, differ)
    else:
        console.line("the configs are the same but for name and folder")


def _figures(run: Recorded) -> dict[str, str]:
    def form(key: str, write: Callable[[float], str]) -> str:
        value = run.last(key)
        return "-" if value is None else write(value)

    return {
        "state": run.state,
        "step": f"{run.step:,}",
        "tokens": form("tokens", count),
        "loss": form("loss", fixed),
        "validation loss": form("validation_loss", fixed),
        "tokens/s": form("tokens_per_second", "{:,.0f}".format),
        "goodput": form("goodput", lambda share: percent(share, 0)),
        "launches": _launches(run),
    }


def _launches(run: Recorded) -> str:
    """The launches that have logged steps and, of an elastic run, how many there were in all."""
    logged = str(len(run.launches) or "-")
    n = newest_number(run.folder / FOLDER)
    return f"{logged} of {n} incarnations" if n else logged


def _print_columns(console: Console, rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    lines = [[label, *cells] for label, cells in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        console.line("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


# --------------------------------------------------------------------------- clean


def _clean(options: argparse.Namespace, console: Console) -> None:
    """Show what could be removed of runs; with --remove, remove it after a question."""
    doomed: dict[Path, list[Doomed]] = {}
    for run in _chosen(options):
        if not options.remove or _is_free(run, console):
            doomed[run] = removable(run, options.what)
    everything = [each for found in doomed.values() for each in found]
    if not everything:
        console.line("nothing to remove")
        return
    for each in everything:
        console.line(f"{size(each.size):>10}  {each.path}")
    console.line(f"{size(sum(each.size for each in everything)):>10}  in all")
    if not options.remove:
        console.line("nothing was removed; with --remove it is, after a question")
    elif options.yes or _agreed(len(everything)):
        for run, found in doomed.items():
            _remove(run, found, options.what == "everything", console)
    else:
        console.line("nothing was removed")


def _chosen(options: argparse.Namespace) -> list[Path]:
    """The runs that the command line names, themselves or by a folder of runs."""
    chosen: dict[Path, None] = {}
    for folder in options.folders:
        found = [run for run, status in runs_in(folder) if status["state"] != UNREADABLE]
        if options.what == "everything" and folder not in found:
            raise UserError(f"{folder} is not a run (it has no status.json); --what everything takes runs by name")
        if not found:
            raise UserError(f"{folder}: no runs here (a run is a folder with a status.json)")
        chosen |= dict.fromkeys([folder] if options.what == "everything" else found)
    return list(chosen)


def _is_free(run: Path, console: Console) -> bool:
    """Lock a run's folder until this process ends; warns if a run uses it."""
    try:
        lock(run, console.warning)
    except FolderInUse as error:
        console.warning(f"{error}; nothing in it is removed")
        return False
    except OSError as error:
        raise UserError(f"{run} can't be written: {error.strerror}") from None
    return True


def _agreed(n: int) -> bool:
    if not sys.stdin.isatty():
        raise UserError("nothing was removed: nobody can be asked, since standard input is no terminal; add --yes")
    return input(f"Remove {'this' if n == 1 else f'these {n}'}? [y/N] ").strip().lower() in ("y", "yes")


def _remove(run: Path, found: Sequence[Doomed], is_whole: bool, console: Console) -> None:
    for each in found:
        try:
            remove_one(each.path)
        except BeingRead as error:
            console.warning(str(error))
        except OSError as error:
            raise UserError(f"{each.path} can't be removed: {error.strerror}") from None
        else:
            console.line(f"removed {each.path}")
    for path in remove_emptied(run) if is_whole else ():
        console.line(f"kept {path}")


# --------------------------------------------------------------------------- command line


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, keeps_lines=True)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"), metavar="FOLDER", help="default: runs")
    return parser


def _add_compared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder")


def _add_cleaned(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_OR_FOLDER", help="run folder, or folder of runs")
    parser.add_argument("--what", choices=WHAT, default="leftovers", help="default: %(default)s")
    parser.add_argument("--remove", action="store_true", help="remove it; otherwise it is only shown")
    parser.add_argument("--yes", action="store_true", help="with --remove, do not ask")


_COMMANDS: dict[str, tuple[_Command, Callable[[argparse.ArgumentParser], None]]] = {
    "compare": (_compare, _add_compared),
    "clean": (_clean, _add_cleaned),
}


if __name__ == "__main__":
    end(main)
