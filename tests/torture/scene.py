"""A run in which a fault is planted, and what comes of it: what the run says, how soon, and how it ends."""

import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint.manifest import steps_in
from tests.preloaded import FIRST, Child, Server, state

TINY = Path(__file__).parents[1] / "end_to_end" / "tiny.toml"
TEXT = TINY.with_name("text.toml")
PATIENCE_SECONDS = 180
AT = 12
"""Steps done before the fault."""
STEPS = 40
JOB = (
    f"--lr_schedule.total_steps {STEPS} --checkpoint.interval 5 --metrics.tensorboard false"
    " --job.timeout_seconds 8 --training.max_skipped_steps 3"
)
PLANTED = "PLANTED"
"""Environment variable: the file that a planted fault leaves as it happens."""


@dataclass
class Scene:
    """A run in which a fault is planted."""

    server: Server
    folder: Path
    launches: list[list[Child]] = field(default_factory=list)
    undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "run"

    def ranks(self) -> dict[int, int]:
        """Process ids."""
        return self.server.ranks()

    def said(self) -> str:
        """What was printed, and the reason in status.json."""
        texts = [path.read_text(errors="replace") for path in sorted(self.folder.glob("*.out"))]
        return "\n".join([*texts, self.status().get("reason", "")])

    def status(self) -> dict[str, Any]:
        """status.json; empty if there is none."""
        try:
            return json.loads((self.run / "status.json").read_text())
        except (OSError, ValueError):
            return {}

    def step(self) -> int:
        """The last that is logged."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return json.loads((self.run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        return 0


Act = Callable[[Scene], None]


@dataclass(frozen=True)
class Fault:
    """One row."""

    name: str
    expects: str
    """Pattern of what the run should say (regular expression; a dot is any character, line ends included)."""
    ends: str = "failed"
    """state in status.json at the end; several: "failed|running"."""
    act: Act | None = None
    """What is done from outside, when AT steps are done."""
    plant: str = ""
    """Name of the function in `planted.py` that each rank calls first."""
    first: str | None = None
    """Further words of a launch before the one with the fault, which goes to AT steps; None: there is none."""
    words: str = ""
    torchrun: bool = False
    text: bool = False
    """Trains on token files in `data`, relative to the current folder."""
    lost: int = 10
    """Steps that may be lost."""
    quick: bool = False
    goes_on: bool = False
    """Whether the run that has the folder goes on after what is said, until it is stopped."""
    prepare: Act | None = None
    """What is done before the launch."""


@dataclass(frozen=True)
class Result:
    """What came of a fault."""

    fault: Fault
    said: str
    """The line that matches, or the last one."""
    seconds: float | None
    """From the fault to the words; None if they were not said."""
    ended: float
    """From the fault to the end of the last rank."""
    state: str
    lost: int
    traceback: bool
    """Whether one was printed; torchrun prints its own."""

    @property
    def holds(self) -> bool:
        """Whether all is as expected."""
        said = self.seconds is not None and not (self.traceback and not self.fault.torchrun)
        return said and self.state in self.fault.ends.split("|") and self.lost <= self.fault.lost

    def __str__(self) -> str:
        soon = "-" if self.seconds is None else f"{self.seconds:.1f} s"
        said = self.said.replace("|", "\\|")[:160]
        cells = [self.fault.name, said, soon, f"{self.ended:.1f} s", self.state or "none", self.lost]
        cells += ["yes" if self.traceback else "no"]
        return f"| {' | '.join(map(str, cells))} | {'as expected' if self.holds else 'NOT AS EXPECTED'} |"


def prepare_text(server: Server, folder: Path, modules: str) -> None:
    """Make a small corpus of modules of the standard library, and its token files by a run of one step."""
    (folder / "text").mkdir(parents=True)
    for path in Path(os.__file__).parent.glob(modules):
        shutil.copy(path, folder / "text")
    words = f"--config {TEXT} --job.output_dir {folder}/prepared --training.steps 1 --metrics.tensorboard false"
    (child,) = server.start_ranks(1, words, folder, folder / "prepare.log")
    assert child.wait(PATIENCE_SECONDS) == 0, (folder / "prepare.log").read_text()


def launch(scene: Scene, fault: Fault, name: str, steps: int) -> None:
    """Start a launch of a row; only the one called "run" has the fault inside."""
    further = f"--training.steps {steps} {(fault.first or '') if name == 'first' else fault.words}"
    words = f"--config {TEXT if fault.text else TINY} --job.output_dir {scene.run} {_merged(JOB, further)}"
    environment = {PLANTED: str(scene.folder / "planted")}
    if fault.plant and name == "run":
        environment[FIRST] = f"tests.torture.planted:{fault.plant}"
    here, output = scene.folder / "here", scene.folder / f"{name}.out"
    if fault.torchrun:
        children = [scene.server.torchrun("--standalone --nproc-per-node 2", words, here, output, environment)]
    else:
        children = scene.server.start_ranks(2, words, here, output, environment)
    scene.launches.append(children)


def _merged(words: str, further: str) -> str:
    """Keys and values, of which the later count: a command line may not have a key twice."""
    settings: dict[str, str] = {}
    for each in (words.split(), further.split()):
        settings |= dict(zip(each[::2], each[1::2], strict=True))
    return " ".join(f"{key} {value}" for key, value in settings.items())


def torture(server: Server, fault: Fault, folder: Path) -> Result:
    """Plant one fault, and see."""
    scene = Scene(server, folder)
    (folder / "here").mkdir(parents=True)
    try:
        if fault.text:
            shutil.rmtree(folder / "here")
            prepare_text(server, folder / "here", "[a-c]*.py")
        if fault.first is not None:
            launch(scene, fault, "first", AT)
            _wait(scene, lambda: _have_ended(scene))
        if fault.prepare:
            fault.prepare(scene)
        launch(scene, fault, "run", 10 * STEPS if fault.act and not fault.plant else STEPS)
        return _watch(scene, fault)
    finally:
        for pid in server.ranks().values():
            os.kill(pid, signal.SIGKILL)
        for children in scene.launches:
            for child in children:
                child.kill()
        for undo in reversed(scene.undo):
            undo()


def _watch(scene: Scene, fault: Fault) -> Result:
    """Wait until AT steps are done, act, and wait for the words and the end."""
    planted = scene.folder / "planted"
    if fault.act:
        _wait(scene, lambda: scene.step() >= AT or planted.exists() or _have_ended(scene))
    reached = scene.step()
    begun = time.monotonic()
    if fault.act:
        assert not _have_ended(scene), f"ended before its fault: {scene.said()[-2000:]}"
        fault.act(scene)
    elif fault.plant:
        _wait(scene, lambda: planted.exists() or _have_ended(scene))
        begun, reached = time.monotonic(), max(reached, scene.step())
    pattern, said_after = re.compile(fault.expects, re.DOTALL), None
    deadline = begun + PATIENCE_SECONDS
    while True:
        over = _have_ended(scene) or time.monotonic() > deadline
        if said_after is None and pattern.search(scene.said()):
            said_after = time.monotonic() - begun
        if said_after is not None and fault.goes_on:
            _stop(scene)
        if over:
            break
        _end_stopped(scene)
        time.sleep(0.05)
    ended = time.monotonic() - begun
    saved = scene.run / "checkpoints"
    newest = max(steps_in(saved), default=0) if saved.is_dir() else 0
    how = "hangs" if not _have_ended(scene) else scene.status().get("state", "")
    said = scene.said()
    traceback = "Traceback (most recent call last)" in said
    return Result(fault, _line(said, pattern), said_after, ended, how, max(0, reached - newest), traceback)


def _end_stopped(scene: Scene) -> None:
    """A stopped rank does not end by itself, and has no torchrun that would end it with the others."""
    running = [child.pid for children in scene.launches for child in children if child.poll() is None]
    left = {pid: state(pid) for pid in running}
    if left and set(left.values()) == {"T"}:
        for pid in left:
            os.kill(pid, signal.SIGKILL)


def _stop(scene: Scene) -> None:
    """Have a run that goes on come to its end soon."""
    for pid in scene.ranks().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _line(said: str, pattern: re.Pattern) -> str:
    """The line in which the pattern ends, or else the last one."""
    if match := pattern.search(said):
        start = said.rfind("\n", 0, match.end() - 1) + 1
        return said[start:].splitlines()[0].strip()
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "nothing")


def _have_ended(scene: Scene) -> bool:
    codes = [child.poll() for children in scene.launches for child in children]
    return None not in codes and not any(state(pid) not in ("", "Z") for pid in scene.ranks().values())


def _wait(scene: Scene, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"the run does not get so far: {scene.said()[-2000:]}"
        time.sleep(0.02)
