"""Token files in object storage, read by ranges, in blocks that are kept in memory and on the local disk.

A block is one that the token file has a checksum of, which its reader compares, and the first has the file's header,
too. It is kept under the object's name and ETag, so that a changed object is never mixed with what was read of it
before: the answer to each request names the ETag of its bytes, which must be the one that was listed at the start.
"""

import logging
import math
import os
import queue
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import cache
from pathlib import Path

import xxhash

from checkpoint.bucket import Bucket, BucketError, Patience, Stored, errors_for_user
from checkpoint.bucket_files import UNFINISHED
from configs.errors import OutageError, UserError
from configs.places import url_fault
from trainer.data.block_cache import BlockCache
from trainer.data.place import Stamp
from trainer.data.token_file import BLOCK_BYTES, HEADER_BYTES

REQUESTS_AT_ONCE = 16
"""The most of one process; with 50 ms a request and blocks of 64 KiB, 20 MB/s."""
_KEPT_BLOCKS = 512
"""Blocks in the memory of a process, 32 MiB."""
BLOCKS_AT_ONCE = 16
"""The most blocks of one request."""
_PATIENCE = Patience(request_seconds=60, seconds=2)
WAIT_SECONDS = 180.0
"""How long a server that is away is waited for."""
_PAUSE_SECONDS = 1.0
"""The time between two requests of which the first has failed."""
TELL_SECONDS = 5.0
"""The time after which a wait is told."""
_TOLD_AGAIN_SECONDS = 60.0


@cache
def bucket_place(url: str, folder: str | None, gib: float) -> "BucketPlace":
    """The place of that name; listed once in a process, so that all of it reads the same objects.

    Args:
        folder, gib: data.cache_folder and data.cache_gib.

    Raises:
        UserError: nothing is there, or it can't be listed.
    """
    where = Path(folder or Path(tempfile.gettempdir(), f"keel-data-{os.getuid()}"))
    _places.append(BucketPlace(url, _store_of(where, int(gib * 2**30))))
    return _places[-1]


_places: list["BucketPlace"] = []


def requests_made() -> int:
    """The number of requests for data that this process has made, repetitions aside."""
    return sum(place.bucket.requests for place in _places)


class BucketPlace:
    """The objects right below a name; implements `Place`."""

    is_far = True

    def __init__(self, url: str, blocks: "BlockStore") -> None:
        """List it; see `bucket_place`."""
        self.name = url.rstrip("/")
        self.blocks = blocks
        if fault := url_fault(url):
            raise UserError(f"{url}: {fault}")
        self.bucket = Bucket(url, patient=_PATIENCE)
        with errors_for_user():
            self._objects = self.bucket.objects()
        if not self._objects:
            raise UserError(f"{url}: there is nothing below this name; keel prepare --output puts token files there")
        if UNFINISHED in self._objects:
            raise UserError(f"{url}: a preparation has not put all of its files here; run the same keel prepare again")
        self._files = {key: BucketFile(self, self.bucket, key, stored) for key, stored in self._objects.items()}

    def names(self, suffix: str) -> list[str]:
        """Implements `Place`."""
        return sorted(key for key in self._objects if key.endswith(suffix) and "/" not in key)

    def below(self, suffix: str) -> list[str]:
        """Implements `Place`."""
        return sorted(f"{self.name}/{key.rpartition('/')[0]}" for key in self._objects if key.endswith(suffix))

    def open(self, name: str) -> "BucketFile":
        """Implements `Place`; makes no request."""
        return self._files[name]

    def get(self, name: str, max_bytes: int) -> bytes | None:
        """Implements `Place`."""
        if name not in self._objects:
            return None
        if self._objects[name].size > max_bytes:
            raise ValueError(f"it has more than {max_bytes} bytes")
        with errors_for_user():
            return self.bucket.get(name)


class BucketFile:
    """An object; implements `Content`."""

    def __init__(self, place: BucketPlace, bucket: Bucket, key: str, stored: Stored) -> None:
        """See the object that was listed."""
        self.name = f"{place.name}/{key}"
        self._blocks = place.blocks
        self._bucket = bucket
        self._key = key
        self._stored = stored
        self._identity = f"{self.name} {stored.e_tag} {stored.size}"
        self._trouble = ""
        """Why the last request has failed."""
        self._first_place = xxhash.xxh3_64_intdigest(self._identity.encode())

    def read(self, at: int, size: int) -> bytes:
        """Implements `Content`; waits while the server is away, and then says so."""
        stop = min(at + size, self._stored.size)
        numbers = self._numbers(at, stop)
        content = b"".join([self._waited(coming) for coming in self._blocks.want(self, numbers)])
        start = at - self._start(numbers.start)
        return content[start : start + max(0, stop - at)]

    def expect(self, at: int, size: int) -> None:
        """Implements `Content`."""
        self._blocks.want(self, self._numbers(at, min(at + size, self._stored.size)))

    def forget(self, at: int, size: int) -> None:
        """Implements `Content`; a transfer without TLS may have changed them."""
        self._blocks.forget(self, self._numbers(at, at + size))

    def stamp(self) -> Stamp:
        """What was listed: a change shows as another ETag in the answer to a request, and costs no further one."""
        return Stamp(self._stored.size, int(self._stored.modified * 1e9))

    def place_of(self, number: int) -> tuple[int, bytes]:
        """Where a block is in a `BlockCache`: the arguments of its methods."""
        return self._first_place + number, xxhash.xxh3_128_digest(f"{self._identity} {number}".encode())

    def bring(self, numbers: Sequence[int]) -> list[bytes]:
        """Request neighboring blocks, until the server answers.

        Raises:
            UserError: it does not, or the object is another one now.
        """
        start = self._start(numbers[0])
        stop = min(self._start(numbers[-1] + 1), self._stored.size)
        content = self._requested(start, stop)
        return [content[self._start(n) - start : self._start(n + 1) - start] for n in numbers]

    def _requested(self, start: int, stop: int) -> bytes:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                content, e_tag = self._bucket.get_range(self._key, start, stop)
                break
            except FileNotFoundError:
                raise UserError(f"{self.name}: the object is gone since this launch began. {_RESTORE}") from None
            except BucketError as error:
                self._trouble = str(error.strerror)
                if not error.may_pass or time.monotonic() > deadline:
                    raise error.for_user() from None
                time.sleep(_PAUSE_SECONDS)
        self._trouble = ""
        if e_tag != self._stored.e_tag:
            raise UserError(
                f"{self.name}: the object has changed since this launch began: its ETag was {self._stored.e_tag}, and "
                f"now is {e_tag}. {_RESTORE}"
            )
        if len(content) != stop - start:
            raise OutageError(f"{self.name}: {len(content)} bytes came of {stop - start} from byte {start} on")
        return content

    def _waited(self, coming: "Future[bytes]") -> bytes:
        """The content of a block that is coming; tells if that takes long."""
        if not wait([coming], TELL_SECONDS).done and self._blocks.may_tell():
            began = time.monotonic() - TELL_SECONDS
            trouble = f": {self._trouble}" if self._trouble else ""
            _say(f"the run waits for {self.name}, which has not come for {TELL_SECONDS:g} s{trouble}")
            wait([coming])
            if not coming.exception():
                _say(f"{self.name} has come, after {time.monotonic() - began:.0f} s; the run goes on")
        return coming.result()

    def _numbers(self, start: int, stop: int) -> range:
        """The blocks that hold bytes [start, stop)."""
        first, last = (max(0, byte - HEADER_BYTES) // BLOCK_BYTES for byte in (start, stop - 1))
        return range(first, last + 1 if stop > start else first)

    def _start(self, number: int) -> int:
        """The first byte of a block."""
        return number and HEADER_BYTES + number * BLOCK_BYTES


_RESTORE = (
    "Restore its old content and start again: the run resumes from its newest checkpoint. (To replace the data of a "
    "running job, prepare them under another name)"
)


class BlockStore:
    """The blocks that this process has lately used, and those that are coming, of all objects."""

    def __init__(self, cache: BlockCache | None) -> None:
        """Begin with none; `cache`: where more of them are."""
        self._cache = cache
        self._blocks: OrderedDict[tuple[BucketFile, int], Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[tuple[BucketFile, list[int], list[Future[bytes]]]] = queue.SimpleQueue()
        self._is_full = False
        self._told_at = -math.inf
        for _ in range(REQUESTS_AT_ONCE):  # daemons, because a process that ends must not wait for a server
            threading.Thread(target=self._bring, name="blocks", daemon=True).start()

    def want(self, file: BucketFile, numbers: Iterable[int]) -> "list[Future[bytes]]":
        """Have blocks brought, neighbors by one request; returns at once."""
        found = []
        missing: list[int] = []
        with self._lock:
            for number in numbers:
                if (file, number) not in self._blocks:
                    missing.append(number)
                    self._blocks[file, number] = Future()
                self._blocks.move_to_end((file, number))
                found.append(self._blocks[file, number])
            for run in _runs(missing):
                self._work.put((file, run, [self._blocks[file, number] for number in run]))
            while len(self._blocks) > _KEPT_BLOCKS and next(iter(self._blocks.values())).done():
                self._blocks.popitem(last=False)
        return found

    def forget(self, file: BucketFile, numbers: Iterable[int]) -> None:
        """Keep some blocks neither in memory nor on the disk."""
        with self._lock:
            for number in numbers:
                self._blocks.pop((file, number), None)
                if self._cache:
                    self._cache.remove(*file.place_of(number))

    def may_tell(self) -> bool:
        """Whether the last time that this was asked is long ago, so that a slow server is not told for each block."""
        before, self._told_at = self._told_at, time.monotonic()
        return self._told_at - before > _TOLD_AGAIN_SECONDS

    def _bring(self) -> None:
        """Do what is wanted, in a thread."""
        while True:
            file, numbers, coming = self._work.get()
            try:
                for future, content in zip(coming, self._brought(file, numbers), strict=True):
                    future.set_result(content)
            except BaseException as error:  # of any kind: the reader raises it
                with self._lock:
                    for number in numbers:
                        self._blocks.pop((file, number), None)
                for future in coming:
                    if not future.done():
                        future.set_exception(error)

    def _brought(self, file: BucketFile, numbers: list[int]) -> list[bytes]:
        if self._cache is None:
            return file.bring(numbers)
        places = {number: file.place_of(number) for number in numbers}
        with self._cache.alone(places[numbers[0]][0]):
            there = {number: self._cache.get(*places[number]) for number in numbers}
            for run in _runs([number for number in numbers if there[number] is None]):
                for number, content in zip(run, file.bring(run), strict=True):
                    there[number] = content
                    self._keep(*places[number], content)
        return [content for content in there.values() if content is not None]

    def _keep(self, place: int, key: bytes, content: bytes) -> None:
        assert self._cache is not None
        try:
            self._cache.put(place, key, content)
        except OSError as error:
            if not self._is_full:
                self._is_full = True
                _say(
                    f"{self._cache.folder}: blocks of data can't be kept here ({error.strerror}); they are requested "
                    "each time that they are needed. Make room, or set data.cache_folder to another disk"
                )


def _runs(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Neighbors among ascending numbers, at most BLOCKS_AT_ONCE together."""
    run: list[int] = []
    for number in numbers:
        if run and (number != run[-1] + 1 or len(run) == BLOCKS_AT_ONCE):
            yield run
            run = []
        run.append(number)
    if run:
        yield run


@cache
def _store_of(folder: Path, n_bytes: int) -> BlockStore:
    """One for all files of a process: each has threads, and closing a cache's file would give up its locks."""
    return BlockStore(BlockCache(folder, n_bytes, BLOCK_BYTES + HEADER_BYTES) if n_bytes else None)


def _say(text: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # a host's other ranks have the same trouble
        logging.getLogger(__name__).warning(text)
