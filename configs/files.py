"""Looks at files, and writes Keel's safely against crashes, full disks and links in untrusted folders.

A file is replaced as a whole (`replacing`, `write_atomically`) or appended to, record by record (`AppendedFile`).
Either way a reader, or the next launch after a crash, finds only complete content.

Both write only to plain files. Replacing a file replaces a link of that name and leaves the link's target unchanged. A
file that is written in place must not be a symbolic link, a pipe or a device (`open_plain`); one with a second name by
a hard link, as after `cp -al`, is first copied.
"""

import errno
import json
import math
import os
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

KEPT_BYTES = 16 << 20
"""Bytes that an `AppendedFile` keeps in memory while the disk refuses: about 50,000 lines of metrics."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk without room."""
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Error numbers that say that nothing is at a path."""
_PAUSES = (0.1, 0.3, 1.0, 2.0)
"""Seconds before further attempts; the launcher of a run that ends may soon kill it."""
Result = TypeVar("Result")
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own is


def whole(path: str | Path) -> str:
    """Write a path as messages about a missing file show it: absolute, so that one sees where Keel looked."""
    return os.path.abspath(path)  # unlike resolve(), it keeps the names of symbolic links


def exists(path: str | Path) -> bool:
    """Whether there is something at a path.

    An error, such as of a disk that does not answer, says nothing of that. From Python 3.14 on, `Path.exists`,
    `is_file`, `is_dir` and `is_symlink` are False then, and a run would begin again as if it had no checkpoints.

    Raises:
        OSError: the system can't say.
    """
    return _mode(path) is not None


def is_file(path: str | Path) -> bool:
    """Whether there is a regular file, or a link to one. Raises: as `exists`."""
    return stat.S_ISREG(_mode(path) or 0)


def is_folder(path: str | Path) -> bool:
    """Whether there is a folder, or a link to one. Raises: as `exists`."""
    return stat.S_ISDIR(_mode(path) or 0)


def is_link(path: str | Path) -> bool:
    """Whether there is a symbolic link, also one that leads nowhere. Raises: as `exists`."""
    return stat.S_ISLNK(_mode(path, follow_symlinks=False) or 0)


def _mode(path: str | Path, follow_symlinks: bool = True) -> int | None:
    """What is at a path, as in `os.stat_result.st_mode`; None: nothing."""
    try:
        return os.stat(Path(path), follow_symlinks=follow_symlinks).st_mode  # an empty path is the current folder
    except ValueError:  # it has a null character
        return None
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return None


def insist(
    action: Callable[[], Result],
    passes: Callable[[OSError], bool] = lambda error: error.errno in (errno.EIO, errno.ESTALE),
) -> Result:
    """Do again for a few seconds what a disk, such as one that hosts share, refuses for a moment.

    Args:
        action: may be called several times.
        passes: whether an error of it may pass; any other is raised at once.

    Raises:
        OSError: the disk still refuses.
    """
    for pause in _PAUSES:
        try:
            return action()
        except OSError as error:
            if not passes(error):
                raise
        time.sleep(pause)
    return action()


# --------------------------------------------------------------------------- plain files


def require_plain(path: Path) -> None:
    """Check that `path`, if it exists, is a plain file.

    Raises:
        OSError: it is not; the error says what it is.
    """
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            return
        if stat.S_ISLNK(mode):
            raise link_refused(path)
        raise OSError(errno.EINVAL, "it is not a plain file; remove it", str(path))


def link_refused(path: Path) -> OSError:
    """The error for a symbolic link in a place where Keel writes."""
    return OSError(errno.ELOOP, "it is a symbolic link, which Keel does not write through; remove it", str(path))


def open_plain(path: Path, flags: int) -> int:
    """Call `os.open` on a file that is written in place; the caller closes the descriptor.

    Raises:
        OSError: as in `require_plain`, or the disk refuses.
    """
    require_plain(path)
    # The flags protect against a link or a pipe that replaces the file after the check.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


# --------------------------------------------------------------------------- whole files


@contextmanager
def synced(path: Path) -> Iterator[IO[bytes]]:
    """Create a file that is synced to disk at the end of the block; the name must be unused."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder, so that they survive a power cut; syncing a file does not include them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, writer: str = "") -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` at the end of the block, complete and synced, or not at all.

    `writer`: who writes it, if several processes may do so at once; part of the temporary file's name.
    """
    if not path.name:  # "." and "/"
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not exists(path.parent):  # open() would name the temporary file
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    temporary = path.with_name(f".{path.name}{writer and f'.{writer}'}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with synced(temporary) as file:
            yield file
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)  # of a full disk it names no file, which would then be taken for the output
        raise


def write_atomically(path: Path, texts: Iterable[str], writer: str = "") -> None:
    """Write a file so that readers, and the next launch after a crash, see either the complete old or new one."""
    with replacing(path, writer) as file:
        file.writelines(text.encode() for text in texts)


def write_json(path: Path, value: Any, writer: str = "") -> None:
    """Write a value as JSON for people and programs, as `write_atomically` does; what is not finite becomes null."""
    write_atomically(path, [json.dumps(_with_nulls(value), indent=2, allow_nan=False) + "\n"], writer)


def _with_nulls(value: Any) -> Any:
    """The value as JSON has it, which knows no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _with_nulls(each) for key, each in value.items()}
    return [_with_nulls(each) for each in value] if isinstance(value, list | tuple) else value


def write_even_if_full(path: Path, text: str, writer: str = "") -> None:
    """Like `write_atomically`, but also rewrites a small existing file on a full disk.

    The file is then overwritten in place, in its existing blocks: not atomic, but one write of a few hundred bytes.

    Args:
        path, text: the file, and all of its content.
        writer: as for `replacing`.

    Raises:
        OSError: the disk refuses that as well.
    """
    try:
        write_atomically(path, [text], writer)
    except OSError as error:
        if error.errno not in FULL or not _overwrite(path, text.encode()):
            raise


def _overwrite(path: Path, content: bytes) -> bool:
    """Overwrite a file within its blocks; returns False if it does not exist or they are too few."""
    try:
        descriptor = open_plain(path, os.O_WRONLY)
    except FileNotFoundError:
        return False
    try:
        found = os.fstat(descriptor)
        if found.st_nlink > 1 or len(content) > found.st_blocks * _BLOCK_BYTES:
            return False
        os.pwrite(descriptor, content.ljust(found.st_size), 0)  # trailing white space does no harm in JSON and text
        os.ftruncate(descriptor, len(content))
        os.fsync(descriptor)
        return True
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------- files that grow


class AppendedFile:
    """A file that grows by complete records, whatever the disk does.

    `write` keeps a record in memory, `flush` appends what was kept. A record that the disk accepted only in part is
    truncated, and stays in memory with those after it for the next flush. The file is opened for each flush, which
    reveals that it was removed, and errors that a network file system reports only when a file is closed. A record that
    is in the file in spite of such an error is not written again.
    """

    def __init__(self, path: Path) -> None:
        """Set the path; `touch` or the first record creates the file unless it exists."""
        self.path = path
        self._records: deque[bytes] = deque()
        self._n_bytes = 0
        self._dropped = 0
        self._doubtful_at: int | None = None
        """Where the first record is if it was written completely, and then closing the file failed."""
        self._lock = threading.Lock()

    @property
    def missing(self) -> int:
        """Records that are not in the file."""
        return len(self._records) + self._dropped

    def write(self, record: bytes) -> None:
        """Keep a record for the next `flush`; beyond `KEPT_BYTES` it is dropped and counted."""
        with self._lock:
            if self._n_bytes + len(record) > KEPT_BYTES:
                self._dropped += 1
                return
            self._records.append(record)
            self._n_bytes += len(record)

    def touch(self) -> None:
        """Create the file if it does not exist.

        Raises:
            OSError: the disk refuses.
        """
        os.close(self._open())

    def flush(self) -> int:
        """Append all kept records; returns how many were dropped since the last successful flush.

        Raises:
            OSError: the disk refuses; the records that it did not accept are kept.
        """
        with self._lock:
            while self._records:
                self._append(self._records[0])
                self._n_bytes -= len(self._records.popleft())
            dropped = self._dropped
            self._dropped = 0
            return dropped

    def _append(self, record: bytes) -> None:
        if self._is_there(record):
            self._doubtful_at = None
            return
        descriptor = self._open()
        try:
            size = os.fstat(descriptor).st_size
            rest = memoryview(record)
            try:
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise
            self._doubtful_at = size
        finally:
            os.close(descriptor)
        self._doubtful_at = None

    def _is_there(self, record: bytes) -> bool:
        if self._doubtful_at is None or not is_file(self.path):
            return False
        with self.path.open("rb") as file:
            file.seek(self._doubtful_at)
            return file.read(len(record)) == record

    def _open(self) -> int:
        descriptor = open_plain(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if os.fstat(descriptor).st_nlink == 1:
            return descriptor
        os.close(descriptor)
        with self.path.open("rb") as shared, replacing(self.path) as own:
            shutil.copyfileobj(shared, own)
        return open_plain(self.path, os.O_WRONLY | os.O_APPEND)
