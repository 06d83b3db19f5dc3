"""The life of a job around its training: its folder, what a person sees first and last, and how it ended.

However a run ends, `status.json` says so, and a mistake of the user's ends in one message instead of a traceback.
"""

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from checkpoint.store import on_rank_zero
from configs.errors import KeelError, UserError
from configs.load import LoadedConfig
from parallelisms.mesh import start_process_group
from trainer.console import Console
from trainer.lifecycle import EXIT_PREEMPTED, StopRequest, exit_code, write_status
from trainer.metrics import TimeLedger
from trainer.summary import closing_rows, closing_title, next_rows, startup_rows
from trainer.trainer import Trainer, device_name, device_type, run_folder

# Where all ranks fail alike, rank 0 says why; where another fails alone, it has to say so itself, a little later.
_PATIENCE_SECONDS = 5.0


def run(job: LoadedConfig, stop: StopRequest) -> int:
    """Run a job on this rank, to its end; returns the process's exit code."""
    rank, folder, ledger = int(os.environ.get("RANK", "0")), run_folder(job.config), TimeLedger()
    trainer = None
    with Console(rank) as console:
        try:
            device = start_process_group(device_type(job.config), job.config.job.timeout_seconds)
            on_rank_zero(dist.group.WORLD, lambda: _open_folder(folder, console))
            trainer = Trainer(job, device, console, stop, ledger)
            if rank == 0:
                (folder / "config.toml").write_text(job.to_toml(), encoding="utf-8")
            _say_hello(trainer)
            state = trainer.train()
            _say_goodbye(trainer, state)
            dist.destroy_process_group()
            return exit_code(state)
        except BaseException as error:  # torch's CheckpointException is no Exception
            return _end_badly(error, rank, folder, console, stop, trainer.run.step if trainer else None)


def _open_folder(folder: Path, console: Console) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        console.log_to(folder / "run.log")
        write_status(folder, "running", step=_status(folder).get("step", 0), reason="starting")
    except OSError as error:
        raise UserError(f"the run folder {folder} can't be written: {error}; set job.output_dir to another") from None


def _say_hello(trainer: Trainer) -> None:
    config, mesh = trainer.config, trainer.mesh
    data = [f"{source.name}: {source.kind} {source.path or ''}".rstrip() for source in config.data.sources]
    rows = startup_rows(
        config, mesh.sizes, device_name(mesh.device), trainer.peak, data, trainer.folder, trainer.first_step
    )
    trainer.console.table(f"Keel trains {config.job.name}", rows)


def _say_goodbye(trainer: Trainer, state: str) -> None:
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


def _end_badly(
    error: BaseException, rank: int, folder: Path, console: Console, stop: StopRequest, step: int | None
) -> int:
    """Say why, once for all ranks, and leave it in status.json; returns the exit code."""
    code = exit_code("failed", error)
    if rank > 0:
        _wait_for_first_rank(folder, stop)
        if stop:
            return code
    status = _status(folder)
    if status.get("state") == "failed" and status.get("pid") != os.getpid():
        return code
    console.error(str(error) if isinstance(error, KeelError) else "".join(traceback.format_exception(error)))
    if folder.is_dir():
        state = "preempted" if code == EXIT_PREEMPTED else "failed"
        step = status.get("step", 0) if step is None else step
        write_status(folder, state, step, str(error) or type(error).__name__)
    return code


def _wait_for_first_rank(folder: Path, stop: StopRequest) -> None:
    """Until it has said why the run fails, or has ended, whereupon torchrun stops this rank; not for long."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline and not stop and _status(folder).get("state") != "failed":
        time.sleep(0.05)


def _status(folder: Path) -> dict[str, Any]:
    """What status.json says; empty if there is none."""
    try:
        return json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return {}
