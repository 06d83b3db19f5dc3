"""The lock that keeps two runs out of one folder.

It is a lock of the kernel's on the file `.lock`, not the file itself: it ends with the process that holds it, however
that dies, so there is never a stale one to remove by hand. It is a POSIX record lock (lockf), not a BSD one (flock),
for two reasons: processes that are forked off (data workers) don't inherit it, and so can't outlive the run and keep
the next one out; and NFS carries it to the other nodes.

On shared file systems this assumes that locks are enabled on all nodes: NFS 3 needs lockd, NFS 4 has them built in,
Lustre wants the mount option `flock`. Of a node that has vanished the server keeps the lock until its lease ends (NFS
4: 90 s). Where the file system has no locks at all, the run says so and goes on without.
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
    """Another process works in the folder: nothing in it may be touched."""


def lock(folder: Path, warn: Callable[[str], None]) -> None:
    """Take the folder for this process until it ends. `warn` is told if the file system has no locks.

    The process must not open the lock's file in another way: closing it again would end the lock.
    Raises: FolderInUse if another process has it; OSError if the folder can't be written, or the lock's file is a link.
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
        warn(f"{folder} can't be locked ({error.strerror}): see to it yourself that no two runs use it at a time")
    if os.fstat(descriptor).st_nlink > 1:  # a copy of the folder by hard links (cp -al): it gets a lock of its own
        path.unlink()
        os.close(descriptor)
        return lock(folder, warn)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
