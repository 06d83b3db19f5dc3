"""The lock that keeps two runs out of one folder.

It is a kernel lock on the file `.lock`, not the file itself. It ends with the process that holds it, however that dies,
so there is never a stale lock to remove by hand. It is a POSIX record lock (lockf), not a BSD lock (flock), for two
reasons: forked processes (data workers) don't inherit it, so they can't outlive the run and keep the next one out; and
NFS carries it to other nodes.

On shared file systems this assumes that locks are enabled on all nodes: NFS 3 needs lockd, NFS 4 has locks built in,
Lustre needs the mount option `flock`. If a node vanishes, the server keeps its lock until the lease ends (NFS 4: 90 s).
If the file system has no locks at all, the run warns and continues without.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

from configs.errors import UserError
from configs.files import open_plain

LOCK_NAME = ".lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)
_HOLDER_BYTES = 200


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
