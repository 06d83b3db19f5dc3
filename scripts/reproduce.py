"""Let somebody else compute steps of a run again, from one small file: scripts/reproduce.py RUN --write FILE, or FILE

With --write, FILE (at most 64 KB) gets what the run in folder RUN recorded: its job, the hashes of code, tokenizer and
data, and the fingerprints of some steps (metrics.fingerprint = true). Without, the steps of FILE are computed, with the
data that are here, and the verdict is printed: equal in bits, equal within rounding, or the first step that differs,
and why (data, job, code, torch, values). --ranks and keys of the job choose another mesh, or say where the data are,
such as --data.sources.0.path. Exit code 0: equal; 1: not equal, or not possible.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint.find import require_run
from configs.errors import UserError
from configs.files import is_file, whole
from scripts.command import end, not_negative, parsed, parser_of, place_argument, positive, run_command
from scripts.replay import compute_again, said, temporary_folder
from train import end_process
from trainer.report.console import Console


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line to its end as this process, which may abort in Python's shutdown after starting ranks."""
    parser = _parser()
    options, words = parsed(parser, arguments)
    if options.write and (words or options.ranks or options.checkpoint):
        parser.error("--write computes nothing, and takes neither --ranks nor --checkpoint nor keys of the job")
    if not options.write and os.path.isdir(options.source):  # is_folder raises for what cannot be looked at
        parser.error("a run folder goes with --write FILE; without, name such a file")
    if not options.write and options.begin is not None:
        parser.error("--begin goes with --write: where the steps begin stands in FILE")
    holds = True

    def work(console: Console) -> None:
        nonlocal holds
        if options.write:
            write_file(options.source, options.write, console, options.begin or 0, options.steps)
        else:
            holds = reproduce(options.source, console, options.ranks, words, options.checkpoint, options.steps)

    end_process(run_command(work, "stopped") or int(not holds))


def write_file(run: Path, file: Path, console: Console, begin: int = 0, steps: Sequence[int] | None = None) -> None:
    """Write the file of a run.

    Args:
        run: run folder.
        file: is replaced.
        console: what is printed to.
        begin: step of the checkpoint to begin at; 0: the initial weights.
        steps: those to keep besides the first; None: the first ones.

    Raises:
        UserError: the run lacks something, or the file would be too large, or can't be written.
    """
    require_run(run)  # a wrong path costs no import of torch
    from scripts.proof.recorded import recorded_steps
    from scripts.proof.replay import plan
    from scripts.proof.reproduction import MOST_STEPS, write

    recorded = [step for step in recorded_steps(run) if step > begin]
    last = max(steps or recorded[:MOST_STEPS], default=begin + 1)
    with temporary_folder("keel-reproduce-") as folder:
        kept = write(file, plan(run, last, folder, begin), begin, steps)
    numbers = ", ".join(map(str, kept))
    console.line(f"{file}: {file.stat().st_size:,} bytes, with the fingerprints of the steps {numbers}")


def reproduce(
    file: Path,
    console: Console,
    ranks: int | None = None,
    words: Sequence[str] = (),
    checkpoint: Path | None = None,
    steps: Sequence[int] | None = None,
) -> bool:
    """Compute the steps of a file, and print the verdict; returns whether they are equal, in bits or within rounding.

    Args:
        file: written by `write_file`.
        console: what is printed to.
        ranks: None: as many as the run had.
        words: keys of the job and their values.
        checkpoint: the one that the file begins at, if it does.
        steps: those to compare besides the first; None: all of the file.

    Raises:
        KeelError: they can't be computed.
    """
    if not is_file(file):  # a wrong path costs no import of torch
        raise UserError(f"{whole(file)}: no such file")
    from scripts.proof.replay import judge
    from scripts.proof.reproduction import read, reasons

    with temporary_folder("keel-reproduce-") as temporary:
        folder = temporary.resolve()
        planned = read(file, steps).plan(checkpoint, folder, words)
        begin = planned.checkpoint or "the initial weights"
        compared = ", ".join(map(str, sorted(planned.steps)))
        console.line(f"{file}: computing steps again, from {begin}, to compare the steps {compared}")
        # The data may lie in another place than at the checkpoint, and the verdict names other run keys.
        changed = ["--job.allow_run_change", "true", *words]
        compute_again(planned, ranks or planned.launch.ranks, changed, folder)
        verdict = judge(planned, folder / "run")
        for line in said(planned, verdict):
            console.line(line)
        for reason in reasons(planned, folder / "run", verdict):
            console.line(f"  {reason}")
        return verdict.holds


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("source", type=place_argument, metavar="RUN|FILE", help="run folder, or the file of a run")
    add("--write", type=Path, metavar="FILE", help="write the file of RUN")
    add(
        "--begin",
        type=not_negative,
        metavar="STEP",
        help="with --write: begin at this checkpoint of RUN, which others need as well (default: the initial weights)",
    )
    add(
        "--steps",
        type=positive,
        nargs="+",
        metavar="N",
        help="steps to write, or to compare, besides the first (default: the first 20, and all of FILE)",
    )
    add("--checkpoint", type=Path, metavar="FOLDER", help="the checkpoint that FILE begins at, if it names one")
    add("--ranks", type=positive, metavar="R", help="ranks on this host (default: as many as the run)")
    return parser


if __name__ == "__main__":
    end(main)
