"""Compute steps of a run again, and compare them with what the run recorded: scripts/replay.py RUN --step N [N ...] ...

The run must have recorded fingerprints (metrics.fingerprint = true). The steps from the newest checkpoint before step N
up to N are computed again in a temporary folder; nothing in RUN is changed. --random K takes K random steps in place of
--step. Without further words the replay has the run's own mesh, and must be equal in bits. With --ranks and keys of the
job such as --mesh.dp_shard 2, or on another machine, it must be equal within a bound. Otherwise the first step and the
parameter that differ are named. Exit code 0: equal; 1: not equal, or not possible;
75: stopped.
"""

import argparse
import fcntl
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint.find import require_run
from configs.errors import ConfigError, UserError
from configs.files import exists
from configs.load import load
from configs.run_stages import trained_diff
from scripts.command import end, folder_argument, parsed, parser_of, place_argument, positive, refuse_keys, run_command
from scripts.comparison.runs import Stopped
from scripts.launcher import run_ranks
from train import end_process
from trainer.guards.fragmentation import let_segments_grow
from trainer.lifecycle import EXIT_PREEMPTED, StopRequest, install_signal_handlers
from trainer.report.console import Console

if TYPE_CHECKING:
    from scripts.proof.replay import Plan, Verdict

_RANK_OF = "KEEL_REPLAY"
"""Environment variable of a replay's ranks: its folder."""
_TASK = "task.json"
_NEW_SECONDS = 60.0
"""A temporary folder that is newer may be one that is not locked yet."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line to its end as this process, which may abort in Python's shutdown after starting ranks."""
    if folder := os.environ.get(_RANK_OF):
        _be_a_rank(Path(folder))
    parser = _parser()
    options, words = parsed(parser, arguments)
    if options.folder and len(options.step or ()) != 1:
        parser.error("--folder keeps the replay of a single --step")
    holds = False

    def work(console: Console) -> None:
        nonlocal holds
        steps = options.step or random_steps(options.run, options.random, options.seed)
        held = [replay(options.run, step, console, options.ranks, words, options.folder) for step in steps]
        holds = all(held)
        if len(held) > 1:
            console.line(f"{sum(held)} of {len(held)} replayed steps hold")

    end_process(run_command(work, "stopped") or int(not holds))


def replay(
    run: Path,
    step: int,
    console: Console,
    ranks: int | None = None,
    words: Sequence[str] = (),
    folder: Path | None = None,
) -> bool:
    """Replay the steps up to `step` and print the verdict; returns whether the run holds.

    Args:
        run: run folder.
        step: the last step.
        console: what is printed to.
        ranks: None: as many as the run had.
        words: keys of the job and their values.
        folder: a new one that keeps the replay; None: a temporary one.

    Raises:
        KeelError: the replay is not possible, or failed.
    """
    require_run(run)  # a wrong path costs no import of torch
    if folder is None:
        with temporary_folder("keel-replay-") as temporary:
            return replay(run, step, console, ranks, words, temporary)
    if exists(folder) and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; name a new folder with --folder")
    from scripts.proof.replay import judge, plan

    folder.mkdir(parents=True, exist_ok=True)
    planned = plan(run, step, folder)
    console.line(f"{run}: computing {_steps(planned)} again, from {planned.checkpoint or 'the initial weights'}")
    n_ranks = ranks or planned.launch.ranks
    _require_same_run(planned, n_ranks, words, folder)
    compute_again(planned, n_ranks, words, folder.resolve())
    verdict = judge(planned, folder / "run")
    for line in said(planned, verdict):
        console.line(line)
    return verdict.holds


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder that is removed with this context, as are those that killed processes have left, which may be large."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError), _held(left) as is_held:  # it may be another user's
            if is_held and time.time() - left.stat().st_mtime > _NEW_SECONDS:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=prefix) as name, _held(Path(name)):
        yield Path(name)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Lock a folder; yields False if another process has it, or the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_held = True
    except OSError:
        is_held = False
    try:
        yield is_held
    finally:
        os.close(descriptor)


def random_steps(run: Path, n: int, seed: int | None) -> list[int]:
    """Choose `n` random steps of a run that can be replayed, or all if there are fewer.

    Args:
        run: run folder.
        n: how many.
        seed: of the choice; None: another choice each time.

    Raises:
        UserError: none can be replayed.
    """
    require_run(run)  # a wrong path costs no import of torch
    from checkpoint.manifest import steps_in
    from scripts.proof.recorded import recorded_steps

    recorded = recorded_steps(run)
    begin = 0 if 1 in recorded else min(steps_in(run / "checkpoints"), default=max(recorded, default=0))
    possible = [step for step in recorded if step > begin]
    if not possible:
        raise UserError(f"{run}: no step can be replayed, as there is no checkpoint before any with a fingerprint")
    return random.Random(seed).sample(possible, min(n, len(possible)))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("run", type=place_argument, metavar="RUN", help="run folder")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=positive, nargs="+", metavar="N", help="compute the steps up to this one again")
    which.add_argument("--random", type=positive, metavar="K", help="the same for K random steps")
    parser.add_argument("--seed", type=int, metavar="S", help="choose the same random steps each time")
    parser.add_argument("--ranks", type=positive, metavar="R", help="ranks on this host (default: as many as the run)")
    parser.add_argument("--folder", type=folder_argument, metavar="F", help="a new folder in which the replay is kept")
    return parser


# --------------------------------------------------------------------------- computing


def _require_same_run(plan: "Plan", ranks: int, words: Sequence[str], folder: Path) -> None:
    """Refuse run keys with other values than the run's."""
    from scripts.proof.replay import JOB_NAME

    job = str(folder / JOB_NAME)
    was, now = (load(job, given, n, is_stored=True).config for given, n in (((), None), (words, ranks)))
    _, changes = trained_diff(was.model_dump(mode="json"), now.model_dump(mode="json"), plan.last)
    if changes:
        listed = "".join(f"\n  {change}" for change in changes)
        raise ConfigError(
            f"a replay learns what the run has learned, so that only machine keys may be others; leave out:{listed}"
        )


def compute_again(plan: "Plan", ranks: int, words: Sequence[str], folder: Path) -> None:
    """Compute the steps on ranks of their own."""
    from scripts.proof.replay import JOB_NAME, require_same_teacher

    job = str(folder / JOB_NAME)
    own = plan.words(folder / "run")
    settled = [flag.removeprefix("--") for flag in own[::2] if flag != "--tokenizer.path"]
    refuse_keys(words, settled, "a replay sets it itself; leave it out")
    words = [*own, *words]
    require_same_teacher(
        plan.launch, load(job, words, ranks, is_stored=True).config
    )  # mistakes are reported here, once
    (folder / _TASK).write_text(json.dumps({"job": job, "words": words, "first_sample": plan.first_sample}))
    os.environ[_RANK_OF] = str(folder)
    try:
        code = run_ranks(__file__, [], ranks)
    finally:
        del os.environ[_RANK_OF]
    if code == EXIT_PREEMPTED:
        raise Stopped("stopped; the same command computes the steps from the first one on")
    if code:
        raise UserError(f"the replay did not come to its end (exit code {code})")


def _be_a_rank(folder: Path) -> NoReturn:
    """Be one of the ranks that compute the steps; what they print is in the replay's run.log."""
    stop = install_signal_handlers()
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
    let_segments_grow(os.environ)
    end_process(compute(folder, int(os.environ["WORLD_SIZE"]), stop))


def compute(folder: Path, ranks: int, stop: StopRequest) -> int:
    """Compute, as one of the ranks, the steps that `replay` has left a task for; returns the exit code."""
    task = json.loads((folder / _TASK).read_text())
    job = load(task["job"], task["words"], ranks, is_stored=True)
    from scripts.proof.replay import Replayer, reporting_to_nobody
    from trainer.run import run

    return run(reporting_to_nobody(job), stop, partial(Replayer, task["first_sample"]))


# --------------------------------------------------------------------------- what is said


def _steps(plan: "Plan") -> str:
    return f"step {plan.last}" if plan.first == plan.last else f"steps {plan.first} to {plan.last}"


def said(plan: "Plan", verdict: "Verdict") -> Iterator[str]:
    """The verdict in words."""
    found = verdict.difference
    if found is None:
        yield f"equal in bits: {_steps(plan)}"
        return
    if verdict.expects_bits:
        yield f"NOT EQUAL: step {found.step} is the first that differs from its replay"
        yield f"  {found}"
        return
    if len(found.parameters) < found.n_parameters:
        yield f"in bits, step {found.step} is the first that differs: {found}"
    yield f"the bits may differ, because of {'; '.join(f'{name} {what}' for name, what in verdict.changed.items())}"
    if verdict.first_outside:
        yield f"NOT EQUAL: step {verdict.first_outside.step} is the first that differs by more than round-off"
        yield f"  {verdict.first_outside}"
        return
    last = verdict.last_compared
    nearest = "losses, norms and samples of gradients are equal"
    if verdict.largest and verdict.largest.value:
        nearest = f"the difference nearest to it is {verdict.largest}"
    yield f"equal within the bound: steps {plan.first} to {last}; {nearest}"
    if last < verdict.last:
        yield (
            f"NOT COMPARED: the steps after {last}, since training enlarges round-off too far by then; replay them on "
            "the run's own mesh and kind of machine, or from a nearer checkpoint (checkpoint.interval)"
        )


if __name__ == "__main__":
    end(main)
