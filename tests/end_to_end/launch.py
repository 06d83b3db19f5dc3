"""Keel started as a person starts it, in a process of its own, and what its run folder says afterwards.

A launch costs seconds, most of them torch's import: `launch` has its processes forked off one that has done that
(tests/preloaded.py), `start` gives a test the real ones. The tests ask of one launch as much as they can. The current
folder of every launch is a test's own; the job files here write to `run` in it.
"""

import atexit
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from configs.load import load
from tests.preloaded import Child, Server
from trainer.lifecycle import StopRequest
from trainer.run import run

ROOT = Path(__file__).parent.parent.parent
TINY = Path(__file__).with_name("tiny.toml")
TEXT = Path(__file__).with_name("text.toml")
TIMEOUT_SECONDS = 300
REPORT = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
} | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """What is on stderr before torchrun's report on its failed ranks, which repeats it."""
        return self.err.partition(REPORT)[0]

    @property
    def root_cause(self) -> str:
        """What torchrun's report ends in: why the first rank failed."""
        return self.err.partition("Root Cause (first observed failure):")[2].partition("traceback : ")[2]


def start(
    folder: Path,
    words: str = "",
    ranks: int = 0,
    config: Path = TINY,
    env: dict[str, str] | None = None,
    program: Path = ROOT / "train.py",
) -> subprocess.Popen:
    """Start a job in `folder` and return at once.

    Args:
        words: further words of the command line, as one would type them.
        ranks: under torchrun, so many; 0: plain `python train.py`.
        program: what is started; another one may prepare something and call `train.main`.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *torchrun, str(program), "--config", str(config), *shlex.split(words)]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=ENVIRONMENT | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> Outcome:
    """Wait for a started job; one that hangs is killed with its ranks, and the test fails."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Outcome(process.returncode, out, err)


def launch(
    folder: Path,
    words: str = "",
    ranks: int = 0,
    config: Path = TINY,
    env: dict[str, str] | None = None,
    expect: int = 0,
    program: Path = ROOT / "train.py",
    preloaded: bool = True,
) -> Outcome:
    """Run a job to its end; it must exit with `expect`. See `start`; another program, or one that is to import torch
    itself, is not preloaded."""
    is_preloaded = program == ROOT / "train.py" and preloaded
    run_it = _run_preloaded if is_preloaded else lambda *job: finish(start(*job, program))
    outcome = run_it(folder, words, ranks, config, env)
    assert outcome.code == expect, f"exit {outcome.code} instead of {expect}:\n{outcome.out}\n{outcome.err}"
    return outcome


@cache
def _server() -> Server:
    server = Server(Path(tempfile.mkdtemp(prefix="preloaded-"))).__enter__()
    atexit.register(server.__exit__)
    return server


def keel(folder: Path, *words: str, env: dict[str, str] | None = None) -> Outcome:
    """Run the command `keel` in `folder` to its end."""
    return run_script(folder, "keel.py", *words, env=env)


def run_script(folder: Path, name: str, *words: str, env: dict[str, str] | None = None) -> Outcome:
    """Run a file of scripts/ in `folder` to its end."""
    command, environment = [str(ROOT / "scripts" / name), *words], ENVIRONMENT | (env or {})
    with tempfile.TemporaryDirectory() as said:
        out, err = Path(said, "out"), Path(said, "err")
        return _ended(_server().start(command, folder, out, environment, err), out, err)


def _run_preloaded(folder: Path, words: str, ranks: int, config: Path, env: dict[str, str] | None) -> Outcome:
    server, words = _server(), f"--config {shlex.quote(str(config))} {words}"
    with tempfile.TemporaryDirectory() as said:
        out, err = Path(said, "out"), Path(said, "err")
        if ranks:
            options = f"--standalone --nproc-per-node {ranks}"
            child = server.torchrun(options, words, folder, out, environment=ENVIRONMENT | (env or {}), errors=err)
        else:
            command = ["train.py", *shlex.split(words)]
            child = server.start(command, folder, out, environment=ENVIRONMENT | (env or {}), errors=err)
        return _ended(child, out, err)


def _ended(child: Child, out: Path, err: Path) -> Outcome:
    code = child.wait(TIMEOUT_SECONDS)
    child.kill()
    assert code is not None, f"still running:\n{out.read_text()}\n{err.read_text()}"
    return Outcome(code, out.read_text(), err.read_text())


def launch_here(folder: Path, *words: str, config: Path = TINY) -> int:
    """A job as one process, in this one, which costs a tenth of a launch; returns its exit code."""
    quiet = ("--metrics.tensorboard", "false", "--job.output_dir", str(folder / "run"))
    assert "RANK" not in os.environ
    try:
        return run(load(str(config), (*quiet, *words), 1), StopRequest())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ------------------------------------------------------------------- the run folder


def records(run: Path) -> list[dict[str, Any]]:
    """The objects of metrics.jsonl, which must be strict JSON, one a line."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (run / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def curve(run: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every logged step."""
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records(run)]


def status(run: Path) -> dict[str, Any]:
    """status.json."""
    return json.loads((run / "status.json").read_text())


def tensors(run: Path, step: int = 20) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, as torch's own converter reads them."""
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    whole = run.parent / f"{run.name}-{step}.pt"
    dcp_to_torch_save(checkpoint, whole)
    return torch.load(whole)


def assert_same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Assert that two states are equal bit for bit."""
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"{len(different)} of {len(a)} tensors differ, such as {different[:5]}"


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content, to see what a launch has changed."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
