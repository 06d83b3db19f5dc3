"""A full disk at every write of a save, and under a whole run: python -m tests.torture.full_disk [--ranks N]

A run has one checkpoint on a small tmpfs and saves the next, while ever more of the disk is free: no page, one, two, up
to as many as the save takes; then the same with inodes. So the disk refuses at every page that is written and every
folder and file that is made. Each time training must go on, the checkpoint before must be whole, and nothing of the
failed one be left; with enough room, the same manager saves.

Then the disk of a real launch is filled to its last page, freed after two failed saves, and filled again for good.
Until then the run must go on, and its records be complete; in the end it must say once why it ends. Mounting needs root
on Linux.
"""

import argparse
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from checkpoint.manager import CheckpointManager
from checkpoint.manifest import step_folder
from tests.end_to_end.launch import TIMEOUT_SECONDS, records, start, status
from tests.torture.damage import make_manager, process_group, resume, state

PAGE_BYTES = 4096
DISK_BYTES = 2 << 20
INODES = 16
RUN_DISK_BYTES = 6 << 20
PROGRAM = """
import time
from pathlib import Path
from checkpoint.manager import CheckpointManager

failed, filler = CheckpointManager._failed, Path("filler")

def wait_for_room_after_the_second(manager, error):
    failed(manager, error)
    if len(manager._failures) == 2:
        CheckpointManager._failed = failed
        while filler.exists():
            time.sleep(0.01)

CheckpointManager._failed = wait_for_room_after_the_second
import train
raise SystemExit(train.main())
"""
"""train.py, which waits once after two failed saves in a row: the third would end it before a slow test made room."""


def torture(stride: int = 1) -> tuple[int, int]:
    """Try every `stride`-th number of free pages, and every number of free inodes.

    Returns: how many saves failed for want of pages, and of inodes.
    Raises: AssertionError if a checkpoint is lost; PermissionError if this process may not mount a disk.
    """
    with process_group(), small_disk(DISK_BYTES, INODES) as disk:
        manager = make_manager(disk / "checkpoints", keep_last=1)
        manager.max_save_failures = 10**6
        manager.resume(state())
        manager.begin_lineage()
        assert saves(manager, disk)
        enough = os.statvfs(disk).f_blocks - os.statvfs(disk).f_bfree
        pages = sum(not saves(manager, disk, free_pages=free) for free in range(0, enough + 1, stride))
        inodes = sum(not saves(manager, disk, free_inodes=free) for free in range(INODES))
        assert saves(manager, disk)
        manager.close()
    return pages, inodes


def saves(
    manager: CheckpointManager, disk: Path, free_pages: int | None = None, free_inodes: int | None = None
) -> bool:
    """Save with so much room; returns whether that succeeds. Asserts that the newest checkpoint is whole and alone."""
    step = (manager.latest_step() or 0) + 1
    if free_pages is not None:
        fill(disk, free_pages)
    if free_inodes is not None:
        room = os.statvfs(disk)
        _mount(disk, f"remount,nr_inodes={room.f_files - room.f_ffree + free_inodes}")
    manager.save(step, state(), {"tokens": 7})
    free(disk)
    _mount(disk, f"remount,nr_inodes={INODES}")
    newest = step_folder(disk / "checkpoints", manager.latest_step() or 0)
    assert list(disk.rglob("step-*")) == [newest]
    assert resume(disk / "checkpoints") == {"tokens": 7}
    return newest == step_folder(disk / "checkpoints", step)


# --------------------------------------------------------------------------- a whole run


@dataclass(frozen=True)
class Ended:
    """How a launch ended whose disk was full."""

    code: int
    out: list[str]
    err: list[str]


def whole_run(disk: Path, ranks: int = 0, place: str = "run", env: dict[str, str] | None = None) -> Ended:
    """A launch whose disk is full, is freed, and is full again until the run ends.

    Each waits for the other before a change, so nothing depends on how fast they are.

    Raises: AssertionError if the launch ends earlier, with what it said.
    """
    words = f"--training.steps 1000000 --checkpoint.interval 10 --checkpoint.keep_last 1 --job.output_dir {place}"
    (disk / "program.py").write_text(PROGRAM)
    process = start(disk, words, ranks, env=env, program=disk / "program.py")
    try:
        said = _Said(process)
        said.wait_for("step-00000020: committed")
        with kept_full(disk):
            said.wait_for("failed saves in a row: 2,")
        said.wait_for(": committed")
        said.wait_for(": committed")  # what was said before the first is in run.log by now
        with kept_full(disk):
            return Ended(process.wait(TIMEOUT_SECONDS), *said.everything())
    finally:
        process.kill()


def assert_recorded(run: Path, ended: Ended) -> None:
    """Assert that of a `whole_run` nothing is lost that the disk had room for, and that it said how it ended."""
    errors = "".join(ended.err).partition("torch/distributed/elastic")[0]
    steps = [record["step"] for record in records(run)]
    assert steps == list(range(1, len(steps) + 1))
    full = [line for line in ended.err if "metrics.jsonl can't be written: No space left on device" in line]
    # Once each time that the disk gets full, which it does again after the removal of a failed save's files made room.
    assert len(full) <= 5, errors
    assert errors.count("failed saves in a row: 3") == 1, errors
    assert "Traceback" not in errors, errors
    found = status(run)
    assert found["state"] == "failed"
    assert "could not be written" in found["reason"]
    assert found["step"] >= steps[-1]  # equal if the removal of the last save's files made room
    newest = max((run / "checkpoints").iterdir())
    assert steps[-1] >= int(newest.name.removeprefix("step-")) > 20
    log = (run / "run.log").read_text()
    committed = [number for number, line in enumerate(ended.out) if ": committed" in line]
    missing = [line for line in ended.out[: committed[-2] + 1] if line.rstrip() not in log]
    assert not missing, missing


class _Said:
    """What a process says, heard by a thread for each of its streams."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._out: list[str] = []
        self._err: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        pairs = ((process.stdout, self._out), (process.stderr, self._err))
        self._threads = [threading.Thread(target=self._listen, args=pair, daemon=True) for pair in pairs]
        for thread in self._threads:
            thread.start()

    def wait_for(self, text: str) -> None:
        """Wait for a line with it, among those that were not heard yet. Raises: AssertionError if none comes."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        with suppress(queue.Empty):
            while (line := self._lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                if text in line:
                    return
        raise AssertionError("".join([f"{text!r} was not said:\n", *self._out[-50:], *self._err[-50:]]))

    def everything(self) -> tuple[list[str], list[str]]:
        """All that was said to the two streams, once the process has ended."""
        for thread in self._threads:
            thread.join()
        return self._out, self._err

    def _listen(self, stream: Iterator[str], lines: list[str]) -> None:
        for line in stream:
            lines.append(line)
            self._lines.put(line)
        self._lines.put(None)


# --------------------------------------------------------------------------- the disk


@contextmanager
def small_disk(n_bytes: int, inodes: int) -> Iterator[Path]:
    """A disk of so many bytes and inodes, in memory. Raises: PermissionError if this process may not mount one."""
    with tempfile.TemporaryDirectory() as folder:
        _mount(Path(folder), f"size={n_bytes},nr_inodes={inodes}")
        try:
            yield Path(folder)
        finally:
            # Lazy: a run in this process holds its lock until the process ends.
            subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path, free_pages: int = 0) -> None:
    """Leave so many pages free, also while others write."""
    with (disk / "filler").open("ab", buffering=0) as filler:
        while (room := os.statvfs(disk).f_bfree - free_pages) > 0:
            with suppress(OSError):
                filler.write(bytes(room * PAGE_BYTES))


@contextmanager
def kept_full(disk: Path) -> Iterator[None]:
    """A disk whose room is taken as soon as there is any; free again afterwards."""
    is_over = threading.Event()

    def refill() -> None:
        while not is_over.wait(0.001):
            fill(disk)

    thread = threading.Thread(target=refill)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        free(disk)


def free(disk: Path) -> None:
    """Undo `fill`."""
    (disk / "filler").unlink(missing_ok=True)


def _mount(folder: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(done.stderr)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fill the disk at every write of a save, and under a whole run.")
    parser.add_argument("--stride", type=int, default=1, help="pages between two tries")
    parser.add_argument("--ranks", type=int, default=2, help="of the whole run; 0: without torchrun")
    options, started = parser.parse_args(), time.monotonic()
    pages, inodes = torture(options.stride)
    print(f"{pages} saves failed for want of pages, {inodes} of inodes; no checkpoint was lost", end=" ")
    print(f"({time.monotonic() - started:.0f} s)")
    with small_disk(RUN_DISK_BYTES, 1000) as disk:
        assert_recorded(disk / "run", whole_run(disk, options.ranks))
        print(
            f"a whole run: {len(records(disk / 'run'))} steps recorded, none lost ({time.monotonic() - started:.0f} s)"
        )


if __name__ == "__main__":
    main()
