"""Faults planted in real runs: python -m tests.torture.faults [--rows "kill*"] [--quick]

Each row trains the tiny job on two ranks, plants one fault at a known step, and looks at what the run says of it: on
the console or in status.json, how soon, how it ends, and how many steps are lost. What it should say is a pattern. The
table that comes out is markdown; the exit code is the number of rows that are not as expected (at most 1).

Faults from outside are real: signals, files, mounts, a network that goes down. Those inside a rank (a value that is
not finite, a flipped bit, a slow step) are planted by a function that the rank calls before `train.main`.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from checkpoint.manifest import step_folder, steps_in
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
    """Name of the function that each rank calls first."""
    first: str | None = None
    """Further words of a launch before the one with the fault, which goes to AT steps; None: there is none."""
    words: str = ""
    torchrun: bool = False
    text: bool = False
    """Trains on token files in `data`, relative to the current folder."""
    lost: int = 10
    """Steps that may be lost."""
    quick: bool = False
    prepare: Act | None = None
    """What is done before the launch."""


# --------------------------------------------------------------------------- planted inside a rank


def _mark() -> None:
    path = Path(os.environ[PLANTED])
    if not path.exists():
        path.write_text(str(time.time()))


def _is_rank(number: int) -> bool:
    return os.environ["RANK"] == str(number)


def _before_step(action: Callable[[Any], None], rank: int | None = 1, once: bool = True) -> None:
    """Call `action(learner)` on a rank (None: all) before a step, AT steps into the launch."""
    from trainer.step import Learner

    step, done = Learner.step, [0]

    @functools.wraps(step)
    def patched(self: Learner, *arguments: Any, **named: Any) -> Any:
        done[0] += 1
        is_due = done[0] == AT + 1 or (done[0] > AT and not once)
        if is_due and (rank is None or _is_rank(rank)):
            _mark()
            action(self)
        return step(self, *arguments, **named)

    Learner.step = patched  # type: ignore[method-assign]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def _parameter(learner: Any, suffix: str) -> torch.Tensor:
    return next(p for name, p in learner.parameters.items() if name.endswith(suffix) and _local(p).numel())


def _flip(tensor: torch.Tensor) -> None:
    """The highest bit of a float32's mantissa."""
    with torch.no_grad():
        _local(tensor).detach().view(torch.int32).view(-1)[0] ^= 1 << 22


def nan_in_weight() -> None:
    """One weight of rank 1's shard."""
    _before_step(
        lambda learner: _local(_parameter(learner, "down_proj.weight")).detach().view(-1)[:1].fill_(float("nan"))
    )


def _nan_in_gradient(rank: int | None) -> None:
    from trainer.step import Learner

    norm, due = Learner.grad_norm, [False]
    _before_step(lambda learner: due.__setitem__(0, True), rank)

    def patched(self: Learner, *arguments: Any, **named: Any) -> Any:
        if due[0]:
            due[0] = False
            gradient = next(p.grad for p in self.parameters.values() if p.grad is not None and _local(p.grad).numel())
            _local(gradient).view(-1)[:1].fill_(float("nan"))
        return norm(self, *arguments, **named)

    Learner.grad_norm = patched  # type: ignore[method-assign]


def nan_in_gradient() -> None:
    """On rank 1, after the reduction, before the norm is taken."""
    _nan_in_gradient(1)


def nan_in_gradient_everywhere() -> None:
    """On all ranks."""
    _nan_in_gradient(None)


def nan_in_loss() -> None:
    """Of rank 1, from then on."""
    from trainer.loss import CrossEntropy

    call, due = CrossEntropy.__call__, [False]
    _before_step(lambda learner: due.__setitem__(0, True))

    def patched(self: CrossEntropy, *arguments: Any, **named: Any) -> Any:
        loss = call(self, *arguments, **named)
        return loss * float("nan") if due[0] else loss

    CrossEntropy.__call__ = patched  # type: ignore[method-assign]


def inf_in_activation() -> None:
    """Out of one feed-forward on rank 1, from then on."""
    due = [False]
    _before_step(lambda learner: due.__setitem__(0, True))

    def hook(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        if due[0] and type(module).__name__ == "FeedForward":
            return output * float("inf")
        return None

    torch.nn.modules.module.register_module_forward_hook(hook)


def flipped_weight() -> None:
    """A bit of a matrix on rank 1."""
    _before_step(lambda learner: _flip(_parameter(learner, "down_proj.weight")))


def flipped_norm() -> None:
    """A bit of a norm on rank 1."""
    _before_step(lambda learner: _flip(_parameter(learner, "norm.weight")))


def flipped_moment() -> None:
    """A bit of a second moment on rank 1."""

    def flip(learner: Any) -> None:
        moments = next(state for state in learner.optimizer.state.values() if _local(state["exp_avg_sq"]).numel())
        _flip(moments["exp_avg_sq"])

    _before_step(flip)


def flipped_snapshot() -> None:
    """A bit of what rank 1 has staged for a checkpoint, before it is written."""
    from checkpoint import store

    write, due = store.write, [False]
    _before_step(lambda learner: due.__setitem__(0, True))

    def patched(folder: Path, shards: Any, *arguments: Any, **named: Any) -> Any:
        if due[0]:
            due[0] = False
            for shard in shards.values():
                tensor = next((t for t in vars(shard).values() if isinstance(t, torch.Tensor) and t.numel()), None)
                if tensor is not None and tensor.dtype == torch.float32:
                    _flip(tensor)
                    break
        return write(folder, shards, *arguments, **named)

    store.write = patched


def slow_rank() -> None:
    """Every step of rank 1 takes a tenth of a second longer."""
    _before_step(lambda learner: time.sleep(0.1), once=False)


def slow_data() -> None:
    """Rank 1 waits a tenth of a second for every batch."""
    from trainer.trainer import Trainer

    step, done = Trainer._step, [0]

    def patched(self: Trainer, *arguments: Any, **named: Any) -> Any:
        done[0] += 1
        if done[0] == AT + 1 and _is_rank(1):
            _mark()
            source = self.loader

            def late() -> Any:
                for batch in source:
                    time.sleep(0.1)
                    yield batch

            slow = late()
            self.loader = _Late(source, slow)  # type: ignore[assignment]
        return step(self, *arguments, **named)

    Trainer._step = patched  # type: ignore[method-assign]


class _Late:
    """A loader whose batches come late."""

    def __init__(self, loader: Any, batches: Any) -> None:
        self._loader, self._batches = loader, batches

    def __next__(self) -> Any:
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def long_step() -> None:
    """A step of all ranks that takes a minute."""

    def last(learner: Any) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.1)

    _before_step(last, rank=None)


def clock_back() -> None:
    """The clock of rank 0 jumps a day back."""
    now = time.time

    def back(learner: Any) -> None:
        time.time = lambda: now() - 86400

    _before_step(back, rank=0)


def no_memory() -> None:
    """Rank 1 may take no more memory."""
    import resource

    def limit(learner: Any) -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        torch.ones(1 << 30)

    _before_step(limit)


def dead_link() -> None:
    """Rank 1 is another host, behind a link that goes down."""
    _before_step(lambda learner: _mark(), rank=0)
    os.environ["GLOO_SOCKET_IFNAME"] = "keel0"
    if _is_rank(1):
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        with open("/run/netns/keel") as space:
            assert libc.setns(space.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        os.environ["GLOO_SOCKET_IFNAME"] = "keel1"
    os.environ["MASTER_ADDR"] = "10.77.9.1"


def other_lr() -> None:
    """Rank 1 is started with another learning rate."""
    sys.argv += ["--optimizer.lr", "3e-2"] if _is_rank(1) else []
    _mark()


def other_seed() -> None:
    """Rank 1 is started with another seed."""
    sys.argv += ["--training.seed", "7"] if _is_rank(1) else []
    _mark()


def other_steps() -> None:
    """Rank 1 is to stop earlier."""
    sys.argv += ["--training.steps", "8"] if _is_rank(1) else []
    _mark()


def other_threads() -> None:
    """Rank 1 computes with two threads."""
    if _is_rank(1):
        os.environ["OMP_NUM_THREADS"] = "2"
        torch.set_num_threads(2)
    _mark()


def other_folder() -> None:
    """Rank 1 sees other files under the same names."""
    if _is_rank(1):
        os.chdir("../other")
    _mark()


# --------------------------------------------------------------------------- from outside


def _signal(rank: int, number: signal.Signals) -> Act:
    return lambda scene: os.kill(scene.ranks()[rank], number)


def kill_torchrun(scene: Scene) -> None:
    """Its ranks go on; they are ended by SIGTERM."""
    scene.launches[-1][0].kill()
    time.sleep(1)
    for pid in scene.ranks().values():
        os.kill(pid, signal.SIGTERM)


def term_torchrun(scene: Scene) -> None:
    """As a cluster's manager does."""
    scene.launches[-1][0].kill(signal.SIGTERM)


def _tmpfs(scene: Scene) -> None:
    scene.run.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", scene.run], check=True)
    scene.undo.append(lambda: subprocess.run(["umount", "-l", scene.run], check=True))


def fill_disk(scene: Scene) -> None:
    """Not a byte is left."""
    with contextlib.suppress(OSError), (scene.run / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1 << 12))


def read_only(scene: Scene) -> None:
    """As a kernel does after an error of a disk."""
    subprocess.run(["mount", "-o", "remount,ro", scene.run], check=False)
    if not os.statvfs(scene.run).f_flag & os.ST_RDONLY:  # files are open for writing: bind it over itself
        subprocess.run(["mount", "--bind", scene.run, scene.run], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", scene.run], check=True)
        scene.undo.append(lambda: subprocess.run(["umount", "-l", scene.run], check=True))


def remove_folder(scene: Scene) -> None:
    """By mistake."""
    shutil.rmtree(scene.run, ignore_errors=True)


def second_launch(scene: Scene) -> None:
    """Of the same job; the first goes on."""
    launch(scene, next(row for row in FAULTS if row.act is second_launch), "second", STEPS)


def link_down(scene: Scene) -> None:
    """Packets between the ranks are dropped from now on."""
    subprocess.run(["ip", "link", "set", "keel0", "down"], check=True)


def _second_host(scene: Scene) -> None:
    def ip(words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words.split()], check=check, capture_output=True)

    ip("netns del keel", check=False)
    ip("netns add keel")
    scene.undo.append(lambda: ip("netns del keel", check=False))
    ip("link add keel0 type veth peer name keel1 netns keel")
    ip("addr add 10.77.9.1/24 dev keel0")
    ip("link set keel0 up")
    for words in ("addr add 10.77.9.2/24 dev keel1", "link set keel1 up", "link set lo up"):
        ip(f"netns exec keel ip {words}")


def _token_files(scene: Scene, folder: str = "here") -> list[Path]:
    return sorted((scene.folder / folder / "data" / "tokens" / "train").glob("*.tokens"))


def truncate_tokens(scene: Scene) -> None:
    """To a page."""
    for path in _token_files(scene):
        os.truncate(path, 4096)


def overwrite_tokens(scene: Scene) -> None:
    """In place, with ids beyond the vocabulary."""
    for path in _token_files(scene):
        with path.open("r+b") as file:
            file.seek(80)
            file.write(b"\xff" * (path.stat().st_size - 80))


def _other_text(scene: Scene) -> None:
    """Another folder with the same names and other documents."""
    prepare_text(scene.server, scene.folder / "other", "[d-h]*.py")


def _change_data(scene: Scene) -> None:
    shutil.rmtree(scene.folder / "here" / "data" / "tokens")
    for number in range(20):  # some of them go to training, the others to validation
        (scene.folder / "here" / "text" / f"more_{number}.py").write_text(f"text number {number}\n" * 50)


def _change_tokenizer(scene: Scene) -> None:
    shutil.rmtree(scene.folder / "here" / "data")
    for path in sorted((scene.folder / "here" / "text").iterdir())[::2]:
        path.unlink()


def _damage_checkpoint(scene: Scene) -> None:
    newest = step_folder(scene.run / "checkpoints", max(steps_in(scene.run / "checkpoints")))
    path = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


REPLICAS = "--mesh.dp_replicate 2 --mesh.dp_shard 1"
COMPARED = f"{REPLICAS} --fault.compare_interval 5"
TENSORS = "--mesh.tp 2 --fault.compare_interval 5"

FAULTS = (
    Fault("kill -9 of rank 0", r"rank 0.*(SIGKILL|signal 9)", act=_signal(0, signal.SIGKILL), quick=True),
    Fault("kill -9 of rank 1", r"rank 1.*(SIGKILL|signal 9)", act=_signal(1, signal.SIGKILL), quick=True),
    Fault("kill -9 of rank 0, torchrun", r"rank 0.*SIGKILL", act=_signal(0, signal.SIGKILL), torchrun=True),
    Fault("kill -9 of rank 1, torchrun", r"rank 1.*SIGKILL", act=_signal(1, signal.SIGKILL), torchrun=True),
    Fault(
        "kill -9 of torchrun, SIGTERM to ranks", "Stopped by SIGTERM", "preempted", kill_torchrun, torchrun=True, lost=0
    ),
    Fault("SIGSEGV in rank 1", r"rank 1.*(SIGSEGV|signal 11|Segmentation fault)", act=_signal(1, signal.SIGSEGV)),
    Fault("rank 1 stopped", r"rank 1\b", act=_signal(1, signal.SIGSTOP)),
    Fault("rank 0 stopped", r"rank 0\b", act=_signal(0, signal.SIGSTOP)),
    Fault("SIGTERM to rank 1", "Stopped by", "preempted", _signal(1, signal.SIGTERM), lost=0, quick=True),
    Fault(
        "SIGTERM to torchrun in a step of 60 s",
        r"SIGTERM",
        "preempted",
        term_torchrun,
        "long_step",
        torchrun=True,
        words="--job.timeout_seconds 100",
        lost=0,
    ),
    Fault(
        "slow rank",
        r"rank 1 [^\n]*keeps the others waiting[^\n]*forward and backward",
        "done",
        plant="slow_rank",
        words="--training.steps 400 --checkpoint.interval 100",
    ),
    Fault(
        "slow data",
        r"rank 1 [^\n]*keeps the others waiting[^\n]*waiting for data",
        "done",
        plant="slow_data",
        words="--training.steps 400 --checkpoint.interval 100",
    ),
    Fault("NaN in a weight of rank 1", r"rank 1.*(down_proj|mlp)|(down_proj|mlp).*rank 1", plant="nan_in_weight"),
    Fault("NaN in a gradient of rank 1, DDP", r"rank 1", "done", plant="nan_in_gradient", words=REPLICAS),
    Fault("NaN in a gradient of all", r"step 13 skipped", "done", plant="nan_in_gradient_everywhere", quick=True),
    Fault("NaN in the loss of rank 1", r"rank 1", plant="nan_in_loss"),
    Fault("inf in an activation of rank 1", r"mlp.*rank 1|rank 1.*mlp", plant="inf_in_activation"),
    Fault(
        "flipped bit, weight of a replica",
        r"rank [01].*down_proj\.weight|down_proj\.weight.*rank [01]",
        plant="flipped_weight",
        words=COMPARED,
    ),
    Fault(
        "flipped bit, norm of a replica",
        r"rank [01].*norm\.weight|norm\.weight.*rank [01]",
        plant="flipped_norm",
        words=COMPARED,
    ),
    Fault(
        "flipped bit, norm of a TP rank",
        r"rank [01].*norm\.weight|norm\.weight.*rank [01]",
        plant="flipped_norm",
        words=TENSORS,
    ),
    Fault(
        "flipped bit, moment of a replica",
        r"rank [01].*exp_avg_sq|exp_avg_sq.*rank [01]|rank [01].*weight",
        plant="flipped_moment",
        words=COMPARED,
    ),
    Fault(
        "flipped bit, staged checkpoint",
        r"step-00000015 is not kept: .* of rank 1 on .*TRAINING GOES ON",
        "done",
        plant="flipped_snapshot",
    ),
    Fault(
        "flipped bit, checkpoint file",
        r"is damaged.*trying the one before",
        "done",
        first="",
        prepare=_damage_checkpoint,
        quick=True,
    ),
    Fault(
        "other learning rate on rank 1", r"rank 1.*optimizer\.lr|optimizer\.lr.*rank 1", plant="other_lr", quick=True
    ),
    Fault("other seed on rank 1", r"rank 1.*training\.seed|training\.seed.*rank 1", plant="other_seed"),
    Fault("other number of steps on rank 1", r"rank 1.*training\.steps|training\.steps.*rank 1", plant="other_steps"),
    Fault("other OMP_NUM_THREADS on rank 1", r"rank 1.*thread|thread.*rank 1", plant="other_threads"),
    Fault("other data on rank 1", r"rank 1", plant="other_folder", prepare=_other_text, text=True),
    Fault(
        "learning rate changed between launches",
        r"optimizer\.lr: 0\.01 -> 0\.5",
        first="",
        words="--optimizer.lr 0.5",
        quick=True,
    ),
    Fault(
        "data changed between launches",
        r"data.{0,60}(changed|differ|other|fingerprint)",
        first="",
        prepare=_change_data,
        text=True,
    ),
    Fault(
        "tokenizer changed between launches",
        r"content of the tokenizer",
        first="",
        prepare=_change_tokenizer,
        text=True,
    ),
    Fault("token files truncated", r"tokens.*(truncated|shorter|changed)", act=truncate_tokens, text=True),
    Fault("token files overwritten", r"tokens.*(changed|vocabulary|checksum)", act=overwrite_tokens, text=True),
    Fault(
        "disk full",
        r"TRAINING GOES ON",
        "failed|running|done",
        fill_disk,
        prepare=_tmpfs,
        words="--checkpoint.max_save_failures 3",
    ),
    Fault(
        "disk full, 1000 failures allowed",
        r"TRAINING GOES ON",
        "failed|running|done",
        fill_disk,
        prepare=_tmpfs,
        words="--checkpoint.max_save_failures 1000",
    ),
    Fault(
        "run folder read-only",
        r"Read-only file system; TRAINING GOES ON",
        "failed|running|done",
        read_only,
        prepare=_tmpfs,
    ),
    Fault(
        "run folder removed",
        r"could not be written: the folder .* is gone",
        "failed|done|",
        act=remove_folder,
        lost=STEPS,
    ),
    Fault("run folder in use", r"is in use by process \d+", "preempted", act=second_launch, quick=True),
    Fault("network between ranks lost", r"rank [01]", act=link_down, plant="dead_link", prepare=_second_host),
    Fault("no more memory on rank 1", r"rank 1.*memory|memory.*rank 1", plant="no_memory"),
    Fault("clock of rank 0 a day back", r"Done: step 40", "done", plant="clock_back", lost=0),
)


# --------------------------------------------------------------------------- one row


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
        environment[FIRST] = f"tests.torture.faults:{fault.plant}"
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
        if said_after is not None and fault.act is second_launch:
            _stop(scene)  # it has said it, and goes on
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


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Plant faults in runs, and see what they say.")
    parser.add_argument("--rows", default="*", help='shell pattern of row names, e.g. "kill*"')
    parser.add_argument("--quick", action="store_true", help="the rows of the test suite")
    options = parser.parse_args()
    rows = [fault for fault in FAULTS if fnmatchcase(fault.name, options.rows) and (fault.quick or not options.quick)]
    failed = 0
    print("| fault | what was said | after | ended after | status.json | steps lost | traceback | |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "tmp") as server:
        for number, fault in enumerate(rows):
            try:
                result = torture(server, fault, Path(folder) / str(number))
                failed += not result.holds
                print(result, flush=True)
            except (AssertionError, subprocess.CalledProcessError) as error:
                failed += 1
                print(f"| {fault.name} | {str(error)[-300:]!r} | - | - | - | - | - | NOT TRIED |", flush=True)
    print(f"\n{len(rows) - failed} of {len(rows)} as expected")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
