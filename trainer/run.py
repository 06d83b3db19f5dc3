"""Runs a job around its training: the run folder, the opening and closing output, and how the run ended.

However a run ends, `status.json` records it, and a user's mistake ends in one message instead of a traceback.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from checkpoint.bucket_files import local_file
from checkpoint.find import keep_tokenizer
from checkpoint.incarnation import Superseded
from checkpoint.lock import FolderInUse
from configs.errors import ConfigError, KeelError, OutageError, mistakes_of_the_job
from configs.files import exists, insist, require_plain, write_atomically
from configs.load import LoadedConfig
from parallelisms.mesh import form_of_first, start_process_group
from parallelisms.nccl import configure_nccl, nccl_settings, warn_of_faults
from parallelisms.ranks import on_rank_zero
from parallelisms.toolchain import require_compiler
from trainer.announce import say_goodbye, say_hello, silent_end
from trainer.elastic import forming, release, show_life, wait_idle
from trainer.guards.agreement import compare_launches
from trainer.guards.environment import device_type
from trainer.guards.out_of_memory import out_of_memory
from trainer.guards.peers import Loss
from trainer.guards.shared_folder import MARK, NotShared
from trainer.guards.watchdog import Watchdog, append_to_log, said_of
from trainer.home import Home, home_of
from trainer.lifecycle import (
    EXIT_FAILED,
    EXIT_PREEMPTED,
    State,
    StopRequest,
    exit_code,
    is_alive,
    is_own,
    read_status,
    status_there,
    tell_torchrun,
    write_status,
)
from trainer.numerics import set_numerics
from trainer.opening import Runtime
from trainer.optimizers.adamw import require_kernel
from trainer.report.console import Console
from trainer.report.metrics import TimeLedger
from trainer.report.summary import closing_title
from trainer.report.wall_clock import end_of
from trainer.trainer import Trainer

# If all ranks fail in the same way, rank 0 reports the error. Another rank waits this long before it reports its own.
_PATIENCE_SECONDS = 5.0
_LAUNCHER_SECONDS = 1.0
"""How often a rank looks whether its launcher is there, until training begins."""
_APPENDED = ("run.log", "metrics.jsonl")
"""Files in the run folder that are appended to, so they must not be links; all others are replaced."""


class _NotWritable(ConfigError):
    """The run folder can't be written, so nothing is recorded in it."""


@dataclass
class _Launch:
    """The facts of this process that ending the run needs."""

    rank: int
    folder: Path
    console: Console
    stop: StopRequest
    started: float
    """Seconds since the epoch; an older status.json is another launch's."""
    watchdog: Watchdog | None = None
    """None until the process group exists."""
    home: Home | None = None
    """The run's, once this launch has it."""
    trains: threading.Event = field(default_factory=threading.Event)
    """Set when training begins: from then on a step's end tells all ranks to stop."""


class LauncherLost(KeelError):
    """The launcher ended before training began; with it went the store through which the ranks meet."""

    exit_code = EXIT_PREEMPTED


def run(job: LoadedConfig, stop: StopRequest, build: Callable[..., Trainer] = Trainer) -> int:
    """Run a job on this rank to its end; returns the process's exit code.

    Args:
        job: the job.
        stop: told by signals.
        build: called with a Trainer's arguments.
    """
    rank = int(os.environ.get("RANK", "0"))
    folder = job.config.job.folder
    ledger = TimeLedger()
    timeout = job.config.job.timeout_seconds
    trainer = None
    with Console(rank) as console:
        launch = _Launch(rank, folder, console, stop, started=time.time())
        if stop.launcher is not None:
            threading.Thread(target=_end_with_launcher, args=(launch,), name="launcher", daemon=True).start()
        try:
            kind = device_type(job)
            require_compiler(job, kind)
            with mistakes_of_the_job():
                home = home_of(job.config.job)
            set_numerics(job.config.training, kind)
            if kind == "cuda":
                configure_nccl(nccl_settings(job.config), os.environ)
                warn_of_faults(console.warning, os.environ)
            with forming():
                device = start_process_group(kind, timeout, console.warning)
            with mistakes_of_the_job():
                home.join(on_rank_zero(None, lambda: _open_folder(launch, job, home)))
                launch.home = home
            watchdog = _watch(launch, timeout)
            compare_launches(job, device)
            home.require_seen()
            shared = None  # on rank 0 it may be the store's server, which must last
            if job.choice and job.choice.idle:
                watchdog.close()
                with forming():
                    shared = form_of_first(job.choice.ranks, device, timeout)
                if rank >= job.choice.ranks:
                    _begin(launch, job)
                    return wait_idle(shared, stop, timeout, console.warning)
                watchdog = _watch(launch, timeout, partial(show_life, shared))
            require_kernel(job, device)
            runtime = Runtime(job, device, console, stop, ledger, watchdog, home.storage)
            trainer = build(runtime, before_build=lambda opened: say_hello(opened, console))
            _write_job(launch, job)
            _begin(launch, job)
            state = trainer.train()
            if folder / "config.toml" in console.outages:
                _write_job(launch, job)
            say_goodbye(trainer, state)
            home.close(console)
            if shared and job.choice and rank == 0:
                release(shared, job.choice.idle, exit_code(state))
            if state == "preempted":  # torchrun takes exit codes but 0 as failures unless it sent the signal
                tell_torchrun(
                    closing_title(job.config, state, trainer.run.step, stop.reason or "a signal to another rank")
                )
            dist.destroy_process_group()
            watchdog.close()
            return exit_code(state)
        except BaseException as error:  # torch's CheckpointException is not an Exception
            step = trainer.run.step if trainer else None
            if _lost_launcher(launch) and isinstance(error, (RuntimeError, OutageError)):
                error = LauncherLost(_why_lost(launch))
            if isinstance(error, OutageError) and _is_saved_for_a_stop(launch):
                append_to_log(folder, f"after the save for {stop.reason}: {error}")
                return EXIT_PREEMPTED
            explained = out_of_memory(error, job.config, step)
            if explained:
                append_to_log(folder, "".join(traceback.format_exception(error)))
            return _end_badly(explained or error, launch, step)


def _watch(launch: _Launch, timeout_seconds: int, show_life: Callable[[], None] = lambda: None) -> Watchdog:
    incarnation = launch.home.incarnation if launch.home else None
    end = partial(_end_from_thread, launch)
    launch.watchdog = Watchdog(launch.folder, timeout_seconds, end, incarnation, show_life)
    return launch.watchdog


def _open_folder(launch: _Launch, job: LoadedConfig, home: Home) -> int | None:
    """Take the run folder, on one rank; returns the number of this launch if launches of the run are numbered."""
    folder = launch.folder
    console = launch.console
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = home.take(job, console)
        launch.home = home
        for name in _APPENDED:
            require_plain(folder / name)
        console.log_to(folder / "run.log")
        for file in (folder / "crashes").glob("rank-*.txt"):
            if not file.stat().st_size:  # left by a rank that was killed
                file.unlink()
        for file in (*folder.glob(".status.json.*tmp"), *folder.glob(f"{MARK}*")):  # likewise
            file.unlink(missing_ok=True)
        before = read_status(folder)
        if before.get("state") == "running":  # this launch holds the lock, so that one has ended
            console.warning(silent_end(before, folder))
        write_status(folder, "running", step=before.get("step", 0), reason="starting", previous=end_of(before))
        return number
    except OSError as error:
        raise _NotWritable(
            f"the run folder {folder} can't be written ({error.filename or folder}: {error.strerror}); "
            "set job.output_dir to another folder"
        ) from None


def _write_job(launch: _Launch, job: LoadedConfig) -> None:
    """Write what makes the run folder usable anywhere: the config, and a copy of the tokenizer."""
    path = launch.folder / "config.toml"
    tokenizer = job.config.tokenizer.path
    if launch.rank == 0:
        with launch.console.outages.tolerate(path):
            write_atomically(path, [job.to_toml()])
            if tokenizer:
                keep_tokenizer(local_file(tokenizer), launch.folder)


def _end_badly(error: BaseException, launch: _Launch, step: int | None) -> int:
    """Report the error once for all ranks and write it to status.json; returns the exit code."""
    code = exit_code("failed", error)
    if isinstance(error, (FolderInUse, Superseded)):  # on all ranks; status.json belongs to the run that has the folder
        if launch.rank == 0:
            launch.console.error(str(error))
        tell_torchrun(str(error))
        return code
    reason = str(error) or type(error).__name__
    text = reason if isinstance(error, KeelError) else "".join(traceback.format_exception(error))
    if launch.watchdog:
        losses = launch.watchdog.explain(error)
        if losses:
            _say_who_is_lost(losses, launch, saw=reason)
            launch.watchdog.close()
            return code
    tell_torchrun(text)  # before the other ranks hear of it
    if launch.watchdog:
        launch.watchdog.close(reason)
    if launch.rank > 0 and (isinstance(error, NotShared) or _others_end(launch)):
        tell_torchrun(read_status(launch.folder).get("reason") or reason)  # no other rank on this node may report it
        return code
    launch.console.error(text)
    state: State = "preempted" if code == EXIT_PREEMPTED else "failed"
    if not isinstance(error, _NotWritable):
        _write_end(launch, state, step, reason)
    return code


def _say_who_is_lost(losses: list[Loss], launch: _Launch, saw: str) -> None:
    """Report that other ranks are dead or do not answer; only the first rank that finds out does."""
    assert launch.watchdog is not None
    tell_torchrun(said_of(losses), is_consequence=True)
    if _has_ended(launch) or not launch.watchdog.peers.is_first("last word"):
        return
    text = f"{said_of(losses)}. The same command resumes from the newest checkpoint"
    seen = f"rank {launch.rank} saw: {saw.splitlines()[0]}" if saw else ""
    append_to_log(launch.folder, f"error: {text}. {seen}")
    _write_end(launch, "failed", None, said_of(losses), lost=[loss.as_json() for loss in losses])
    launch.console.error(text)


def _end_from_thread(launch: _Launch, losses: list[Loss]) -> NoReturn:
    """End this process from another thread, because the main thread is blocked in a collective."""
    _say_who_is_lost(losses, launch, saw="")
    os._exit(EXIT_FAILED)


def _lost_launcher(launch: _Launch) -> bool:
    return launch.stop.has_lost_launcher and not launch.trains.is_set()


def _begin(launch: _Launch, job: LoadedConfig) -> None:
    """Note that training begins: from here on, ranks of an elastic run train on until a new launcher joins."""
    if job.choice:
        launch.stop.launcher = None
    launch.trains.set()


def _end_with_launcher(launch: _Launch) -> None:
    """End this process if the launcher ends before training begins: ranks may then wait for each other in vain."""
    while not launch.trains.wait(_LAUNCHER_SECONDS):
        if _lost_launcher(launch) and not launch.trains.wait(_PATIENCE_SECONDS):
            if launch.rank == 0:
                launch.console.error(_why_lost(launch))
                if is_own(read_status(launch.folder)):
                    _write_end(launch, "preempted", None, launch.stop.reason)
            os._exit(EXIT_PREEMPTED)


def _why_lost(launch: _Launch) -> str:
    return f"stopped by {launch.stop.reason} before training began; the same command begins where this one did"


def _write_end(launch: _Launch, state: State, step: int | None, reason: str, **details: object) -> None:
    if launch.home and launch.home.incarnation and not launch.home.incarnation.is_current():
        return
    if not _is_missing(launch.folder) and not _is_end(before := _last_status(launch.folder), launch):
        if not launch.home and is_alive(before):  # another launch, which has the folder
            return
        known = before.get("step", 0)  # the first error of a launch is the cause
        write = partial(write_status, launch.folder, state, known if step is None else step, reason, **details)
        launch.console.outages.insist(launch.folder / "status.json", write)  # the disk may be why the run fails
        if launch.home:
            launch.home.close(launch.console)


def _others_end(launch: _Launch) -> bool:
    """Wait a moment; returns whether rank 0 reports the failure, or ends and torchrun then stops this rank."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if _has_ended(launch) or launch.stop.wait(0.1):
            return True
    return False


def _is_saved_for_a_stop(launch: _Launch) -> bool:
    """Whether the last step was saved in the middle of another, which a stop did not let come to its end."""
    return bool(launch.stop) and _has_ended(launch) and read_status(launch.folder)["state"] == "preempted"


def _is_missing(folder: Path) -> bool:
    """Whether a folder does not exist; a disk that refuses to say may have it."""
    with suppress(OSError):
        return not insist(partial(exists, folder))
    return False


def _last_status(folder: Path) -> dict[str, Any]:
    """The status; a disk that refuses is asked again, since what it has decides what is written there."""
    with suppress(OSError):
        return insist(partial(status_there, folder))
    return {}


def _has_ended(launch: _Launch) -> bool:
    return _is_end(read_status(launch.folder), launch)


def _is_end(status: dict[str, Any], launch: _Launch) -> bool:
    return status.get("state") in ("failed", "preempted") and status.get("time", 0) >= launch.started
