"""List runs: scripts/runs.py [FOLDER]

The runs in a folder and in the folders of it (default: runs) are listed, newest first, with state, step, loss and
speed. A run is a folder with a status.json, such as runs/debug. A run that says that it is running, but has not renewed
its status for two minutes, is listed as silent.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from configs.errors import UserError
from configs.files import exists, is_file, is_folder, whole
from configs.untrusted import parse_json, printable
from scripts.command import end, parser_of, place_argument, run_command
from scripts.page.recorded import is_number
from trainer.lifecycle import SILENT_SECONDS, read_status
from trainer.report.console import Console
from trainer.report.metrics import METRICS_NAME
from trainer.report.units import duration

_TAIL_BYTES = 2 << 20
"""Has a whole record, which may have up to 1 MiB, even before one that is being written."""
UNREADABLE = "unreadable"
"""State of a folder that this user may not read; it may be a run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    return run_command(lambda console: _list(options.folder, console), "stopped")


def _list(root: Path, console: Console) -> None:
    """List the runs in a folder."""
    if not is_folder(root):
        raise UserError(f"{whole(root)}: {'a file, not a folder of runs' if exists(root) else 'no such folder'}")
    runs = sorted(runs_in(root), key=lambda run: run[1]["time"], reverse=True)
    if not runs:
        raise UserError(f"{root}: no runs here (a run is a folder with a status.json)")
    width = max(len(_name(folder)) for folder, _ in runs)
    console.line(f"{'run':<{width}}  {'state':<10}{'step':>10}{'loss':>10}{'tokens/s':>13}  age")
    for folder, status in runs:
        console.line(_line(folder, status, width))


def runs_in(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the runs in a folder and in the folders of it, each with its status."""
    for each in (folder, *sorted(folder.glob("*")), *sorted(folder.glob("*/*"))):
        try:
            if is_file(each / "status.json"):
                yield each, read_status(each) or _unreadable("its status.json is damaged, or may not be read")
        except OSError as error:
            yield each, _unreadable(error.strerror or "")


def _unreadable(reason: str) -> dict[str, Any]:
    """The status of a run that can't be read."""
    return {"state": UNREADABLE, "step": 0, "reason": reason, "time": time.time()}


def _line(folder: Path, status: dict[str, Any], width: int) -> str:
    name = _name(folder)
    if status["state"] == UNREADABLE:
        return f"{name:<{width}}  {UNREADABLE}: {status['reason']}"
    age = max(0.0, time.time() - status["time"])
    state = "silent" if status["state"] == "running" and age > SILENT_SECONDS else status["state"]
    last = _last_record(folder / METRICS_NAME)
    loss = last.get("loss")
    speed = last.get("tokens_per_second")
    numbers = f"{status['step']:>10,}{_number(loss, '.4f'):>10}{_number(speed, ',.0f'):>13}"
    reason = "" if state in ("running", "done") or not status["reason"] else f"  {status['reason'].splitlines()[0]}"
    return f"{name:<{width}}  {state:<10}{numbers}  {duration(age)}{reason}"


def _name(folder: Path) -> str:
    """A folder in one line, whatever its name."""
    return printable(str(folder)).replace("\n", "\\n")


def _number(value: Any, form: str) -> str:
    return format(value, form) if is_number(value) else "-"


def _last_record(path: Path) -> dict[str, Any]:
    """The last complete line of a step in a run's metrics; empty if there is none."""
    try:
        if not is_file(path):  # reading a pipe might never end
            return {}
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "loss" in record:
            return record
    return {}


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument(
        "folder", type=place_argument, nargs="?", default=Path("runs"), metavar="FOLDER", help="default: runs"
    )
    return parser


if __name__ == "__main__":
    end(main)
