"""Blocks of objects on the local disk: one sparse file of bounded size, shared by all processes of a host.

The file has sets of WAYS slots, each with room for one block. A block's place decides its set, so that an object's
blocks fill the sets evenly; a new block takes an empty slot there, or the place of any. Nobody trusts what is read: the
head of a slot has the block's key and the hash of its content. What another process overwrites at the same time, a
killed one left half-written, or the disk has changed, is therefore not found, and no lock guards reads and writes.
"""

import errno
import fcntl
import os
import random
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from configs.errors import UserError

WAYS = 8
_HEAD = struct.Struct("<16s16sI4x")
"""Key and hash of the content (xxh3_128), and its length."""
_LEFT_BYTES = 1 << 30
"""New slots are not filled when the disk has less room than this, which others may need more."""


class BlockCache:
    """The cache in a folder."""

    def __init__(self, folder: Path, n_bytes: int, slot_bytes: int) -> None:
        """Open or create it. Processes share it if they name the same folder and size.

        Args:
            folder: on a disk of this host; created if missing, for this user alone.
            n_bytes: the most that it takes.
            slot_bytes: the longest block.

        Raises:
            UserError: the folder can't be used, or is another user's.
        """
        self._slot_bytes = slot_bytes
        self._n_sets = max(1, n_bytes // (WAYS * (slot_bytes + _HEAD.size)))
        self._taking = threading.Lock()
        """Keeps threads from taking the same slot; of processes, `alone` lets one at a time into a set."""
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = os.stat(folder)
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise PermissionError(errno.EPERM, "others may write to it", str(folder))
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(folder / f"blocks-{self._n_sets}-{slot_bytes}", flags, 0o600)
        except OSError as error:
            raise UserError(
                f"{folder}: can't keep blocks of data here ({error.strerror}); set data.cache_folder to a folder of "
                "this host's disk, or data.cache_gib to 0"
            ) from None

    def get(self, place: int, key: bytes) -> bytes | None:
        """The content of the block with a key; None if it is not there, or the disk can't read it."""
        with suppress(OSError):
            for slot, (own, digest, size) in enumerate(self._heads(place)):
                if own == key and size <= self._slot_bytes:
                    content = os.pread(self._file, size, self._content_at(place, slot))
                    if xxhash.xxh3_128_digest(content) == digest:
                        return content
        return None

    def put(self, place: int, key: bytes, content: bytes) -> None:
        """Keep a block.

        Raises:
            OSError: the disk is full, or refuses.
        """
        room = os.fstatvfs(self._file)
        if room.f_bavail * room.f_frsize < _LEFT_BYTES:
            raise OSError(errno.ENOSPC, f"its disk has less than {_LEFT_BYTES >> 30} GiB left", str(self.folder))
        head = _HEAD.pack(key, xxhash.xxh3_128_digest(content), len(content))
        with self._taking:
            empty = [slot for slot, (_, _, size) in enumerate(self._heads(place)) if not size]
            slot = empty[0] if empty else random.randrange(WAYS)
            # The head takes the slot. Until the content is there, too, the block is not found.
            os.pwrite(self._file, head, self._head_at(place) + slot * _HEAD.size)
        os.pwrite(self._file, content, self._content_at(place, slot))

    def remove(self, place: int, key: bytes) -> None:
        """Remove the block with a key, if it is there."""
        for slot, (own, _, _) in enumerate(self._heads(place)):
            if own == key:
                os.pwrite(self._file, bytes(_HEAD.size), self._head_at(place) + slot * _HEAD.size)

    @contextmanager
    def alone(self, place: int) -> Iterator[None]:
        """Let other processes that want the same block wait, so that one of them brings it for all."""
        with suppress(OSError):  # no lock only means that a block may be brought twice
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, place % self._n_sets)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place % self._n_sets)

    def _heads(self, place: int) -> Iterator[tuple[bytes, bytes, int]]:
        heads = os.pread(self._file, WAYS * _HEAD.size, self._head_at(place))
        return _HEAD.iter_unpack(heads.ljust(WAYS * _HEAD.size, b"\0"))

    def _head_at(self, place: int) -> int:
        return place % self._n_sets * WAYS * _HEAD.size

    def _content_at(self, place: int, slot: int) -> int:
        heads = self._n_sets * WAYS * _HEAD.size
        return heads + (place % self._n_sets * WAYS + slot) * self._slot_bytes
