"""Check that a run's records and checkpoints are what was written, and replay random steps: scripts/certify.py RUN ...

The run must have recorded fingerprints (metrics.fingerprint = true). All hashes are checked, including those of the
checkpoints' files; what was changed, exchanged or removed is named with its place. With --checks N, N random steps are
then computed again as by replay. Nothing in RUN is changed. Exit code 0: all holds; 1: not all.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.errors import KeelError, UserError
from scripts.command import end, parser_of, positive, run_command
from scripts.replay import replay
from train import end_process
from trainer.report.console import Console


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line to its end as this process, as `replay` does."""
    options, holds = _parser().parse_args(arguments), False

    def work(console: Console) -> None:
        nonlocal holds
        holds = certify(options.run, options.checks, options.seed, console)

    end_process(run_command(work, "stopped") or int(not holds))


def certify(run: Path, checks: int, seed: int | None, console: Console) -> bool:
    """Check a run and print what is wrong; returns whether all holds.

    Args:
        run: run folder.
        checks: how many random steps are replayed.
        seed: of the choice of these steps; None: another choice each time.
        console: what is printed to.

    Raises:
        UserError: the run has no fingerprints, or none of its steps can be replayed.
    """
    from checkpoint.manifest import steps_in
    from trainer.proof.certify import checkpoint_problems, metrics_problems, read_records

    records, saved = read_records(run), steps_in(run / "checkpoints")
    problems = [*records.problems, *metrics_problems(run, records), *checkpoint_problems(run, records)]
    for problem in problems:
        console.error(problem)
    if not problems:
        console.line(
            f"{run}: the hashes of {len(records.numbers):,} steps' fingerprints, metrics.jsonl and {len(saved)} "
            "checkpoints agree"
        )
    begin = 0 if 1 in records.numbers else min(saved, default=records.last)
    possible = [step for step in records.numbers if step > begin]
    if checks and not possible:
        raise UserError(f"{run}: no step can be replayed, as there is no checkpoint before any with a fingerprint")
    held = [_holds(run, step, console) for step in random.Random(seed).sample(possible, min(checks, len(possible)))]
    if held:
        console.line(f"{sum(held)} of {len(held)} replayed steps hold")
    return not problems and all(held)


def _holds(run: Path, step: int, console: Console) -> bool:
    try:
        return replay(run, step, console)
    except KeelError as error:
        console.error(str(error))
        return False


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--checks", type=positive, default=0, metavar="N", help="random steps to replay (default: 0)")
    parser.add_argument("--seed", type=int, metavar="S", help="choose the same random steps each time")
    return parser


if __name__ == "__main__":
    end(main)
