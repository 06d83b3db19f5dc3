"""Files that cannot be written for a while: training continues without them, says so, and tries again.

A run's records of itself (metrics, curves, log, status) are not worth ending it for: a full disk may have room again, a
network disk may come back. Checkpoints have their own limit (`CheckpointManager.max_save_failures`), which
ends a run whose disk stays full or whose folder is gone.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.files import KEPT_BYTES, AppendedFile, insist


class Outages:
    """Reports, once per outage and file, that it can't be written, and that it can be written again."""

    def __init__(self, warn: Callable[[str], None], say: Callable[[str], None]) -> None:
        """warn, say: called with one line for people at an outage's beginning and end."""
        self._warn = warn
        self._say = say
        self._refused: set[Path] = set()

    def __contains__(self, path: Path) -> bool:
        """Whether the last attempt to write `path` failed."""
        return path in self._refused

    @contextmanager
    def tolerate(self, path: Path) -> Iterator[None]:
        """Turn an OSError from writing `path` inside this context into a warning."""
        try:
            yield
        except OSError as error:
            if path not in self._refused:
                self._refused.add(path)  # before warning: the warning may go to this very file
                reason = error.strerror or error
                self._warn(f"{path} can't be written: {reason}; training continues and retries the file{_room(path)}")
        else:
            if path in self._refused:
                self._refused.remove(path)
                self._say(f"{path} can be written again")

    def insist(self, path: Path, write: Callable[[], None]) -> None:
        """Write `path` for the last time: try again for a few seconds, then warn that it is out of date."""
        try:
            insist(write, passes=lambda error: True)
            self._refused.discard(path)
        except OSError as error:
            self._warn(f"{path} could not be written: {error.strerror or error}; it is out of date")

    def flush(self, file: AppendedFile) -> None:
        """Write out the records buffered in `file`; if that fails, they are kept for the next time, up to a limit."""
        with self.tolerate(file.path):
            if dropped := file.flush():
                self._warn(
                    f"{dropped} records of {file.path} are lost: at most {KEPT_BYTES >> 20} MiB are kept "
                    "while it can't be written"
                )

    def give_up(self, file: AppendedFile) -> None:
        """`flush` a last time, and report what is missing."""
        self.flush(file)
        if file.missing:
            self._warn(f"{file.path}: the last {file.missing} records could not be written")


def _room(path: Path) -> str:
    """The free space where `path` is, in parentheses; "" if unknown."""
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return ""
    return f" ({disk.f_bavail * disk.f_frsize:,} bytes are free there)"
