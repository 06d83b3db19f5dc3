"""A run lives through hours of trouble: python -m tests.soak --minutes 10 [--seed 0] [--meshes "FSDP*"] [--steps 600]

On one mesh after the other a tiny job is trained twice. Once undisturbed: a single launch of many steps, watched for
what grows (memory, threads, file handles, child processes). Then the same again, with signals at random moments
(SIGTERM, SIGINT, SIGUSR1 to one rank or to all; kill -9 of one, of all, of torchrun) and a launch after each: the curve
and the last checkpoint must be those of the undisturbed run, bit for bit. Every third run computes in float64 and goes
on from each stop on another mesh with another number of ranks; its bound is MOVED.

Every second run is at default settings, as far as they have an effect: a save in the background every 500 steps, the
order of collectives compared every 100 of a launch. The others save, validate, export, remove old checkpoints and
compare that order all the time, at intervals that meet. Ranks are real processes that get real signals; they are forked
off one that has imported torch (tests/preloaded.py), and a third of the launches go through a real torchrun.

A line for each launch, a table at the end; the exit code is 1 if anything was not as it should be. The seed decides
meshes, stops and their steps; what is left to chance is time.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from checkpoint.compare import compare
from checkpoint.index import read_metadata
from checkpoint.manifest import step_folder, steps_in
from checkpoint.tensor_stream import read_tensor
from tests.preloaded import Child, Server, children, state
from tests.torture.kill import check_all, curve, left_behind

TINY = Path(__file__).parent / "end_to_end" / "tiny.toml"
JOB = f"""
base = "{TINY}"

[[validation.sources]]
name = "held out"
kind = "synthetic"

[job]
name = "soak"
timeout_seconds = 120
"""
PATIENCE_SECONDS = 300
"""What hangs longer than this is an error."""
SLOWEST_STOP_SECONDS = 60
"""So long may a stop take on a busy machine; what waits for a time-out takes job.timeout_seconds."""
MOVED = 1e-10
"""Largest relative difference of a loss, a gradient norm or a tensor in float64, after changes of the mesh."""
FLOAT64 = "--training.dtype float64 --training.compute_dtype float64 --training.reduce_dtype float64"
CALM = "--optimizer.lr 1e-3 --optimizer.eps 1e-4"
"""At the tiny job's own rates training is chaotic: round-off of 1e-16 between two meshes is 1e-8 by step 150 and 4e-4
by step 300. With these it is 2e-16 at step 300."""
MOVING_STEPS = 300
"""Of a run that changes its mesh; a longer one would amplify differences of the last bit beyond MOVED."""
BUSY = (
    "--checkpoint.interval 20 --comm.order_guard_interval 10 --validation.interval 30 --validation.sequences 8"
    " --checkpoint.keep_last 3 --checkpoint.keep_every 200"
)
COMMAND = """--checkpoint.after_save '[{name="copy", command="cp -r {checkpoint} {output}", every=40}]'"""
EXPERTS = "--model.n_experts 4 --model.experts_per_token 2"
RESTING_SHARE = 0.3
"""Of the samples of a launch at its beginning that count as warm-up."""
ALLOWED = {"MiB": 12.0, "threads": 1.0, "handles": 2.0, "children": 0.0}
"""Growth from a launch's second third to its last that is not an error (allocators take memory by the arena)."""


@dataclass(frozen=True)
class Mesh:
    """A way of spreading a job over ranks."""

    name: str
    ranks: int
    words: str = ""
    experts: bool = False


MESHES = (
    Mesh("FSDP 2", 2),
    Mesh("1 rank", 1),
    Mesh("TP 2", 2, "--mesh.tp 2"),
    Mesh("FSDP 2 x TP 2", 4, "--mesh.tp 2"),
    Mesh("EP 2, experts", 2, "--mesh.ep 2", experts=True),
    Mesh("PP 2", 2, "--mesh.pp 2"),
    Mesh("CP 2", 2, "--mesh.cp 2"),
    Mesh("HSDP 2 x 2", 4, "--mesh.dp_replicate 2"),
    Mesh("owner 2", 2, "--mesh.dp_replicate 2 --mesh.dp_shard 1 --fsdp.partition owner"),
)


@dataclass(frozen=True)
class Stop:
    """What ends a launch."""

    name: str
    number: signal.Signals | None
    to: str
    """one rank, all ranks, or torchrun."""
    weight: int


STOPS = (
    Stop("SIGTERM to one rank", signal.SIGTERM, "one", 3),
    Stop("SIGTERM to all", signal.SIGTERM, "all", 3),
    Stop("SIGINT to all", signal.SIGINT, "all", 2),
    Stop("SIGUSR1 to one rank", signal.SIGUSR1, "one", 2),
    Stop("SIGTERM to torchrun", signal.SIGTERM, "torchrun", 2),
    Stop("kill -9 of one rank", signal.SIGKILL, "one", 3),
    Stop("kill -9 of all", signal.SIGKILL, "all", 2),
    Stop("kill -9 of torchrun", signal.SIGKILL, "torchrun", 1),
)


@dataclass
class Run:
    """One run with its undisturbed counterpart, and what has become of them."""

    name: str
    meshes: tuple[Mesh, ...]
    words: str
    steps: int
    interval: int
    """Steps between checkpoints: what a kill may cost."""
    launches: int = 0
    trained: int = 0
    """Steps, those trained again after a kill included."""
    stops: int = 0
    kills: int = 0
    resumes: int = 0
    slowest_stop: float = 0.0
    """Seconds from a signal to the end of the last rank."""
    growth: dict[str, float] = field(default_factory=dict)
    difference: float = 0.0
    compared: int = 0
    """Steps whose loss and gradient norm were compared."""
    problems: list[str] = field(default_factory=list)

    @property
    def moves(self) -> bool:
        """Whether it changes its mesh."""
        return len(self.meshes) > 1


# --------------------------------------------------------------------------- what grows


@dataclass
class Sample:
    """What a launch held at a moment: of the rank that held most."""

    step: int
    held: dict[str, float]


def sample(pids: list[int], step: int) -> Sample | None:
    """Look at living ranks; None if one has ended."""
    held: dict[str, float] = dict.fromkeys(ALLOWED, 0.0)
    try:
        for pid in pids:
            status = Path(f"/proc/{pid}/status").read_text()
            now = {
                "MiB": int(status.split("VmRSS:")[1].split()[0]) / 1024,
                "threads": float(status.split("Threads:")[1].split()[0]),
                "handles": float(len(os.listdir(f"/proc/{pid}/fd"))),
                "children": float(len(children(pid))),
            }
            held = {what: max(most, now[what]) for what, most in held.items()}
    except (OSError, IndexError):
        return None
    return Sample(step, held)


def growth(samples: list[Sample]) -> dict[str, float]:
    """By how much the last third exceeds the second, after the warm-up; empty: too short.

    Memory is compared by its medians. What is counted is compared by the least that was held: a command beside the
    training holds a child and its handles as long as it runs, which on a busy machine may be half of the time, and what
    leaks is held at every moment.
    """
    samples = samples[int(len(samples) * RESTING_SHARE) :]
    if len(samples) < 6:
        return {}
    half = len(samples) // 2
    grown = {}
    for what in ALLOWED:
        rests = statistics.median if what == "MiB" else min
        grown[what] = rests(s.held[what] for s in samples[half:]) - rests(s.held[what] for s in samples[:half])
    return grown


# --------------------------------------------------------------------------- one launch


class Soak:
    """All runs of one seed."""

    def __init__(self, folder: Path, server: Server, seed: int, deadline: float) -> None:
        self.folder, self.server, self.deadline = folder, server, deadline
        self.dice, self.begun = random.Random(seed), time.monotonic()
        self.job = folder / "soak.toml"
        self.job.write_text(JOB)

    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline

    def undisturbed(self, run: Run, folder: Path) -> None:
        """One launch to the end, watched."""
        launch = Launch(self, run, run.meshes[0], folder, through_torchrun=False)
        launch.watch(until_step=None)
        run.growth = growth(launch.samples)
        grown = {what: by for what, by in run.growth.items() if by > ALLOWED[what]}
        if grown:
            run.problems.append(f"grows: {grown} over {launch.samples[-1].step} steps")
        if not self.over():
            launch.expect({0}, "done")
        self.say(run, launch, "undisturbed")

    def disturbed(self, run: Run, folder: Path) -> None:
        """Launches and stops until the run has come to its end, or the time is up."""
        while not run.problems and not (self.over() and run.launches > 1):
            mesh = self.dice.choice(run.meshes)
            stop = self.dice.choices(STOPS, [stop.weight for stop in STOPS])[0]
            through = stop.to == "torchrun" or self.dice.random() < 0.25
            before = newest(folder)
            steps = 1 + int(self.dice.expovariate(4 / run.steps))
            launch = Launch(self, run, mesh, folder, through)
            run.resumes += before > 0
            if launch.watch(until_step=before + steps):
                self._stop(run, launch, stop)
                self._compare(run, folder)
            else:
                launch.expect({0}, "done")
                self.say(run, launch, "came to its end")
                return

    def _stop(self, run: Run, launch: "Launch", stop: Stop) -> None:
        time.sleep(self.dice.uniform(0, 0.05))
        assert stop.number is not None
        signalled, reached = time.monotonic(), last_step(launch.folder)
        launch.signal(stop, self.dice)
        killed = stop.number == signal.SIGKILL
        if killed and stop.to == "torchrun":  # its ranks go on without it, and stop as others do
            launch.wait_for_torchrun()
            launch.signal(Stop("", signal.SIGTERM, "all", 0), self.dice)
            killed = False
        launch.wait()
        seconds = time.monotonic() - signalled
        run.slowest_stop = max(run.slowest_stop, seconds)
        if seconds > SLOWEST_STOP_SECONDS:
            run.problems.append(f"{stop.name}: it took {seconds:.0f} s to stop: {launch.told()}")
        run.kills, run.stops = run.kills + (stop.number == signal.SIGKILL), run.stops + 1
        if killed:
            launch.expect({-9, 1, 0, 75}, None)
            lost = max(reached, launch.first_step) - newest(launch.folder)
            if lost > 2 * run.interval + 2:  # the last save may have been on its way
                run.problems.append(f"{stop.name} at step {reached} cost {lost} steps")
        else:
            launch.expect({0, 75} if not launch.torchrun else {0, 1, -9}, "preempted")
            if newest(launch.folder) != last_step(launch.folder):
                run.problems.append(f"{stop.name}: step {last_step(launch.folder)} is not in a checkpoint")
        check_all(launch.folder / "checkpoints")
        self.say(run, launch, f"{stop.name}, ended in {seconds:.1f} s")

    def _compare(self, run: Run, folder: Path, to_the_end: bool = False) -> None:
        """With the undisturbed run, as far as both have come."""
        undisturbed = folder.with_name(f"{folder.name}-undisturbed")
        expected = {step: values for step, *values in curve(undisturbed)}
        found = curve(folder)
        run.compared = len(found)
        if [step for step, *_ in found] != list(range(1, len(found) + 1)):
            run.problems.append(f"the curve has steps {[step for step, *_ in found][:10]} ...")
        for step, *values in found:
            if step in expected:
                gap = max(abs(a - b) / abs(b) for a, b in zip(values, expected[step], strict=True))
                run.difference = max(run.difference, gap)
        if to_the_end:
            run.difference = max(run.difference, tensor_gap(folder, undisturbed, run))
        if not run.difference <= (MOVED if run.moves else 0.0):
            run.problems.append(f"differs from the undisturbed run by {run.difference:.3g}")

    def one(self, run: Run, number: int) -> None:
        """A whole run."""
        folder = self.folder / f"run-{number}"
        self.undisturbed(run, folder.with_name(f"{folder.name}-undisturbed"))
        if not run.problems and not self.over():
            self.disturbed(run, folder)
            ends = [newest(path) for path in (folder, folder.with_name(f"{folder.name}-undisturbed"))]
            if not run.problems:
                self._compare(run, folder, to_the_end=ends[0] == ends[1] > 0)
        for path in (folder, folder.with_name(f"{folder.name}-undisturbed")):
            unfinished = [p.name for name in ("checkpoints", "after_save/copy") for p in (path / name).glob("*.tmp")]
            if not run.problems and unfinished and path.exists() and status(path).get("state") == "done":
                run.problems.append(f"{path.name}: unfinished {unfinished}")
        if left := left_behind(self.server.temporary):
            run.problems.append(f"temporary files are left behind: {left}")
        if left := self.server.ranks():
            run.problems.append(f"ranks are left behind: {left}")
        for problem in run.problems:
            print(f"          PROBLEM in {run.name}: {problem}", flush=True)

    def say(self, run: Run, launch: "Launch", how: str) -> None:
        """A line about a launch that has ended."""
        held = launch.samples[-1].held if launch.samples else {}
        told = ", ".join(f"{value:.0f} {what}" for what, value in held.items() if what != "children")
        way = "torchrun" if launch.torchrun else "ranks"
        steps = f"steps {launch.first_step} to {last_step(launch.folder)}"
        print(
            f"[{time.monotonic() - self.begun:5.0f} s] {run.name}: {launch.mesh.name} ({way}), {steps}: {how}; {told}",
            flush=True,
        )


class Launch:
    """The ranks of one launch."""

    def __init__(self, soak: Soak, run: Run, mesh: Mesh, folder: Path, through_torchrun: bool) -> None:
        self.soak, self.run, self.mesh, self.folder = soak, run, mesh, folder
        self.first_step = newest(folder)
        self.samples: list[Sample] = []
        self.output = Path(f"{folder}.out")
        self.output.unlink(missing_ok=True)
        run.launches += 1
        words = f"--config {soak.job} --job.output_dir {folder} --training.steps {run.steps}"
        words += f" --lr_schedule.total_steps {run.steps} {run.words} {mesh.words}"
        words += f" {EXPERTS}" if mesh.experts else ""
        self.torchrun: Child | None = None
        self.ranks: dict[int, int] = {}
        self.children: list[Child] = []
        self.status_before = status(folder)
        if through_torchrun:
            options = f"--standalone --nproc-per-node {mesh.ranks} --signals-to-handle SIGTERM,SIGINT,SIGUSR1"
            self.torchrun = soak.server.torchrun(options, words, soak.folder, self.output)
            self.children = [self.torchrun]
        else:
            self.children = soak.server.start_ranks(mesh.ranks, words, soak.folder, self.output)

    def watch(self, until_step: int | None) -> bool:
        """Wait for the step, or for the end; returns whether any rank is left to be stopped."""
        next_sample = time.monotonic()
        step, changed = -1, time.monotonic()
        while self._alive():
            if until_step is None and self.soak.over():
                self.signal(Stop("", signal.SIGTERM, "all", 0), self.soak.dice)
                self.wait()
                return False
            if time.monotonic() >= next_sample:
                now = last_step(self.folder)
                if now != step:
                    step, changed = now, time.monotonic()
                assert time.monotonic() - changed < PATIENCE_SECONDS, f"hangs at step {step}: {self.told()}"
                next_sample = time.monotonic() + 0.25
                self._sample(step)
            is_ready = len(self._ranks()) == self.mesh.ranks and self._has_begun()
            if until_step is not None and is_ready and last_step(self.folder) >= until_step:
                return True
            time.sleep(0.02)
        self.wait()
        return False

    def _has_begun(self) -> bool:
        return status(self.folder).get("time", 0) > self.status_before.get("time", 0)

    def _sample(self, step: int) -> None:
        if step > self.first_step + 5 and (taken := sample(list(self._ranks().values()), step)):
            self.samples.append(taken)

    def _ranks(self) -> dict[int, int]:
        if len(self.ranks) < self.mesh.ranks:
            self.ranks = self.soak.server.ranks()
        return self.ranks

    def _alive(self) -> bool:
        return any(child.poll() is None for child in self.children)

    def signal(self, stop: Stop, dice: random.Random) -> None:
        """Send what stops it."""
        assert stop.number is not None
        if stop.to == "torchrun" and self.torchrun:
            self.torchrun.kill(stop.number)
            return
        pids = list(self._ranks().values())
        for pid in [dice.choice(pids)] if stop.to == "one" and pids else pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, stop.number)

    def wait_for_torchrun(self) -> None:
        """Until it has ended, and its ranks have had a moment to themselves."""
        assert self.torchrun is not None
        assert self.torchrun.wait(PATIENCE_SECONDS) is not None, "torchrun outlives kill -9"
        time.sleep(self.soak.dice.uniform(0, 1))

    def wait(self) -> None:
        """Until every process of it has ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._alive() or any(state(pid) not in ("", "Z") for pid in self.ranks.values()):
            assert time.monotonic() < deadline, f"does not end: {self.told()}"
            time.sleep(0.01)
        self.run.trained += max(0, last_step(self.folder) - self.first_step)

    def expect(self, codes: set[int], state_expected: str | None) -> None:
        """Note a problem where exit codes or status.json are others."""
        found, says = {child.code for child in self.children}, status(self.folder)
        is_done = says.get("state") == "done" and last_step(self.folder) >= self.run.steps
        if not found <= codes and not is_done:
            self.run.problems.append(f"exit codes {found}: {self.told()}")
        elif state_expected and says.get("state") not in (state_expected, "done"):
            self.run.problems.append(f"status.json says {says}: {self.told()}")

    def told(self) -> str:
        """The last that it has printed."""
        return self.output.read_text(errors="replace")[-3000:] if self.output.exists() else ""


# --------------------------------------------------------------------------- the run folder


def status(folder: Path) -> dict:
    """status.json; empty if there is none."""
    try:
        return json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return {}


def last_step(folder: Path) -> int:
    """The last step in metrics.jsonl."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            lines = file.read().split(b"\n")[:-1]
        return json.loads(lines[-1])["step"] if lines else 0
    except (OSError, ValueError, KeyError):
        return 0


def newest(folder: Path) -> int:
    """Step of the newest checkpoint; 0 if there is none."""
    return max(steps_in(folder / "checkpoints"), default=0) if (folder / "checkpoints").is_dir() else 0


def tensor_gap(folder: Path, undisturbed: Path, run: Run) -> float:
    """Largest relative difference (2-norm) of a tensor of the last checkpoints; inf where bits count and differ."""
    a, b = (step_folder(path / "checkpoints", newest(path)) for path in (folder, undisturbed))
    if not run.moves:
        return math.inf if list(compare(a, b)) else 0.0
    metadata, gap = [read_metadata(path) for path in (a, b)], 0.0
    for name in metadata[0].state_dict_metadata:
        found, expected = (read_tensor(path, each, name).double() for path, each in zip((a, b), metadata, strict=True))
        gap = max(gap, float((found - expected).norm() / expected.norm().clamp_min(1e-300)))
    return gap


# --------------------------------------------------------------------------- all


def runs(steps: int, pattern: str) -> Iterator[Run]:
    """Runs without end: each mesh at default settings and busy, and every third one on changing meshes."""
    meshes = [mesh for mesh in MESHES if fnmatchcase(mesh.name, pattern)]
    number = 0
    while True:
        for mesh in meshes:
            if number % 3 == 2 and len(meshes) > 1:
                moving = tuple(each for each in meshes if not each.experts)
                words = f"{BUSY} {FLOAT64} {CALM}"
                yield Run("changing meshes", moving, words, min(steps, MOVING_STEPS), 20)
            busy = number % 2 == 1
            words = f"{BUSY} {COMMAND}" if busy else ""
            yield Run(f"{mesh.name}{', busy' if busy else ''}", (mesh,), words, steps, 20 if busy else 500)
            number += 1
        number += len(meshes) % 2 == 0  # so that a mesh is busy in every second round


def table(done: list[Run]) -> str:
    """In markdown."""
    lines = [
        "| run | steps | launches | stops | kills | resumes | slowest stop | growth (MiB, threads, handles, children) "
        "| steps compared | largest difference | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in done:
        grown = ", ".join(f"{run.growth[what]:+.1f}" if run.growth else "too short" for what in ALLOWED)
        cells = [run.name, run.trained, run.launches, run.stops, run.kills, run.resumes, f"{run.slowest_stop:.1f} s"]
        cells += [grown if run.growth else "too short", run.compared, f"{run.difference:.2g}"]
        lines.append(f"| {' | '.join(map(str, cells))} | {'PROBLEM' if run.problems else 'ok'} |")
    total = [sum(getattr(run, what) for run in done) for what in ("trained", "launches", "stops", "kills", "resumes")]
    return "\n".join([*lines, f"| all {len(done)} | {' | '.join(map(str, total))} | | | | | |"])


def soak(folder: Path, minutes: float, seed: int, pattern: str, steps: int) -> list[Run]:
    """Run for so long, on meshes whose names match; returns what came of it."""
    done: list[Run] = []
    shared = set(os.listdir("/dev/shm"))
    with Server(folder / "tmp") as server:
        everything = Soak(folder, server, seed, time.monotonic() + 60 * minutes)
        for number, run in enumerate(runs(steps, pattern)):
            if everything.over():
                break
            done.append(run)
            try:
                everything.one(run, number)
            except AssertionError as error:
                run.problems.append(str(error))
                print(f"          PROBLEM in {run.name}: {error}", flush=True)
            if run.problems:
                break
    ours = [name for name in set(os.listdir("/dev/shm")) - shared if name.startswith("torch_")]
    if ours and done:
        done[-1].problems.append(f"left in /dev/shm: {ours}")
    return done


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Stop and resume tiny runs on many meshes, and look at what grows.")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--meshes", default="*", help=f"shell pattern, of: {', '.join(mesh.name for mesh in MESHES)}")
    parser.add_argument("--steps", type=int, help="of a run (default: 600, or 50 a minute where that is more)")
    options = parser.parse_args()
    if not any(fnmatchcase(mesh.name, options.meshes) for mesh in MESHES):
        parser.error(f"--meshes {options.meshes} matches none of: {', '.join(mesh.name for mesh in MESHES)}")
    torch.set_num_threads(1)
    steps = options.steps or max(600, round(50 * options.minutes))
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = soak(Path(folder), options.minutes, options.seed, options.meshes, steps)
        except KeyboardInterrupt:
            print("stopped", flush=True)
            return 1
    print(table(done))
    problems = [problem for run in done for problem in run.problems]
    print(f"{len(problems)} problems" if problems else "no difference, no growth, no problem")
    return min(len(problems), 1)


if __name__ == "__main__":
    sys.exit(main())
