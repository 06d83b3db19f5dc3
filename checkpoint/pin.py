"""Pins on checkpoints that are being read, which keep them from being removed; any number of readers may hold one.

A pin is a shared kernel lock on `MANIFEST.json`. It ends with the process that holds it, however that dies, so no stale
pin keeps a checkpoint forever. Unlike the lock on a run folder (`checkpoint.lock`) it is a BSD lock (flock), which
belongs to the open file, not to the process. So an export in one thread of a run blocks the run's own removals in
another thread, and reading the manifest again does not end it. Linux carries it to other nodes over NFS (from 2.6.12).
If a file system has no locks, nothing is pinned.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from checkpoint import manifest as manifests
from checkpoint.manifest import MANIFEST_NAME
from configs.errors import UserError


class Pinned(UserError):
    """A checkpoint can't be removed, because it is being read."""


class Pin:
    """Keeps the checkpoint `folder` until `release`, or as a context. Does nothing if it is not a checkpoint.

    Raises:
        UserError: the checkpoint is being removed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._descriptor: int | None = os.open(folder / MANIFEST_NAME, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            self._descriptor = None  # the code that reads the manifest reports the reason
            return
        if not _lock(self._descriptor, fcntl.LOCK_SH) or not _is_at(self._descriptor, folder / MANIFEST_NAME):
            self.release()
            raise UserError(f"checkpoint {folder} is being removed, since it is no longer kept; choose a newer one")

    def release(self) -> None:
        """Release the checkpoint; may be called repeatedly."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def remove(folder: Path) -> None:
    """Remove a checkpoint, or a folder of them, unless one is being read.

    Raises:
        Pinned: one is being read.
        OSError: it can't be removed.
    """
    with ExitStack() as locks:
        for manifest in (folder / MANIFEST_NAME, *folder.glob(f"step-*/{MANIFEST_NAME}")):
            if manifest.is_file():
                locks.enter_context(_locked(manifest))
        manifests.remove(folder)


@contextmanager
def _locked(manifest: Path) -> Iterator[None]:
    descriptor = os.open(manifest, os.O_RDWR)  # NFS gives an exclusive lock only on a file opened for writing
    try:
        if not _lock(descriptor, fcntl.LOCK_EX):
            raise Pinned(f"checkpoint {manifest.parent} is being read, and therefore kept for now")
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Try to take the lock; True as well if the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`, and was not removed between opening and locking."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
