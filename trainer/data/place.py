"""Where token files are: in a folder of a disk, or below a name in object storage (`bucket_place`).

Readers know only the two protocols here; `place_of` alone looks at what kind of name a place has.
"""

import os
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from configs.errors import UserError
from configs.files import exists, is_folder, whole
from configs.places import is_url
from configs.schema import Data
from configs.untrusted import read_file


@dataclass(frozen=True)
class Stamp:
    """A file's size and modification time, which show whether it was written to."""

    size: int
    mtime_ns: int

    def __str__(self) -> str:
        seconds, nanoseconds = divmod(self.mtime_ns, 10**9)
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
        return f"{self.size} bytes written at {written}.{nanoseconds:09}"


class Content(Protocol):
    """The bytes of a file, open for reading at random from any thread."""

    @property
    def name(self) -> str | Path:
        """What messages call it."""

    def read(self, at: int, size: int) -> bytes:
        """Read bytes [at, at + size), or those of them that are there.

        Raises:
            OSError: the disk refuses.
            UserError: they can't be brought, or the file is another one now.
        """

    def expect(self, at: int, size: int) -> None:
        """Bring bytes [at, at + size), which will be read soon, in the background, if that takes long."""

    def forget(self, at: int, size: int) -> None:
        """Keep nothing of bytes [at, at + size), which are damaged: the next launch requests them again."""

    def stamp(self) -> Stamp:
        """The file's size, and when it was written; a change shows that its content may have changed."""


class Place(Protocol):
    """A flat folder of files."""

    is_far: bool
    """Whether a read costs a request, so that nothing is read before it is needed, and that is told ahead."""

    @property
    def name(self) -> str | Path:
        """What messages call it."""

    def names(self, suffix: str) -> list[str]:
        """The names of its files with a suffix, in order."""

    def below(self, suffix: str) -> list[str]:
        """The folders in it that have files with a suffix."""

    def open(self, name: str) -> Content:
        """Open a file.

        Raises:
            UserError: it can't be opened.
        """

    def get(self, name: str, max_bytes: int) -> bytes | None:
        """The content of a small file; None if there is none.

        Raises:
            OSError: it can't be read.
            ValueError: it is larger than that.
        """


def place_of(path: "str | Path | Place", data: Data | None = None) -> Place:
    """The place of that name.

    Args:
        data: says where blocks of object storage are kept on the local disk; None: nowhere.

    Raises:
        UserError: there is none, or it can't be looked at.
    """
    if not isinstance(path, (str, Path)):
        return path
    if is_url(path):
        from trainer.data.bucket_place import bucket_place  # which imports this file

        return bucket_place(str(path), data and data.cache_folder, data.cache_gib if data else 0)
    return _Folder(Path(path))


class _Folder:
    is_far = False

    def __init__(self, path: Path) -> None:
        if not is_folder(path):
            raise UserError(f"{whole(path)}: no such folder of token files; make it with scripts/prepare_data.py")
        self.name = path

    def names(self, suffix: str) -> list[str]:
        return sorted(name for name in os.listdir(self.name) if name.endswith(suffix))  # glob hides a refusal

    def below(self, suffix: str) -> list[str]:
        return [str(file.parent) for file in sorted(self.name.glob("*/*" + suffix))]

    def open(self, name: str) -> "LocalFile":
        return LocalFile(self.name / name)

    def get(self, name: str, max_bytes: int) -> bytes | None:
        path = self.name / name
        return read_file(path, max_bytes) if exists(path) else None


class LocalFile:
    """A file of a disk.

    It is read with pread instead of a memory map: if a file is truncated during a run, access through a map ends in
    SIGBUS, which kills the process without a message, and pread ends in an error that names the place.
    """

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            UserError: it can't be opened.
        """
        self.name = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, at: int, size: int) -> bytes:
        """Implements `Content`."""
        data = os.pread(self._descriptor, size, at)
        while len(data) < size and (more := os.pread(self._descriptor, size - len(data), at + len(data))):
            data += more
        return data

    def expect(self, at: int, size: int) -> None:
        """Do nothing: the system reads ahead."""

    def forget(self, at: int, size: int) -> None:
        """Do nothing: the file is all there is."""

    def stamp(self) -> Stamp:
        """Implements `Content`."""
        status = os.fstat(self._descriptor)
        return Stamp(status.st_size, status.st_mtime_ns)
