"""A pin on a checkpoint that is being read, so that nobody removes it meanwhile: shared between readers, and refused
to who would remove it.

It is a lock of the kernel's on `MANIFEST.json`, and ends with the process that holds it, however that dies: no stale
pin keeps a checkpoint for ever. Unlike the lock on a run's folder (`checkpoint.lock`) it is a BSD one (flock): that
belongs to the open file, not to the process, so an export in one thread of a run keeps off the run's own removals in
another, and reading the manifest once more does not end it. Linux carries it to other nodes over NFS (from 2.6.12).
Where a file system has no locks, nothing is pinned.
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
    """A checkpoint must not be removed, because it is being read."""


class Pin:
    """Keeps the checkpoint `folder` until `release`; also as a context. A folder that is no checkpoint is left alone.

    Raises: UserError if it is being removed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._descriptor: int | None = os.open(folder / MANIFEST_NAME, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            self._descriptor = None  # whoever reads the manifest says why it can't be read
            return
        if not _lock(self._descriptor, fcntl.LOCK_SH) or not _is_at(self._descriptor, folder / MANIFEST_NAME):
            self.release()
            raise UserError(f"checkpoint {folder} is being removed, since it is not kept any more; choose a newer one")

    def release(self) -> None:
        """Let go of the checkpoint; once more does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def remove(folder: Path) -> None:
    """Remove a checkpoint, or a folder of them, unless one is being read.

    Raises: Pinned; OSError if the disk refuses.
    """
    with ExitStack() as locks:
        for manifest in (folder / MANIFEST_NAME, *folder.glob(f"step-*/{MANIFEST_NAME}")):
            if manifest.is_file():
                locks.enter_context(_locked(manifest))
        manifests.remove(folder)


@contextmanager
def _locked(manifest: Path) -> Iterator[None]:
    descriptor = os.open(manifest, os.O_RDWR)  # NFS lets nobody exclude others from a file that he can't write
    try:
        if not _lock(descriptor, fcntl.LOCK_EX):
            raise Pinned(f"checkpoint {manifest.parent} is being read, and therefore kept for now")
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Whether the lock was to be had; where there are no locks, it always is."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of that name, and not removed between opening and locking it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
