"""The files of a run folder."""

import fcntl
import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np

from checkpoint.lock import LOCK_NAME, lock
from configs.errors import UserError
from configs.load import load
from scripts.proof.reproduction import Reproduction, read
from tests.torture.kinds.kind import Kind
from tests.torture.mutations import mutated_bytes, mutated_json
from trainer.lifecycle import read_status
from trainer.planning.skeleton import skeleton
from trainer.proof.record import TYPES, Launch, Step
from trainer.report.metrics import cut_back


def _metrics(folder: Path) -> Path:
    lines = [json.dumps({"step": step, "loss": 5.0 / step, "lr": 1e-3, "mfu": None}) for step in range(1, 60)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "metrics.jsonl"


def _read_metrics(path: Path) -> str:
    try:
        return str(cut_back(path, 20))
    except OSError as error:  # the trainer makes one message of it
        raise UserError(f"{error.filename} can't be written: {error.strerror}") from None


def _status_file(folder: Path) -> Path:
    values = {"state": "failed", "step": 7, "reason": "", "time": 1.5, "host": "a", "pid": 1}
    (folder / "status.json").write_text(json.dumps(values, indent=2) + "\n")
    return folder / "status.json"


def _read_status(path: Path) -> str:
    status = read_status(path.parent)
    return f"{status.get('state') in ('failed',)} {status.get('time', 0) >= 2.0} {status.get('step', 0):d}"


def _lock_file(folder: Path) -> Path:
    (folder / LOCK_NAME).write_text("process 12345 on somewhere\n")
    return folder / LOCK_NAME


def _read_lock(path: Path) -> str:
    """While another process has the folder."""
    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:
        with suppress(OSError):
            fcntl.lockf(os.open(path, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
        os.write(writing, b"x")
        signal.pause()
        os._exit(0)
    try:
        os.read(reading, 1)
        lock(path.parent, lambda _: None)
    except OSError as error:
        raise UserError(f"the folder can't be written: {error.strerror}") from None  # as a run does
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(reading)
        os.close(writing)
    return ""


def _reproduction(folder: Path) -> Path:
    job = load("parity.toml", (), 1)
    shapes = skeleton(job.config.model).shapes
    launch = Launch(0, 0, {"dp_shard": 1}, 1, {"torch": "2"}, [], job.to_toml(), {"synthetic": "x"})
    arrays = [np.zeros(len(shapes), TYPES[name]) for name in ("digests", "norms", "samples")]
    steps = [Step(number, 5.0, 1.0, *arrays, np.zeros(0, "<u4"), 7) for number in (1, 2)]
    (folder / "run.json").write_text(Reproduction(0, None, None, launch, steps).text())
    return folder / "run.json"


def _read_reproduction(path: Path) -> str:
    return str(read(path).plan(None, path.parent).last)


KINDS = (
    Kind("a run to reproduce", _reproduction, mutated_json, _read_reproduction),
    Kind("metrics.jsonl", _metrics, mutated_bytes, _read_metrics),
    Kind("status.json", _status_file, mutated_json, _read_status),
    Kind(LOCK_NAME, _lock_file, mutated_bytes, _read_lock),
)
