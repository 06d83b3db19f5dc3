"""Files that the disk refuses for a while: training goes on without them, says so, and tries again.

What a run records of itself (metrics, curves, log, status) is not worth its life: a full disk may have room again, a
network one may come back. Checkpoints have a limit of their own, `checkpoint.max_save_failures`: a run whose disk
stays full, or whose folder is gone, ends by that.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.files import KEPT_BYTES, AppendedFile


class Outages:
    """Says once of each file that it can't be written, and once that it can again."""

    def __init__(self, warn: Callable[[str], None], say: Callable[[str], None]) -> None:
        """warn, say: called with a line for people, of an outage's begin and end."""
        self._warn, self._say = warn, say
        self._refused: set[Path] = set()

    def __contains__(self, path: Path) -> bool:
        """Whether the last attempt to write `path` failed."""
        return path in self._refused

    @contextmanager
    def tolerate(self, path: Path) -> Iterator[None]:
        """Around what writes `path`: what the disk refuses in the block is a warning."""
        try:
            yield
        except OSError as error:
            if path not in self._refused:
                self._refused.add(path)  # first: the warning may be meant for this very file
                reason = error.strerror or error
                self._warn(f"{path} can't be written: {reason}; TRAINING GOES ON, and it is tried again{_room(path)}")
        else:
            if path in self._refused:
                self._refused.remove(path)
                self._say(f"{path} is written again")

    def flush(self, file: AppendedFile) -> None:
        """Append what was written to `file`; what the disk refuses is kept for the next time, within its bounds."""
        with self.tolerate(file.path):
            if dropped := file.flush():
                self._warn(
                    f"{dropped} records of {file.path} are lost: no more than {KEPT_BYTES >> 20} MiB are kept "
                    "while the disk refuses"
                )

    def give_up(self, file: AppendedFile) -> None:
        """`flush` a last time, and say what is not there."""
        self.flush(file)
        if file.missing:
            self._warn(f"{file.path}: the last {file.missing} records could not be written")


def _room(path: Path) -> str:
    """How much is free where `path` is, in brackets; "" where the disk does not say."""
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return ""
    return f" ({disk.f_bavail * disk.f_frsize:,} bytes are free there)"
