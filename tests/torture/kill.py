"""Kill -9 at any moment: python -m tests.torture.kill --kills 100 [--torchrun] [--seed 0] [--steps 150]

Two ranks train, save every few steps and compare the order of their collectives at every one. They are killed again and
again, mostly while a save is on its way, together, one alone, or one a little before the other; then it is checked that
every checkpoint with a final name is whole, hash for hash, and they are started again: by this script, or with
`--torchrun` by one real torchrun with --max-restarts that lives through all of it. A run that has come to its end must
have the weights, the optimizer state and the curve of the undisturbed run, bit for bit.

The ranks are forked off a process that has imported torch (tests/preloaded.py): a start costs no import.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint.index import read_metadata
from checkpoint.manifest import content_damage, read_manifest, step_folder, steps_in
from checkpoint.tensor_stream import read_tensor
from tests.preloaded import Child, Server, state

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


def torture(
    folder: Path, kills: int, seed: int = 0, steps: int = STEPS, torchrun: bool = False, say: bool = False
) -> Report:
    """Kill at least `kills` times, and then bring the run to its end; raises AssertionError if anything is lost.

    say: print a line for every run that has come to its end.
    """
    dice, report, started = random.Random(seed), Report(), time.monotonic()
    live = train_under_torchrun if torchrun else train_by_hand
    with Server(folder / "tmp") as server:
        finish(start(server, folder / "undisturbed", steps), folder / "undisturbed")
        while report.kills < kills:
            target = folder / f"run-{report.runs}"
            live(server, target, dice, report, steps, kills)
            assert_equal(target, folder / "undisturbed", steps)
            report.runs += 1
            if say:
                print(f"[{time.monotonic() - started:5.0f} s] {report}", flush=True)
        assert not (left := left_behind(folder / "tmp")), left
    return report


# --------------------------------------------------------------------------- started again by hand


def train_by_hand(server: Server, folder: Path, dice: random.Random, report: Report, steps: int, kills: int) -> None:
    """Start, kill at some moment, check and start again, until the run has come to its end."""
    while report.kills < kills:
        children = start(server, folder, steps)
        if ended := wait_for_a_moment(folder, children, dice):
            assert {child.code for child in ended} == {0}, told(folder)
        victims = dice.sample(children, RANKS)
        for victim in victims:
            victim.kill()
            time.sleep(dice.choice([0, 0, 0.02]))  # torchrun ends the others a little later
        codes = {child.wait(PATIENCE_SECONDS) for child in children}
        if codes == {0}:
            return
        assert codes <= {0, 1, -signal.SIGKILL}, codes  # 1: the other rank was killed, and this one saw it
        note_kill(folder, report)
    finish(start(server, folder, steps), folder)


def note_kill(folder: Path, report: Report) -> None:
    """Count a kill, and read what it has left."""
    report.kills += 1
    report.in_saves += bool(list((folder / "checkpoints").glob("step-*.tmp")))
    report.checked += check_all(folder / "checkpoints")


# --------------------------------------------------------------------------- started again by torchrun


def train_under_torchrun(
    server: Server, folder: Path, dice: random.Random, report: Report, steps: int, kills: int
) -> None:
    """Start torchrun once, and kill ranks of it until it has brought the run to its end."""
    options = f"--standalone --nproc-per-node {RANKS} --max-restarts {10 * kills + 100} --monitor-interval 0.05"
    agent = server.torchrun(options, words(folder, steps), folder.parent, Path(f"{folder}.out"))
    while report.kills < kills:
        wait_until(lambda: len(server.ranks()) == RANKS or _has_ended(agent), "torchrun does not start the ranks again")
        ranks = server.ranks()
        if wait_for_a_moment(folder, [agent], dice):
            break
        killed = False
        for victim in dice.choice([[0], [1], [0, 1], [1, 0]]):
            killed |= victim in ranks and _kill(ranks[victim])
        wait_for_end(ranks.values())
        if killed and not _has_ended(agent):
            with stopped(agent):  # the next attempt would remove some of what is looked at
                note_kill(folder, report)
    assert agent.wait(PATIENCE_SECONDS) == 0, f"torchrun did not bring the run to its end: {told(folder)}"


@contextmanager
def stopped(process: Child) -> Iterator[None]:
    """A process does nothing meanwhile."""
    process.kill(signal.SIGSTOP)
    try:
        yield
    finally:
        process.kill(signal.SIGCONT)


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait, but not longer than PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.002)


def wait_for_end(pids: Iterable[int]) -> None:
    """Wait until none of these processes is alive."""
    pids = list(pids)
    wait_until(lambda: all(state(pid) in ("", "Z") for pid in pids), "a rank outlives the other")


def _has_ended(process: Child) -> bool:
    return process.poll() is not None


def _kill(pid: int) -> bool:
    """Kill -9; returns whether there was anybody."""
    if state(pid) in ("", "Z"):
        return False
    os.kill(pid, signal.SIGKILL)
    return True


# --------------------------------------------------------------------------- both


def words(folder: Path, steps: int) -> str:
    """The command line of the run in `folder`."""
    settings = {
        "config": JOB,
        "job.output_dir": folder,
        "training.steps": steps,
        "lr_schedule.total_steps": steps,
        "checkpoint.interval": 3,
        "checkpoint.keep_last": 3,
        "checkpoint.keep_every": 30,
        "comm.order_guard_interval": 1,  # so that it meets every save
        "metrics.tensorboard": "false",
    }
    return " ".join(f"--{key} {value}" for key, value in settings.items())


def start(server: Server, folder: Path, steps: int) -> list[Child]:
    """Start the ranks of a run."""
    return server.start_ranks(RANKS, words(folder, steps), folder.parent, Path(f"{folder}.out"))


def finish(children: list[Child], folder: Path) -> None:
    """Wait for the ranks of the run in `folder` to end by themselves."""
    codes = [child.wait(PATIENCE_SECONDS) for child in children]
    assert codes == [0] * RANKS, f"{codes}: {told(folder)}"


def told(folder: Path) -> str:
    """The last that the ranks of a run have printed."""
    return Path(f"{folder}.out").read_text()[-3000:]


def wait_for_a_moment(folder: Path, processes: Iterable[Child], dice: random.Random) -> list[Child]:
    """Wait until training has begun, and then for some time or for a save; returns which of `processes` have ended."""
    checkpoints, status = folder / "checkpoints", folder / "status.json"
    begun = status.stat().st_mtime_ns if status.exists() else 0
    wants_save, n_saves = dice.random() < IN_SAVES, dice.randint(1, 4)
    deadline = time.monotonic() + PATIENCE_SECONDS
    moment, seen = None, set()
    while moment is None or time.monotonic() < moment:
        assert time.monotonic() < deadline, "the run hangs"
        if ended := [process for process in processes if _has_ended(process)]:
            return ended
        with suppress(FileNotFoundError):  # a launch of a run in a bucket deletes the folder and creates it again
            seen |= {path.name for path in checkpoints.glob("step-*.tmp") if path.is_dir()}
        if moment is None and (len(seen) >= n_saves if wants_save else _changed(status, begun)):
            moment = time.monotonic() + (dice.uniform(0, 0.03) if wants_save else dice.uniform(0, 2))
        time.sleep(0.0005)
    return []


def left_behind(temporary: Path) -> list[str]:
    """Temporary files that are there although all processes have ended, but for torch's own folders."""
    return [path.name for path in temporary.iterdir() if not path.name.startswith(("torchelastic_", "torchinductor_"))]


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


def _changed(path: Path, since: int) -> bool:
    return path.exists() and path.stat().st_mtime_ns > since


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill a run of two ranks again and again.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run (default: %(default)s)")
    parser.add_argument("--torchrun", action="store_true", help="torchrun --max-restarts starts the ranks again")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = torture(Path(folder), options.kills, options.seed, options.steps, options.torchrun, say=True)
    print(f"{report} ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
