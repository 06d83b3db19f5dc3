"""Locks: of a run's folder, which keep a second run out, and of checkpoints that are being read.

The lock of a folder is a kernel lock on the file `.lock`, not the file itself. It ends with the process that holds it,
however that dies, so there is never a stale lock to remove by hand. It is a POSIX record lock (lockf), not a BSD lock
(flock), for two reasons: forked processes (data workers) don't inherit it, so they can't outlive the run and keep the
next one out; and NFS carries it to other nodes.

On shared file systems this assumes that locks are enabled on all nodes: NFS 3 needs lockd, NFS 4 has locks built in,
Lustre needs the mount option `flock`. If a node vanishes, the server keeps its lock until the lease ends (NFS 4: 90 s).
If the file system has no locks at all, the run warns and continues without.

A checkpoint that is being read has a shared kernel lock on `MANIFEST.json`, which keeps it from being removed; any
number of readers may hold one. This one is a BSD lock, which belongs to the open file, not to the process. So an export
in one thread of a run blocks the run's own removals in another thread, and reading the manifest again does not end it.
Linux carries it to other nodes over NFS (from 2.6.12). If a file system has no locks, nothing is kept.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from checkpoint.incarnation import FOLDER, facts_of, last_sign_of_life, newest_number
from checkpoint.manifest import MANIFEST_NAME
from configs.errors import UserError
from configs.files import is_file, open_plain

LOCK_NAME = ".lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)
_HOLDER_BYTES = 200
_POLL_SECONDS = 0.5


class FolderInUse(UserError):
    """Another process is working in the folder: nothing in it may be touched."""

    may_pass = True


def lock(folder: Path, warn: Callable[[str], None]) -> None:
    """Lock the folder for this process until it ends. `warn` is called if the file system has no locks.

    The process must not open the lock's file in any other way, because closing it again would end the lock.

    Raises:
        FolderInUse: another process has the folder.
        OSError: the folder can't be written, or the lock's file is a link.
    """
    path = folder / LOCK_NAME
    descriptor = open_plain(path, os.O_RDWR | os.O_CREAT)  # closed by the end of the process
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            holder = os.pread(descriptor, _HOLDER_BYTES, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise FolderInUse(
                f"{folder} is in use by {holder}; wait for it, stop it, or set job.output_dir to another folder"
            ) from None
        warn(f"{folder} can't be locked ({error.strerror}): make sure that only one run uses it at a time")
    if os.fstat(descriptor).st_nlink > 1:  # the folder was copied by hard links (cp -al): give it a separate lock
        path.unlink()
        os.close(descriptor)
        return lock(folder, warn)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, holder_text(os.getpid(), socket.gethostname()).encode(), 0)


def holder_text(pid: object, host: object) -> str:
    """The content of the lock's file: who has it."""
    return f"process {pid} on {host}\n"


def lock_or_take_over(folder: Path, warn: Callable[[str], None], seconds: float) -> None:
    """Like `lock`, for an elastic run, whose last launch may take a moment to end, or may hang with its host.

    Args:
        folder, warn: as for `lock`.
        seconds: how long to wait for the end, or for a sign of life, of the launch that has the folder. If it gives
            none, the folder is taken from it, provided that it is elastic, too, and so finds out before it writes.

    Raises:
        FolderInUse, OSError: as in `lock`.
    """
    claims = folder / FOLDER
    deadline = time.monotonic() + seconds
    signs = {last_sign_of_life(claims)}
    while True:
        try:
            return lock(folder, warn)
        except FolderInUse:
            has_ended_waiting = time.monotonic() > deadline
            if not _is_elastic(folder) or (has_ended_waiting and len(signs) > 1):
                raise
        if has_ended_waiting:
            break
        time.sleep(_POLL_SECONDS)
        signs.add(last_sign_of_life(claims))
    warn(f"the last launch has {folder} but has given no sign of life for {seconds:.0f} s: this one takes it over")
    (folder / LOCK_NAME).unlink(missing_ok=True)  # its lock stays with the removed file
    lock(folder, warn)


def _is_elastic(folder: Path) -> bool:
    """Whether the process that has the folder is an incarnation, and thus looks for newer ones before it writes."""
    numbers = range(newest_number(folder / FOLDER), 0, -1)
    facts = (facts_of(folder / FOLDER, number) for number in numbers)
    holder = (folder / LOCK_NAME).read_text(errors="replace")
    return any(holder == holder_text(each.get("pid"), each.get("host")) for each in facts)


class BeingRead(UserError):
    """A checkpoint can't be removed, because it is being read."""


class Gone(UserError):
    """A checkpoint is being removed, or was moved while it was read."""


class ReadLock:
    """Keeps the checkpoint `folder` until `release`, or as a context. Does nothing if it is not a checkpoint.

    Nothing keeps a run from moving it, when that goes back: errors in the context are then that, and no damage.

    Raises:
        Gone: the checkpoint is being removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._descriptor: int | None = os.open(folder / MANIFEST_NAME, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            self._descriptor = None  # the code that reads the manifest reports the reason
            return
        if not try_lock(self._descriptor, fcntl.LOCK_SH) or not is_at(self._descriptor, folder / MANIFEST_NAME):
            self.release()
            raise Gone(f"checkpoint {folder} is being removed, since it is no longer kept; choose a newer one")

    def release(self) -> None:
        """Release the checkpoint; may be called repeatedly."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def require_there(self) -> None:
        """Raise Gone if the run has moved the checkpoint: what was read may be of two checkpoints of the same step."""
        if self._has_left():
            raise self._gone()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _: object) -> None:
        has_left = self._has_left()
        self.release()
        if has_left and isinstance(error, (UserError, OSError)) and not isinstance(error, Gone):
            raise self._gone() from None

    def _has_left(self) -> bool:
        if self._descriptor is None:
            return not os.path.lexists(self._folder)
        return not is_at(self._descriptor, self._folder / MANIFEST_NAME)

    def _gone(self) -> Gone:
        return Gone(f"checkpoint {self._folder} is no longer there: its run has gone back or removed it, or was moved")


@contextmanager
def not_being_read(folder: Path) -> Iterator[None]:
    """Keep readers away from a checkpoint, or from a folder of them.

    Raises:
        BeingRead: one is being read.
        OSError: a manifest can't be opened.
    """
    with ExitStack() as files:
        for manifest in (folder / MANIFEST_NAME, *folder.glob(f"step-*/{MANIFEST_NAME}")):
            if not is_file(manifest):
                continue
            # NFS gives an exclusive lock only on a file opened for writing.
            file = files.enter_context(manifest.open("rb+"))
            if not try_lock(file.fileno(), fcntl.LOCK_EX):
                raise BeingRead(f"checkpoint {manifest.parent} is being read, and therefore kept for now")
        yield


def try_lock(descriptor: int, kind: int) -> bool:
    """Try to take the lock; True as well if the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`, and was not removed between opening and locking."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
