"""The life of a job around its training: its folder, what a person sees first and last, and how it ended.

However a run ends, `status.json` says so, and a mistake of the user's ends in one message instead of a traceback.
"""

import json
import os
import time
import traceback
from pathlib import Path

import torch.distributed as dist

from configs.errors import KeelError, UserError
from configs.load import LoadedConfig
from trainer.console import Console
from trainer.lifecycle import EXIT_PREEMPTED, StopRequest, exit_code, write_status
from trainer.metrics import TimeLedger
from trainer.summary import closing_rows, closing_title, next_rows, startup_rows
from trainer.trainer import Trainer, device_name, run_folder

# When all ranks fail alike, the first one's message is enough: torchrun stops the others while they wait.
_PATIENCE_SECONDS = 2.0


def run(job: LoadedConfig, stop: StopRequest) -> int:
    """Run a job on this rank, to its end; returns the process's exit code."""
    rank, folder, ledger = int(os.environ.get("RANK", "0")), run_folder(job.config), TimeLedger()
    trainer = None
    with Console(rank) as console:
        try:
            if rank == 0:
                _open_folder(folder, console)
            trainer = Trainer(job, console, stop, ledger)
            if rank == 0:
                (folder / "config.toml").write_text(job.to_toml(), encoding="utf-8")
            _say_hello(trainer)
            state = trainer.train()
            _say_goodbye(trainer, state)
            dist.destroy_process_group()
            return exit_code(state)
        except BaseException as error:  # torch's CheckpointException is no Exception
            return _end_badly(error, rank, folder, console, stop, trainer.run.step if trainer else 0)


def _open_folder(folder: Path, console: Console) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        console.log_to(folder / "run.log")
        write_status(folder, "running", step=0, reason="starting")
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
    error: BaseException, rank: int, folder: Path, console: Console, stop: StopRequest, step: int
) -> int:
    """Say why, once for all ranks, and leave it in status.json; returns the exit code."""
    code = exit_code("failed", error)
    text = str(error) if isinstance(error, KeelError) else "".join(traceback.format_exception(error))
    if rank > 0:
        time.sleep(_PATIENCE_SECONDS)
        if stop or _state(folder) == "failed":
            return code
    console.error(text)
    if folder.is_dir():
        state = "preempted" if code == EXIT_PREEMPTED else "failed"
        write_status(folder, state, step, str(error) or type(error).__name__)
    return code


def _state(folder: Path) -> str:
    try:
        return json.loads((folder / "status.json").read_text())["state"]
    except (OSError, ValueError, KeyError):
        return ""
