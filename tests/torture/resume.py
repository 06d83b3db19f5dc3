"""A run that was stopped and taken up twice, against the one that was not: python -m tests.torture.resume [--rows P]

Every way of spreading a run over ranks, eager and compiled, with each kind of activation checkpointing. On the same
mesh nothing may differ: not a bit of a loss, a gradient norm, a weight or the optimizer's state. Each launch builds
the whole trainer anew and goes on from what the last one left on the disk, in mixed precision, with steps that
accumulate. The launches share processes, so that a row costs no import of torch; of compiled code they share nothing.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint.compare import compare
from checkpoint.manifest import step_folder
from configs.load import load
from scripts.rank_pool import RankPool
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.opening import Runtime
from trainer.report.console import Console
from trainer.report.metrics import TimeLedger
from trainer.trainer import Trainer

JOB = Path(__file__).parents[1] / "end_to_end" / "tiny.toml"
STOPS = (2, 4, 6)
"""The step at which each launch ends; the undisturbed run goes to the last at once."""
EXPERTS = "--model.n_experts 4 --model.experts_per_token 2 --model.router.load_balance bias"
MESHES = {
    "FSDP 2": "--mesh.dp_shard 2",
    "TP 2": "--mesh.tp 2",
    "PP 2": "--mesh.pp 2",
    "CP 2": "--mesh.cp 2",
    "owner 2": "--mesh.dp_replicate 2 --mesh.dp_shard 1 --fsdp.partition owner",
    "experts, FSDP 2": EXPERTS,
    "experts, EP 2": f"{EXPERTS} --mesh.ep 2",
}
MIXED = "--training.compute_dtype bfloat16 --training.reduce_dtype float32"
QUIET = "--metrics.tensorboard false --lr_schedule.total_steps 6"
Pool = Callable[..., list]
"""`RankPool.run`."""


@dataclass(frozen=True)
class Row:
    """One way to train."""

    name: str
    words: tuple[str, ...]
    """Of the command line."""
    ranks: int = 2


def table() -> Iterator[Row]:
    """All rows."""
    modes = ("none", "full", "selective")
    for compiled, (mesh, words), mode in itertools.product((False, True), MESHES.items(), modes):
        machine = f"--activation_checkpoint.mode {mode} --compile.enable {str(compiled).lower()}"
        name = f"{mesh}, {mode}, {'compiled' if compiled else 'eager'}"
        yield Row(name, tuple(f"{words} {machine} {MIXED} {QUIET}".split()))


def go_on(folder: str, last_step: int, words: tuple[str, ...]) -> None:
    """Train the run in `folder` up to `last_step`, as a launch of its own would; on every rank."""
    torch._dynamo.reset()
    settings = ("--job.output_dir", folder, "--training.steps", str(last_step))
    job = load(str(JOB), (*words, *settings), dist.get_world_size())
    Path(folder).mkdir(parents=True, exist_ok=True)
    # A console that says nothing.
    with Console(rank=1) as console, closing(Watchdog(Path(folder), 600, print)) as watchdog:
        runtime = Runtime(job, torch.device("cpu"), console, StopRequest(), TimeLedger(), watchdog)
        assert Trainer(runtime).train() == "done"


def torture(run: Pool, row: Row, folder: Path) -> None:
    """Train a row both ways. Raises: AssertionError, which says what differs."""
    undisturbed, stopped = folder / "undisturbed", folder / "stopped"
    run(row.ranks, go_on, str(undisturbed), STOPS[-1], row.words)
    for step in STOPS:
        run(row.ranks, go_on, str(stopped), step, row.words)
    expected, found = curve(undisturbed), curve(stopped)
    assert len(expected) == STOPS[-1]
    assert found == expected, f"{row.name}: {found} instead of {expected}"
    ends = (step_folder(path / "checkpoints", STOPS[-1]) for path in (stopped, undisturbed))
    assert not (differences := list(compare(*ends))), f"{row.name}: {differences}"


def curve(folder: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every step."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def main() -> int:
    """The command line; returns the number of rows that failed (at most 1)."""
    parser = argparse.ArgumentParser(description="Stop and resume a run on every mesh.")
    parser.add_argument("--rows", default="*", help='shell pattern of row names, e.g. "TP 2*eager"')
    rows = [row for row in table() if fnmatchcase(row.name, parser.parse_args().rows)]
    pool, failed, started = RankPool(size=2), 0, time.monotonic()
    for row in rows:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                torture(pool.run, row, Path(folder))
                told = "bit for bit"
            except AssertionError as error:
                failed, told = failed + 1, f"FAILS: {error}"
        print(f"{row.name:28} {told} ({time.monotonic() - begun:.1f} s)", flush=True)
    pool.close()
    print(f"{len(rows) - failed} of {len(rows)} rows bit for bit ({time.monotonic() - started:.0f} s)")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
