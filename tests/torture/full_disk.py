"""A full disk at every write of a save: python -m tests.torture.full_disk   (needs to mount: root on Linux)

A run has one checkpoint on a small tmpfs and saves the next, while ever more of the disk is free: no page, one, two, up
to as many as the save takes; then the same with inodes. So the disk refuses at every page that is written and every
folder and file that is made. Each time training must go on, the checkpoint before must be whole, and nothing of the
failed one be left; with enough room, the same manager saves.
"""

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoint.manager import CheckpointManager
from checkpoint.manifest import step_folder
from tests.torture.damage import make_manager, process_group, resume, state

PAGE_BYTES = 4096
DISK_BYTES = 2 << 20
INODES = 16


def torture(stride: int = 1) -> tuple[int, int]:
    """Try every `stride`-th number of free pages, and every number of free inodes.

    Returns: how many saves failed for want of pages, and of inodes.
    Raises: AssertionError if a checkpoint is lost; PermissionError if this process may not mount a disk.
    """
    with process_group(), small_disk() as disk:
        manager = make_manager(disk / "checkpoints", max_save_failures=10**6, keep_last=1)
        manager.resume(state())
        manager.begin_line()
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
    step, filler = (manager.latest_step() or 0) + 1, disk / "filler"
    if free_pages is not None:
        filler.write_bytes(bytes((os.statvfs(disk).f_bfree - free_pages) * PAGE_BYTES))
    if free_inodes is not None:
        room = os.statvfs(disk)
        _mount(disk, f"remount,nr_inodes={room.f_files - room.f_ffree + free_inodes}")
    manager.save(step, state(), {"tokens": 7})
    filler.unlink(missing_ok=True)
    _mount(disk, f"remount,nr_inodes={INODES}")
    newest = step_folder(disk / "checkpoints", manager.latest_step() or 0)
    assert list(disk.rglob("step-*")) == [newest]
    assert resume(disk / "checkpoints") == {"tokens": 7}
    return newest == step_folder(disk / "checkpoints", step)


@contextmanager
def small_disk() -> Iterator[Path]:
    """A disk of DISK_BYTES and INODES, in memory."""
    with tempfile.TemporaryDirectory() as folder:
        _mount(Path(folder), f"size={DISK_BYTES},nr_inodes={INODES}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def _mount(folder: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(done.stderr)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fill the disk at every write of a save.")
    parser.add_argument("--stride", type=int, default=1, help="pages between two tries")
    started = time.monotonic()
    pages, inodes = torture(parser.parse_args().stride)
    print(f"{pages} saves failed for want of pages, {inodes} of inodes; no checkpoint was lost", end=" ")
    print(f"({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
