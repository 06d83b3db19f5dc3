"""The life of a job around its training: its folder, what a person sees first and last, and how it ended.

However a run ends, `status.json` says so, and a mistake of the user's ends in one message instead of a traceback.
"""

import json
import os
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint.lock import FolderInUse, lock
from checkpoint.store import on_rank_zero
from configs.errors import KeelError, UserError
from configs.load import LoadedConfig
from models import build_model
from parallelisms.activation_table import activation_table
from parallelisms.mesh import start_process_group
from trainer.agreement import compare_launches
from trainer.console import Console, Row
from trainer.environment import device_name
from trainer.lifecycle import EXIT_PREEMPTED, State, StopRequest, exit_code, write_status
from trainer.metrics import TimeLedger
from trainer.summary import closing_rows, closing_title, next_rows, startup_rows
from trainer.trainer import Trainer, device_type, run_folder

# Where all ranks fail alike, rank 0 says why; where another fails alone, it has to say so itself, a little later.
_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True)
class _Launch:
    """This process's part in the job, as its ending needs it."""

    rank: int
    folder: Path
    console: Console
    stop: StopRequest
    started: float
    """Seconds since the epoch: what status.json says from before is about another launch."""


def run(job: LoadedConfig, stop: StopRequest) -> int:
    """Run a job on this rank, to its end; returns the process's exit code."""
    rank, folder, ledger = int(os.environ.get("RANK", "0")), run_folder(job.config), TimeLedger()
    trainer = None
    with Console(rank) as console:
        launch = _Launch(rank, folder, console, stop, started=time.time())
        try:
            device = start_process_group(device_type(job), job.config.job.timeout_seconds)
            on_rank_zero(None, lambda: _open_folder(folder, console))
            compare_launches(job, device)
            trainer = Trainer(job, device, console, stop, ledger)
            if rank == 0:
                (folder / "config.toml").write_text(job.to_toml(), encoding="utf-8")
            _say_hello(trainer)
            state = trainer.train()
            _say_goodbye(trainer, state)
            dist.destroy_process_group()
            return exit_code(state)
        except BaseException as error:  # torch's CheckpointException is no Exception
            return _end_badly(error, launch, trainer.run.step if trainer else None)


def _open_folder(folder: Path, console: Console) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock(folder, console.warning)
        console.log_to(folder / "run.log")
        write_status(folder, "running", step=_status(folder).get("step", 0), reason="starting")
    except OSError as error:
        raise UserError(
            f"the run folder {folder} can't be written ({error.strerror}); set job.output_dir to another"
        ) from None


def _say_hello(trainer: Trainer) -> None:
    config, mesh = trainer.config, trainer.mesh
    data = [f"{source.name}: {source.kind} {source.path or ''}".rstrip() for source in config.data.sources]
    rows = startup_rows(
        config, mesh.sizes, device_name(mesh.device), trainer.peak, data, trainer.folder, trainer.first_step
    )
    trainer.console.table(f"Keel trains {config.job.name}", rows)
    if trainer.rank == 0 and config.activation_checkpoint.mode != "none":
        trainer.console.table("What a checkpointed block keeps for its backward pass", _activation_rows(trainer))


def _activation_rows(trainer: Trainer) -> list[Row]:
    config = trainer.config
    with torch.device("meta"):
        model = build_model(config.model)
    table = activation_table(
        model,
        config.activation_checkpoint,
        config.training.seq_len,
        getattr(torch, config.training.compute_dtype),
        trainer.device,
    )
    return [("", line) for line in str(table).split("\n")]


def _say_goodbye(trainer: Trainer, state: State) -> None:
    """Say how it went and where everything is; all ranks must call it."""
    config, console, step = trainer.config, trainer.console, trainer.run.step
    memory_peak = trainer.memory_peak_bytes()
    if trainer.rank > 0:
        return
    newest = trainer.newest_checkpoint
    reason = trainer.stop.reason or "a signal to another rank"
    console.table(
        closing_title(state, step, reason),
        closing_rows(config, trainer.folder, trainer.ledger.seconds(), trainer.ends(), memory_peak, newest),
    )
    console.table("What to try next", next_rows(config, state))
    write_status(trainer.folder, state, step, "" if state == "done" else reason, checkpoint=str(newest))


def _end_badly(error: BaseException, launch: _Launch, step: int | None) -> int:
    """Say why, once for all ranks, and leave it in status.json; returns the exit code."""
    code = exit_code("failed", error)
    if isinstance(error, FolderInUse):  # all ranks know; status.json belongs to the run that has the folder
        if launch.rank == 0:
            launch.console.error(str(error))
        return code
    if launch.rank > 0 and _others_end(launch):
        return code
    launch.console.error(str(error) if isinstance(error, KeelError) else "".join(traceback.format_exception(error)))
    if launch.folder.is_dir() and not _has_ended(launch):  # the first error of a launch is the cause
        step = _status(launch.folder).get("step", 0) if step is None else step
        state: State = "preempted" if code == EXIT_PREEMPTED else "failed"
        with suppress(OSError):  # it may be why the run fails
            write_status(launch.folder, state, step, str(error) or type(error).__name__)
    return code


def _others_end(launch: _Launch) -> bool:
    """Whether rank 0 says, in a moment, why the run fails, or has ended, whereupon torchrun stops this rank."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if _has_ended(launch) or launch.stop.wait(0.1):
            return True
    return False


def _has_ended(launch: _Launch) -> bool:
    status = _status(launch.folder)
    return status.get("state") in ("failed", "preempted") and status.get("time", 0) >= launch.started


def _status(folder: Path) -> dict[str, Any]:
    """What status.json says; empty if there is none."""
    try:
        return json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return {}
