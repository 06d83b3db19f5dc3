"""A run's folder in a bucket: checkpoints are put there as they are written, and read from there part by part.

The run has a folder on the local disk of each host, as every run has. On the first rank's host its files are those of
the run, which are put into the bucket with each save; but of a checkpoint only what describes it is there, and its
tensors are placeholders: files of their size, without content. What counts is the bucket.

In the bucket a file of tensors is a series of parts, which four threads put and get. A part's key has the hash of its
content, which is compared whenever the part is read, so that a rank reads and checks just the parts that it needs.
MANIFEST.json is put last, if there is none; a prefix without it is no checkpoint, and the next launch removes it.
"""

import errno
import io
import json
import os
import re
import shutil
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import xxhash

from checkpoint import bucket_files
from checkpoint.bucket import AT_ONCE, PROBE, Bucket, errors_for_user
from checkpoint.bucket_launch import Claim, beginnings, claim_in
from checkpoint.incarnation import FOLDER
from checkpoint.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    TRAINER_NAME,
    UNFINISHED,
    FileEntry,
    damaged,
    is_plain_name,
    read_manifest,
    step_folder,
    steps_in,
)
from checkpoint.storage import FolderStorage, HashedFile
from configs.errors import UserError
from configs.files import exists, is_file, is_link, replacing, write_atomically
from configs.places import standing_for, url_fault
from configs.untrusted import parse_json

PART_BYTES = 8 << 20
_DESCRIBING = (MANIFEST_NAME, TRAINER_NAME, INDEX_NAME)
"""Files that the first rank writes, one object each."""
_OF_A_RANK = "__"
"""How the names of the files begin that are put in parts. All others are one object each, an import's tokenizer too."""
_ATTEMPT = re.compile(r"checkpoints/step-(\d{8,})/of-(\d+)\.(\d+)/")
FORKED = "of-0.0"
"""The prefix of a checkpoint that was put before the run's first launch."""
_IN_A_RUN = re.compile(r"/checkpoints(/step-\d{8,})?$")
_NOT_PUT = re.compile(r"(^|/)(step-\d+[^/]*|imported-[0-9a-f]+|\.[^/]*)/|(^|/)\.[^/]*$")
"""Paths in a run's folder that are not put as they are: checkpoints, weights that are imported again, hidden files."""


class BucketStorage(FolderStorage):
    """A run in a bucket, as a place for checkpoints; paths are those of the local folder."""

    def __init__(
        self, bucket: Bucket, folder: Path, claim: Claim | None = None, checkpoints: Path | None = None
    ) -> None:
        """
        Args:
            bucket: the run's.
            folder: the local run folder.
            claim: this launch; None: the run is only read.
            checkpoints: the local folder of the checkpoints (default: the run's).
        """
        super().__init__()
        self._bucket = bucket
        self._folder = folder
        self._root = checkpoints or folder / "checkpoints"
        self._claim = claim
        self._places: dict[Path, str] = {}
        self._known: dict[str, tuple[int, int]] = {}
        """Size and time of each file of the run's folder that the bucket has."""
        self._being_put: dict[str, threading.Lock] = {}
        """Keeps a thread from putting an older content of a file after another one's newer content."""
        self._begun: set[str] = set()
        """The prefixes at which this launch has begun a checkpoint."""
        self._left: set[str] = set()
        """The prefixes of checkpoints that are no longer the run's."""

    @property
    def claim(self) -> Claim:
        """This launch."""
        assert self._claim is not None
        return self._claim

    # ------------------------------------------------------------------ the run's folder

    def fetch(self, log: Callable[[str], None] = lambda line: None) -> None:
        """Make the local folder what the bucket has; a launch also removes what interrupted saves have left there.

        Raises:
            UserError: it is a fork, of which not all has been put.
        """
        keys = self._bucket.list()
        if bucket_files.UNFINISHED in keys:
            raise UserError(f"{self._bucket.url} has not been put to its end; run the command that puts it again")
        found = {key: match for key in keys if (match := _ATTEMPT.match(key))}
        complete = {match[0] for key, match in found.items() if key == f"{match[0]}{MANIFEST_NAME}"}
        if self._claim:
            shutil.rmtree(self._root, ignore_errors=True)
            self._bucket.delete(key for key in keys if key.startswith(PROBE))
            self._remove_leftovers([key for key, match in found.items() if match[0] not in complete], log)
        own = [key for key in keys if key not in found and not key.startswith(f"{FOLDER}/") and _is_safe(key)]
        list(self._bucket.pool.map(self._fetch_file, own))
        places = _of_the_line(complete, beginnings(self._bucket))
        self._left = complete - set(places.values())
        for step in set(steps_in(self._root)) - places.keys():
            shutil.rmtree(step_folder(self._root, step))
        for step, place in places.items():
            self.fetch_description(step_folder(self._root, step), place)

    def _remove_leftovers(self, keys: list[str], log: Callable[[str], None]) -> None:
        self._bucket.delete(keys)
        for place in sorted({_ATTEMPT.match(key)[0] for key in keys}):  # type: ignore[index]
            log(f"removed {self._bucket.url}/{place}, which an interrupted save has left behind")

    def _fetch_file(self, key: str) -> None:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # removed since it was listed
            content = self._bucket.get(key)
            with replacing(path) as file:
                file.write(content)
            self._known[key] = _stamp(path)

    def fetch_description(self, checkpoint: Path, place: str) -> None:
        """Fetch what describes a checkpoint; one that is not as it was written is reported by what reads it."""
        self._places[checkpoint] = place
        try:
            manifest = self._bucket.get(f"{place}{MANIFEST_NAME}")
        except FileNotFoundError:  # removed since it was listed
            return
        with suppress(OSError):
            if (checkpoint / MANIFEST_NAME).read_bytes() == manifest:
                return
        shutil.rmtree(checkpoint, ignore_errors=True)
        _place_file(checkpoint).unlink(missing_ok=True)
        checkpoint.mkdir(parents=True)
        sizes: dict[str, int] = {}
        with suppress(ValueError, KeyError, TypeError):
            files = parse_json(manifest.decode())["files"]
            sizes = {name: files[name]["size"] for name in files if is_plain_name(name)}
        for name in {*_DESCRIBING, *(name for name in sizes if not name.startswith(_OF_A_RANK))}:
            with suppress(FileNotFoundError):
                (checkpoint / name).write_bytes(self._bucket.get(f"{place}{name}"))
        os.utime(checkpoint / MANIFEST_NAME, 2 * (self._bucket.look(f"{place}{MANIFEST_NAME}").modified,))
        with suppress(TypeError):  # a size that is none
            in_parts = {name: size for name, size in sizes.items() if name.startswith(_OF_A_RANK)}
            self._make_placeholders(checkpoint, checkpoint, in_parts)

    def _make_placeholders(self, folder: Path, checkpoint: Path, sizes: Mapping[str, int]) -> None:
        """Make the placeholders of a checkpoint in `folder`, and record where their content is."""
        told = {"url": self._bucket.url, "place": self._places[checkpoint], "has_content": False}
        if (place_told(checkpoint) or {}) | {"has_content": False} != told:
            write_atomically(_place_file(checkpoint), [json.dumps(told)])
        for name, size in sizes.items():
            if not exists(folder / name) or (folder / name).stat().st_size != size:
                (folder / name).unlink(missing_ok=True)  # a fork may have it as well
                with (folder / name).open("ab") as file:
                    file.truncate(size)

    def fill(self, checkpoint: Path, told: Mapping[str, Any]) -> None:
        """Bring the content of all files of a checkpoint, which is at a place as `place_told`, to this host.

        Raises:
            Damaged: a file is not as it was written.
        """
        self._places[checkpoint] = told["place"]
        for name, entry in read_manifest(checkpoint).files.items():
            if super().damage(checkpoint, name, entry):
                self._bring_file(checkpoint, name, entry)
        write_atomically(_place_file(checkpoint), [json.dumps({**told, "has_content": True})])

    def push(self) -> None:
        """Put the files of the local run folder that have changed, but for the checkpoints.

        Raises:
            Superseded: a newer launch has taken the run over.
        """
        self.claim.require_current()
        # Unlike `rglob`, `walk` goes on where a folder is removed meanwhile.
        for path in sorted(Path(folder, name) for folder, _, names in os.walk(self._folder) for name in names):
            key = path.relative_to(self._folder).as_posix()
            if not _NOT_PUT.search(key) and is_file(path) and not is_link(path):
                self._push_file(path, key)

    def push_status(self) -> None:
        """Put status.json, so that others see that the run is alive."""
        path = self._folder / "status.json"
        if exists(path):
            self._push_file(path, path.name)

    def _push_file(self, path: Path, key: str) -> None:
        # A lock for each file: a sign of life, which puts status.json, must not wait for a large one.
        with self._being_put.setdefault(key, threading.Lock()):
            try:
                stamp = _stamp(path)
                if self._known.get(key) == stamp:
                    return
                content = path.read_bytes()
            except FileNotFoundError:  # removed since it was listed
                return
            self._bucket.put(key, content)
            self._known[key] = stamp

    # ------------------------------------------------------------------ checkpoints

    def begin(self, checkpoint: Path) -> Path:
        self._mark = self.claim.mark
        unfinished = super().begin(checkpoint)
        place = self._key(unfinished)
        if place in self._begun:  # parts of a save that failed; else no request, for which training would wait
            self._bucket.delete(self._bucket.list(place))
        self._begun.add(place)
        return unfinished

    @contextmanager
    def put(self, file: Path) -> Generator[HashedFile, None, None]:
        key = f"{self._key(file.parent)}{file.name}"
        if not file.name.startswith(_OF_A_RANK):
            with super().put(file) as stream:
                yield stream
            if file.name != MANIFEST_NAME:
                self._bucket.put(key, file.read_bytes())
        else:
            with _Upload(self._bucket, key) as upload:
                yield HashedFile(cast(IO[bytes], upload))

    def commit(self, unfinished: Path, checkpoint: Path) -> None:
        place = self._key(unfinished)
        manifest = (unfinished / MANIFEST_NAME).read_bytes()
        self.push()
        self.claim.require_current()  # putting the files may have taken long
        self._bucket.create(f"{place}{MANIFEST_NAME}", manifest)
        self._places[checkpoint] = place
        files = parse_json(manifest.decode())["files"]
        sizes = {name: files[name]["size"] for name in files if name.startswith(_OF_A_RANK)}
        self._make_placeholders(unfinished, checkpoint, sizes)
        super().commit(unfinished, checkpoint)

    def discard(self, unfinished: Path) -> None:
        with suppress(OSError):
            self._bucket.delete(self._bucket.list(self._key(unfinished)))
        super().discard(unfinished)

    def open(self, file: Path) -> IO[bytes]:
        if not file.name.startswith(_OF_A_RANK) or self._root not in file.parents:
            return super().open(file)
        return cast(IO[bytes], _Download(self._bucket, f"{self._key(file.parent)}{file.name}", file))

    def bring(self, checkpoint: Path, place: str, files: Mapping[str, FileEntry]) -> None:
        """Let what describes a checkpoint, which is at the prefix `place`, be read from this host's disk.

        Raises:
            Damaged: a file is not as it was written.
        """
        self._places[checkpoint] = place
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        checkpoint.mkdir(parents=True, exist_ok=True)
        sizes = {
            name: entry.size
            for name, entry in files.items()
            if name.startswith(_OF_A_RANK) and not name.endswith(".json")
        }
        self._make_placeholders(checkpoint, checkpoint, sizes)
        for name, entry in files.items():
            if name not in sizes and super().damage(checkpoint, name, entry):
                self._bring_file(checkpoint, name, entry)

    def _bring_file(self, checkpoint: Path, name: str, entry: FileEntry) -> None:
        key = f"{self._places[checkpoint]}{name}"
        try:
            with replacing(checkpoint / name, f"{socket.gethostname()}-{os.getpid()}") as file:
                if not name.startswith(_OF_A_RANK):
                    file.write(self._bucket.get(key))
                else:
                    shutil.copyfileobj(_Download(self._bucket, key, checkpoint / name), file, AT_ONCE * PART_BYTES)
        except (FileNotFoundError, _Changed) as error:
            raise damaged(checkpoint, f"{name} can't be read: {error.strerror}") from None
        if problem := super().damage(checkpoint, name, entry):
            raise damaged(checkpoint, problem)

    def damage(self, checkpoint: Path, name: str, entry: FileEntry) -> str | None:
        """Compare sizes only: the server has compared each part with its hash, and it is compared again when read."""
        if not name.startswith(_OF_A_RANK) or self._root not in checkpoint.parents:
            return None if self._root in checkpoint.parents else super().damage(checkpoint, name, entry)
        size = sum(self._bucket.list(f"{self._key(checkpoint)}{name}/").values())
        return None if size == entry.size else f"{name} has {size} bytes in {self._bucket.url} instead of {entry.size}"

    def room(self, folder: Path) -> None:
        """A bucket has no size."""

    def remove(self, checkpoint: Path) -> None:
        if exists(checkpoint):
            super().remove(checkpoint)
        place = self._key(checkpoint)
        self._places.pop(checkpoint, None)
        _place_file(checkpoint).unlink(missing_ok=True)
        self._bucket.delete([f"{place}{MANIFEST_NAME}"])
        self._bucket.delete(self._bucket.list(place))

    def abandoned(self, root: Path) -> Sequence[Path]:
        """The same, as `fetch` has found it: checkpoints that have no folder here."""
        names = [f"{match[1]}.of-{match[2]}.{match[3]}" for match in map(_ATTEMPT.fullmatch, self._left) if match]
        return [root / f"step-{name}" for name in sorted(names)]

    def _key(self, folder: Path) -> str:
        """The prefix of a checkpoint's keys: where it is, or where its files are put until it is committed."""
        if folder in self._places:
            return self._places[folder]
        step, _, launch = folder.name.removesuffix(UNFINISHED).rpartition(".of-")
        return f"checkpoints/{step}/of-{launch}/"


def place_told(checkpoint: Path) -> dict[str, Any] | None:
    """Where the content of a local checkpoint is: `url`, `place` there, and whether it `has_content` here as well.

    None if it is in no bucket.
    """
    try:
        return dict(parse_json(_place_file(checkpoint).read_text()))
    except FileNotFoundError:
        return None


def _place_file(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.place")


def storage_of(checkpoint: Path, files: Mapping[str, FileEntry], told: Mapping[str, Any] | None) -> FolderStorage:
    """Where a checkpoint, of this or another run, can be read on this host.

    Args:
        checkpoint: its folder on the first rank's host.
        files: those of its manifest.
        told: what `place_told` is there.

    Raises:
        Damaged: what describes it is not as it was written.
        BucketError: it can't be read.
    """
    if not told:
        return FolderStorage()
    storage = BucketStorage(Bucket(told["url"]), checkpoint.parent.parent, checkpoints=checkpoint.parent)
    storage.bring(checkpoint, told["place"], files)
    return storage


@errors_for_user()
def local_copy(name: str) -> Path:
    """A local copy of a run, a checkpoint, or several runs in object storage, but for the content of tensors.

    It is in `runs/copies/`, where the next call finds what has not changed. `find_model` brings the tensors.

    Raises:
        UserError: nothing is there, or it can't be read.
    """
    if fault := url_fault(name):
        raise UserError(f"{name}: {fault}")
    place = _IN_A_RUN.sub("", name.rstrip("/"))
    inside = name.rstrip("/").removeprefix(place)
    folder = standing_for(place)
    bucket = Bucket(place)
    keys = bucket.list()
    if MANIFEST_NAME in keys:  # a checkpoint that is no run's
        BucketStorage(bucket, folder.parent, checkpoints=folder.parent).fetch_description(folder, "")
        return folder
    ends = [key.removesuffix("config.toml") for key in keys if key.endswith("config.toml")]
    for run in [""] if "" in ends or f"{FOLDER}/000001.json" in keys else ends:
        BucketStorage(Bucket(f"{place}/{run}"), folder / run).fetch()
    found = folder / inside.removeprefix("/")
    if not ends or not exists(found):
        raise UserError(f"{name}: there is no run or checkpoint of that name in the bucket")
    return found


@contextmanager
def taken(url: str, warn: Callable[[str], None]) -> Iterator[BucketStorage]:
    """A run in a bucket, for a command that changes it: no launch has it meanwhile. Its copy is `standing_for(url)`.

    Raises:
        UserError: it is in use, or the bucket refuses.
    """
    folder = standing_for(url)
    bucket = Bucket(url)
    with errors_for_user():
        claim = claim_in(bucket, folder, {}, warn)
        claim.beat(lambda: None)
        try:
            storage = BucketStorage(bucket, folder)
            storage.fetch()
            yield storage
        finally:
            claim.end()


@errors_for_user()
def with_tensors(checkpoint: Path) -> Path:
    """The same checkpoint; if its tensors are placeholders, their content is brought first.

    Raises:
        UserError: it can't be read, or is damaged.
    """
    told = place_told(checkpoint)
    if told is None or told.get("has_content"):
        return checkpoint
    storage = BucketStorage(Bucket(told["url"]), checkpoint.parent.parent, checkpoints=checkpoint.parent)
    storage.fill(checkpoint, told)
    return checkpoint


def put_as_saves_do(bucket: Bucket, key: str, path: Path, progress: Callable[[int], None]) -> None:
    """Put a checkpoint's file as a save does, so that ranks can read the parts that they need (`bucket_files.Put`)."""
    if not path.name.startswith(_OF_A_RANK):
        bucket_files.put_file(bucket, key, path, progress)
        return
    with _Upload(bucket, key) as upload, path.open("rb") as file:
        while content := file.read(PART_BYTES):
            upload.write(content)
            progress(file.tell())


def _of_the_line(complete: set[str], begins: list[tuple[int, int, int]]) -> dict[int, str]:
    """The prefixes of the checkpoints that belong to the run, by step, in order."""
    places: dict[int, tuple[tuple[int, int], str]] = {}
    for place in complete:
        match = _ATTEMPT.fullmatch(place)
        assert match
        step, launch, index = map(int, match.groups())
        is_left = any((number, time) > (launch, index) and began < step for number, time, began in begins)
        if not is_left:
            places[step] = max(places.get(step, ((-1, -1), "")), ((launch, index), place))
    return {step: place for step, (_, place) in sorted(places.items())}


def _is_safe(key: str) -> bool:
    """Whether a key is the path of a file within the run's folder that a launch puts there."""
    return all(is_plain_name(part) for part in key.split("/")) and not _NOT_PUT.search(key)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


class _Upload:
    """Puts what is written as parts, each when it is full."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket = bucket
        self._key = key
        self._part = bytearray()
        self._under_way: deque[Future[None]] = deque()
        self._count = 0

    def write(self, data: Any) -> None:
        rest = memoryview(data)
        rest = rest.cast("B") if rest.nbytes else rest[:0]
        while rest.nbytes:
            room = PART_BYTES - len(self._part)
            self._part += rest[:room]
            rest = rest[room:]
            if len(self._part) == PART_BYTES:
                self._send()

    def _send(self) -> None:
        content = bytes(self._part)
        self._part.clear()
        key = f"{self._key}/{self._count:06d}-{xxhash.xxh3_128_hexdigest(content)}"
        self._count += 1
        while len(self._under_way) >= AT_ONCE:
            self._under_way.popleft().result()
        self._under_way.append(self._bucket.pool.submit(self._bucket.put, key, content))

    def __enter__(self) -> "_Upload":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._part:
            self._send()
        for each in self._under_way:
            if kind is None:
                each.result()
            else:
                each.cancel()


class _Download(io.RawIOBase):
    """A file in parts, open for reading at any position; each part is compared with its hash."""

    def __init__(self, bucket: Bucket, key: str, file: Path) -> None:
        """`file`: its placeholder."""
        self._bucket = bucket
        self._key = key
        self._file = file
        self._at = 0
        self._parts: list[tuple[int, int, str]] | None = None
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size()}[whence]
        self._at = begin + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        stop = min(self._at + target.nbytes, self._size())
        wanted = [n for n, (start, end, _) in enumerate(self._listed()) if start < stop and end > self._at]
        begin = self._at
        for first in range(0, len(wanted), AT_ONCE):
            some = wanted[first : first + AT_ONCE]
            for number, content in zip(some, self._bucket.pool.map(self._part, some), strict=True):
                start, end, _ = self._listed()[number]
                low = max(start, begin)
                high = min(end, stop)
                target[low - begin : high - begin] = content[low - start : high - start]
                self._keep(number, content)
        self._at = max(stop, begin)
        return self._at - begin

    def _size(self) -> int:
        parts = self._listed()
        return parts[-1][1] if parts else 0

    def _listed(self) -> list[tuple[int, int, str]]:
        """First byte, end and key of each part."""
        if self._parts is None:
            found = sorted(self._bucket.list(f"{self._key}/").items())
            self._parts = []
            at = 0
            for key, size in found:
                self._parts.append((at, at + size, key))
                at += size
            if exists(self._file) and at != (size := self._file.stat().st_size):
                raise self._damage(f"it has {at} bytes in {self._bucket.url} instead of {size}")
        return self._parts

    def _part(self, number: int) -> bytes:
        kept = self._kept.get(number)
        if kept is not None:
            return kept
        start, end, key = self._listed()[number]
        content = self._bucket.get(key)
        if len(content) != end - start or not key.endswith(f"-{xxhash.xxh3_128_hexdigest(content)}"):
            raise self._damage(f"{self._bucket.url}/{key} has changed since it was written (its hash differs)")
        return content

    def _keep(self, number: int, content: bytes) -> None:
        self._kept[number] = content
        self._kept.move_to_end(number)
        while len(self._kept) > AT_ONCE:
            self._kept.popitem(last=False)

    def _damage(self, reason: str) -> "_Changed":
        return _Changed(errno.EBADMSG, reason, str(self._file))


class _Changed(OSError):
    """An object is not what was put."""
