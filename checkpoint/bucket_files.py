"""Files and folders that are brought from object storage whole, or put there."""

import errno
import fcntl
import mmap
import os
import shutil
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import IO

import xxhash

from checkpoint.bucket import AT_ONCE, Bucket, BucketError, Patience, Stored, errors_for_user
from configs.errors import UserError
from configs.files import is_file, replacing
from configs.places import is_url, standing_for, url_fault

Progress = Callable[[int, int | None, str], None]
Put = Callable[[Bucket, str, Path, Callable[[int], None]], None]
"""Puts a file of this host under a key, and tells how many bytes of it have been read."""
UNFINISHED = ".unfinished"
"""An object of this name says that not all of its neighbors have been put."""
_RANGE_BYTES = 16 << 20
_SLOWEST = 1_000_000
"""Bytes per second below which an upload is given up."""
_ONE_REQUEST = 5000 << 20
"""The most that Azure takes in one request; S3 takes 2% more. A larger file is put in parts."""
_PART_BYTES = 16 << 20
_MAX_PARTS = 10_000
"""The most of S3 and Google; Azure takes five times as many."""
_MAX_BYTES = 5 << 40
"""The largest object that Google has."""


def copy_of(url: str) -> Path:
    """Where copies of what is at a place are on this host.

    Raises:
        UserError: its name is none.
    """
    if fault := url_fault(url):
        raise UserError(f"{url}: {fault}")
    return standing_for(url).absolute()


def local_file(name: str | Path) -> Path:
    """The path of a file on this host; one in object storage is brought, once in a process.

    Raises:
        UserError: it can't be brought.
    """
    return _once(str(name), Path.cwd()) if is_url(name) else Path(name)


@cache
def _once(url: str, _folder: Path) -> Path:
    return bring_file(url)


@errors_for_user()
def bring_file(url: str) -> Path:
    """Copy an object to this host, if it differs from what is there; returns the file.

    Raises:
        UserError: it can't be brought.
    """
    target = copy_of(url)
    parent, key = url.rsplit("/", 1)
    try:
        bucket = Bucket(parent)
        _bring(bucket, key, bucket.look(key), target)
    except FileNotFoundError:
        raise UserError(f"{url}: there is no such object") from None
    return target


@contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """Let one process of this host at a time into a block with this path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@errors_for_user()
def bring(
    url: str,
    progress: Progress = lambda done, total, message: None,
    only: Set[Path] | None = None,
) -> Path:
    """Copy an object, or all objects below a name, to this host; returns the file or folder.

    What is there already, of the same size and ETag, is not brought again; when all are brought, what is no longer in
    the bucket is removed.

    Args:
        url: the name.
        progress: told of the bytes.
        only: the copies that are needed, or their folders; None: all.

    Raises:
        UserError: nothing is there, or it can't be read or changes meanwhile.
    """
    target = copy_of(url)
    bucket = Bucket(url)
    try:
        objects = bucket.objects()
        if not objects:
            return bring_file(url)
        _require_names(url, objects)
        needed = {
            key: stored
            for key, stored in sorted(objects.items())
            if only is None or not only.isdisjoint((target / key, (target / key).parent))
        }
        with alone_with(target):
            _bring_all(bucket, needed, target, progress)
            if only is None:
                remove_others(target, objects)
    except FileNotFoundError as error:
        raise BucketError(errno.EIO, f"it changes meanwhile: {error}", url) from None
    return target


def _bring_all(bucket: Bucket, objects: Mapping[str, Stored], target: Path, progress: Progress) -> None:
    total = sum(stored.size for stored in objects.values())
    done = 0
    for key, stored in objects.items():
        progress(done, total, f"bringing {bucket.url}/{key}")
        _bring(bucket, key, stored, target / key)
        done += stored.size


def remove_others(folder: Path, keys: Collection[str]) -> None:
    """Remove the files of a folder that are copies of no object."""
    for path in [path for path in folder.rglob("*") if is_file(path)]:
        if path.relative_to(folder).as_posix() not in keys:
            path.unlink()


def _require_names(url: str, keys: Mapping[str, Stored]) -> None:
    for key in keys:
        if any(part in ("", ".", "..") or "\0" in part for part in key.split("/")):
            raise UserError(f"{url}: the object {key!r} has a name that no file can have; remove or rename it")


def _bring(bucket: Bucket, key: str, stored: Stored, target: Path) -> None:
    """Copy an object, unless it is there."""
    if is_here(target, stored):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, f"{socket.gethostname()}-{os.getpid()}") as file:
        for start in range(0, stored.size, _RANGE_BYTES):
            content, e_tag = bucket.get_range(key, start, min(stored.size, start + _RANGE_BYTES))
            if e_tag != stored.e_tag:
                raise UserError(f"{bucket.url}/{key}: changed while it was read; run the same command again")
            file.write(content)
    os.utime(target, ns=2 * (_time_of(stored),))


def is_here(copy: Path, stored: Stored) -> bool:
    """Whether a file is the copy of an object."""
    try:
        status = copy.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (stored.size, _time_of(stored))


def _time_of(stored: Stored) -> int:
    """When a copy is said to have been changed, in nanoseconds: the object's second, and a fraction by its ETag.

    Objects that replace each other within a second differ, and copies on several hosts are alike.
    """
    return int(stored.modified) * 10**9 + xxhash.xxh3_64_intdigest(stored.e_tag.encode()) % 10**9


def has_all(url: str, manifest: str) -> bool:
    """Whether `put_folder` has put a folder there to its end.

    Raises:
        UserError: the bucket can't be looked at, or has something else there.
    """
    keys, is_unfinished = _looked_at(url)
    if keys and manifest not in keys and not is_unfinished:
        raise UserError(f"{url}: has other objects than prepared text; choose another output")
    return manifest in keys and not is_unfinished


def room_for(url: str) -> Path:
    """A folder on this host that does not exist yet, in which a command makes what `put_folder` puts at a place.

    Raises:
        UserError: the bucket can't be looked at, or has something there that no killed call of `put_folder` has left.
    """
    folder = copy_of(url)
    folder = folder.with_name(f".{folder.name}.new")
    keys, is_unfinished = _looked_at(url)
    if keys and not is_unfinished:
        raise UserError(f"{url} exists; name another place, or remove it")
    shutil.rmtree(folder, ignore_errors=True)  # left behind by a killed process
    return folder


@errors_for_user()
def _looked_at(url: str) -> tuple[Set[str], bool]:
    """The keys at a place, and whether a call of `put_folder` has not come to its end there."""
    keys = Bucket(url).list().keys()
    return keys, any(key.rpartition("/")[2] == UNFINISHED for key in keys)


@errors_for_user()
def put_folder(folder: Path, url: str, manifest: str, progress: Progress, put: Put | None = None) -> None:
    """Put the files of a folder, the one called `manifest` last, in place of what a call that was killed has put.

    Until then, an object in each folder says that it is unfinished. `put` puts a file (default: `put_file`).

    Raises:
        UserError: a file is too large, the bucket refuses, or has another manifest.
    """
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if is_file(path)}
    sizes = {key: path.stat().st_size for key, path in files.items()}
    bucket = bucket_for(files.values(), url)
    put = put or put_file

    def tell(key: str, before: int, done: int) -> None:
        progress(before + done, sum(sizes.values()), f"putting {url}/{key}")

    marks = sorted({f"{key.rpartition('/')[0]}/{UNFINISHED}".lstrip("/") for key in files})
    done = 0
    try:
        left = bucket.objects().keys()
        for mark in marks:
            bucket.put(mark, b"")
        stays = files.keys() if left.isdisjoint(marks) else files.keys() - {manifest}  # a killed call may have put it
        bucket.delete(left - stays - set(marks))
        for key in sorted(files.keys() - {manifest}):
            put(bucket, key, files[key], partial(tell, key, done))
            done += sizes[key]
        bucket.create(manifest, files[manifest].read_bytes())
        bucket.delete(marks)
    except FileExistsError:
        raise UserError(f"{url}: another command has put its files here meanwhile; choose another output") from None


def bucket_for(files: Iterable[Path], url: str) -> Bucket:
    """The place at which some files are put by `put_file`; it waits long enough for the largest request.

    Raises:
        UserError: a file is too large.
    """
    sizes = {path.stat().st_size: path for path in files}
    largest = max(sizes, default=0)
    if largest > _MAX_BYTES:
        raise UserError(f"{sizes[largest]} is larger than 5 TiB, the most that an object can have")
    at_once = max((size if size <= _ONE_REQUEST else AT_ONCE * _part_bytes(size) for size in sizes), default=0)
    return Bucket(url, patient=Patience(90 + at_once / _SLOWEST, 180 + at_once / _SLOWEST))


def put_file(bucket: Bucket, key: str, path: Path, progress: Callable[[int], None] = lambda done: None) -> None:
    """Create or replace an object by a file's content; `progress` is told how many bytes have been read."""
    size = path.stat().st_size
    progress(0)
    with path.open("rb") as file:
        if size > _ONE_REQUEST:
            part_bytes = _part_bytes(size)
            bucket.put_parts(key, _read_in_parts(file, part_bytes, progress), size, part_bytes)
        else:
            bucket.put(key, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")


def _part_bytes(size: int) -> int:
    return max(_PART_BYTES, -(-size // _MAX_PARTS))


def _read_in_parts(file: IO[bytes], part_bytes: int, progress: Callable[[int], None]) -> Iterator[bytes]:
    """Read a file; that it is Python's own code that does it lets a signal end an upload between two parts."""
    while content := file.read(part_bytes):
        yield content
        progress(file.tell())
