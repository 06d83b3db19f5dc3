"""Kill -9 at any moment: python -m tests.torture.kill --kills 100 [--seed 0] [--steps 150]

Two ranks train and save every few steps. They are killed again and again, mostly while a save is on its way, together
or one a little before the other; then it is checked that every checkpoint with a final name is whole, hash for hash,
and they are started again. A run that has come to its end must have the weights, the optimizer state and the curve of
the undisturbed run, bit for bit.

The ranks are forked off this process, which has imported torch and nothing more, so that a start costs no import.
"""

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint.manifest import content_damage, read_manifest, step_folder, steps_in
from checkpoint.safe_read import read_metadata
from checkpoint.tensor_stream import read_tensor
from configs.load import load
from trainer.lifecycle import StopRequest
from trainer.run import run

JOB = Path(__file__).parents[1] / "end_to_end" / "tiny.toml"
RANKS = 2
STEPS = 150
PATIENCE_SECONDS = 120
IN_SAVES = 0.7
"""Share of the kills that wait for a save to begin."""


@dataclass
class Report:
    """What has happened so far."""

    kills: int = 0
    in_saves: int = 0
    """Kills that left an unfinished checkpoint behind."""
    runs: int = 0
    """Runs that came to their end and were equal to the undisturbed one."""
    checked: int = 0
    """Checkpoints that were found whole after a kill."""

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.in_saves} of them in a save; {self.checked} times a checkpoint was looked at, "
            f"each was whole; {self.runs} runs came to the end, bit for bit like the undisturbed one"
        )


def torture(folder: Path, kills: int, seed: int = 0, steps: int = STEPS) -> Report:
    """Kill at least `kills` times, and then bring the run to its end; raises AssertionError if anything is lost."""
    dice, report = random.Random(seed), Report()
    assert finish(start(folder / "undisturbed", steps)) == [0] * RANKS
    while report.kills < kills:
        target = folder / f"run-{report.runs}"
        while not train_and_kill(target, dice, report, steps, may_end=report.kills >= kills):
            report.checked += check_all(target / "checkpoints")
        assert_equal(target, folder / "undisturbed", steps)
        report.runs += 1
    return report


def train_and_kill(folder: Path, dice: random.Random, report: Report, steps: int, may_end: bool) -> bool:
    """Start (or go on), and kill at some moment; returns whether the run has come to its end before."""
    processes = start(folder, steps)
    if may_end:
        assert finish(processes) == [0] * RANKS
        return True
    codes = wait_for_a_moment(folder / "checkpoints", processes, dice)
    assert set(codes.values()) <= {0}, f"{codes} before a kill: see {folder}.*.out"
    victims = dice.sample(processes, RANKS)
    for pid in victims:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            time.sleep(dice.choice([0, 0, 0.02]))  # torchrun ends the others a little later
    codes |= {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in processes if pid not in codes}
    if set(codes.values()) == {0}:
        return True
    assert set(codes.values()) <= {0, 1, -signal.SIGKILL}, codes  # 1: the other rank was killed, and this one saw it
    report.kills += 1
    report.in_saves += bool(list((folder / "checkpoints").glob("step-*.tmp")))
    return False


def wait_for_a_moment(checkpoints: Path, processes: list[int], dice: random.Random) -> dict[int, int]:
    """Wait until training has begun, and then for some time or for a save; returns the exit codes of who has ended."""
    status = checkpoints.parent / "status.json"
    begun = status.stat().st_mtime_ns if status.exists() else 0
    wants_save, n_saves = dice.random() < IN_SAVES, dice.randint(1, 4)
    deadline = time.monotonic() + PATIENCE_SECONDS
    moment, seen = None, set()
    while moment is None or time.monotonic() < moment:
        assert time.monotonic() < deadline, "the run hangs"
        ended = {pid: os.waitstatus_to_exitcode(code) for pid, code in map(_poll, processes) if pid}
        if ended:
            return ended
        seen |= {path.name for path in checkpoints.glob("step-*.tmp") if path.is_dir()}
        if moment is None and (len(seen) >= n_saves if wants_save else _changed(status, begun)):
            moment = time.monotonic() + (dice.uniform(0, 0.03) if wants_save else dice.uniform(0, 2))
        time.sleep(0.0005)
    return {}


def start(folder: Path, steps: int) -> list[int]:
    """Fork the ranks of a run; returns their process ids."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            _be_a_rank(folder, steps, rank, port)
        processes.append(pid)
    return processes


def finish(processes: list[int]) -> list[int]:
    """Wait for the ranks to end by themselves; returns their exit codes."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in processes]


def check_all(checkpoints: Path) -> int:
    """Read every checkpoint with a final name, all of it; returns how many there are."""
    steps = steps_in(checkpoints)
    for step in steps:
        folder = step_folder(checkpoints, step)
        manifest = read_manifest(folder)
        read_metadata(folder)
        damages = [content_damage(folder, name, entry) for name, entry in manifest.files.items()]
        assert not any(damages), damages
    return len(steps)


def assert_equal(folder: Path, undisturbed: Path, steps: int) -> None:
    """Assert that two runs have learned the same: all tensors of the last checkpoint, and the curve of all steps."""
    a, b = (step_folder(run_folder / "checkpoints", steps) for run_folder in (folder, undisturbed))
    metadata = [read_metadata(checkpoint) for checkpoint in (a, b)]
    names = [set(each.state_dict_metadata) for each in metadata]
    assert names[0] == names[1]
    for name in names[0]:
        assert torch.equal(read_tensor(a, metadata[0], name), read_tensor(b, metadata[1], name)), name
    assert curve(folder) == curve(undisturbed)


def curve(folder: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every step."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def _be_a_rank(folder: Path, steps: int, rank: int, port: int) -> None:
    """Train; never returns."""
    code = 1
    try:
        os.setsid()
        out = os.open(f"{folder}.{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in world.items()})
        torch.set_num_threads(1)
        settings = {
            "job.output_dir": folder,
            "training.steps": steps,
            "lr_schedule.total_steps": steps,
            "checkpoint.interval": 3,
            "checkpoint.keep_last": 3,
            "checkpoint.keep_every": 30,
            "metrics.tensorboard": "false",
        }
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        code = run(load(str(JOB), words, RANKS), StopRequest())
    finally:
        sys.stdout.flush()
        os._exit(code)


def _poll(pid: int) -> tuple[int, int]:
    return os.waitpid(pid, os.WNOHANG)


def _changed(path: Path, since: int) -> bool:
    return path.exists() and path.stat().st_mtime_ns > since


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill a run of two ranks again and again.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run (default: %(default)s)")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = torture(Path(folder), options.kills, options.seed, options.steps)
    print(f"{report} ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
