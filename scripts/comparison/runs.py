"""The runs of an experiment: each is trained by a keel command in a process of its own, unless it is finished."""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs.errors import KeelError
from configs.files import is_file
from configs.load import LoadedConfig
from scripts.command import OF_SIGNAL, refuse_keys
from trainer.lifecycle import EXIT_FAILED, EXIT_PREEMPTED, STOP_SIGNALS, handling_stops, read_status
from trainer.report.console import Console

_KEEL = Path(__file__).parents[1] / "keel.py"

CONTINUES = "the same command continues"
"""What an experiment that a signal stops between two of its runs says."""

OWN_KEYS = {
    "job.output_dir": "--output FOLDER names the folder of all runs; leave it out",
    "job.allow_run_change": "each run trains from its beginning with its keys; leave it out, or name another --output",
}
"""The keys that an experiment sets for its runs, and why the command line may not."""


def refuse_own_keys(words: Sequence[str]) -> None:
    """Raise ConfigError if the command line sets a key that an experiment sets for its runs."""
    for key, reason in OWN_KEYS.items():
        refuse_keys(words, [key], reason)


def own_words(seed: int, folder: object) -> tuple[str, ...]:
    """The words of the keys that an experiment sets for one of its runs."""
    # Without the last, a finished run of other keys would be taken over, and its losses for those of these keys.
    return ("--training.seed", str(seed), "--job.output_dir", str(folder), "--job.allow_run_change", "false")


Launch = Callable[[Sequence[str]], int]
"""Runs a keel command, such as ["train", "debug.toml"], to its end; returns its exit code."""


class Stopped(KeelError):
    """A signal arrived."""

    exit_code = EXIT_PREEMPTED


class Failed(KeelError):
    """A run has failed; the exit code is its own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def train(job: LoadedConfig, words: Sequence[str], folder: Path, ranks: int, launch: Launch, console: Console) -> None:
    """Train a job to its end in `folder`, unless just this job has been.

    Args:
        job: as `words` make it.
        words: the job file, and the keys that the command line sets.
        folder: the run folder, which `words` name as well.
        ranks: ranks on this host.
        launch: how a command is run.
        console: told what happens.

    Raises:
        Stopped, Failed: the run has not come to its end.
    """
    if is_done(folder, job):
        console.line(f"{folder}: done")
        return
    console.line(f"{folder}: training (see {folder / 'run.log'})")
    run_to_its_end(["train", *words, *ranks_words(ranks)], folder, launch)


def is_done(folder: Path, job: LoadedConfig) -> bool:
    """Whether a run of just this job is finished."""
    status = read_status(folder)
    file = folder / "config.toml"
    is_at_end = status.get("state") == "done" and status["step"] >= job.config.training.steps
    return is_at_end and is_file(file) and file.read_text() == job.to_toml()


def ranks_words(ranks: int) -> list[str]:
    """The number of ranks as `keel train` takes it."""
    return ["--ranks", str(ranks)] if ranks > 1 else []


def run_to_its_end(command: Sequence[str], folder: Path, launch: Launch) -> None:
    """Run a command that works on a run.

    Raises:
        Stopped: a signal arrived.
        Failed: it was killed, or has failed; then its own message stands above.
    """
    code = launch(command)
    if code == EXIT_PREEMPTED:
        raise Stopped(f"{folder} was stopped; the same command continues there")
    if code < 0:
        name = signal.Signals(-code).name
        raise Failed(f"keel {command[0]} for {folder} was killed by {name}; the same command continues", EXIT_FAILED)
    if code:
        raise Failed(f"keel {command[0]} failed for {folder} (exit code {code}); its message is above", code)


def run_process(command: Sequence[str]) -> int:
    """Run a keel command as a process of its own, to which signals are passed on; what it prints is in its run.log."""
    child: list[subprocess.Popen[bytes]] = []
    arrived: list[int] = []

    def pass_on(number: int, _frame: Any) -> None:
        arrived.append(number)
        for each in child:
            each.send_signal(number)

    with handling_stops(pass_on):
        words = [sys.executable, str(_KEEL), *command]
        child.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
        for number in arrived:  # while the process was being started
            child[0].send_signal(number)
        code = child[0].wait()
        # It may come before the command's own work.
        return EXIT_PREEMPTED if -code in STOP_SIGNALS or code - OF_SIGNAL in STOP_SIGNALS else code
