"""Faults planted in real runs: python -m tests.torture.faults [--rows "kill*"] [--quick]

Each row trains the tiny job on two ranks, plants one fault at a known step, and looks at what the run says of it: on
the console or in status.json, how soon, how it ends, and how many steps are lost. What it should say is a pattern. The
table that comes out is markdown; the exit code is the number of rows that are not as expected (at most 1).

Faults from outside, which are here, are real: signals, files, mounts, a network that goes down. Those inside a rank (a
value that is not finite, a flipped bit, a slow step) are planted by a function of `planted.py`.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatchcase
from pathlib import Path

from checkpoint.manifest import step_folder, steps_in
from tests.preloaded import Server
from tests.torture.scene import STEPS, Act, Fault, Scene, launch, prepare_text, torture


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
        r"step-00000015 is not kept: .* of rank 1 on .*training continues",
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
        r"training continues",
        "failed|running|done",
        fill_disk,
        prepare=_tmpfs,
    ),
    Fault(
        "run folder read-only",
        r"Read-only file system; training continues",
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
    Fault("run folder in use", r"is in use by process \d+", "preempted", act=second_launch, quick=True, goes_on=True),
    Fault("network between ranks lost", r"rank [01]", act=link_down, plant="dead_link", prepare=_second_host),
    Fault("no more memory on rank 1", r"rank 1.*memory|memory.*rank 1", plant="no_memory"),
    Fault("clock of rank 0 a day back", r"Done: step 40", "done", plant="clock_back", lost=0),
)


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
