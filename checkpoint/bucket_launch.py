"""The launches of a run in a bucket, of which only the newest may write.

A launch claims the next number by creating an object, `incarnations/000007.json`, which one of several can. It rewrites
the object every few seconds as its sign of life, until it records there that it has ended. A launch that finds an older
one alive leaves it the run; one that gives no sign of life has lost it.

Every save puts its files under its step, its launch's number, and how often that launch has begun (again, after going
back): `checkpoints/step-00000300/of-7.0/`. The record of a launch has the steps at which it began. A checkpoint belongs
to the run unless a later beginning was at an earlier step. So what an older launch commits when it wakes, however late,
belongs to the run no longer than the newest one has begun; and nothing is ever put where something has been.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint.bucket import Bucket
from checkpoint.incarnation import FOLDER, Incarnation, Superseded
from checkpoint.lock import FolderInUse
from configs.untrusted import parse_json

BEAT_SECONDS = 5.0
"""Time between signs of life."""
SILENCE_SECONDS = 20.0
"""A launch that gives no sign of life for so long has ended."""
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Claim(Incarnation):
    """One launch of a run in a bucket, on the rank that has claimed it, or on another."""

    bucket: Bucket
    record: dict[str, Any] = field(default_factory=dict)
    """The content of its object, on the rank that has claimed it."""
    _writing: threading.Lock = field(default_factory=threading.Lock)
    """Keeps a sign of life from replacing a record that is newer than it."""
    _ends: threading.Event = field(default_factory=threading.Event)
    _newer: list[Superseded] = field(default_factory=list)
    _beats: list[threading.Thread] = field(default_factory=list)

    @property
    def mark(self) -> str:
        return f".of-{self.number}.{len(self.record['begins']) - 1}"

    def newest(self) -> int:
        return max(numbers_in(self.bucket), default=0)

    def facts(self, number: int) -> dict[str, Any]:
        return record_of(self.bucket, number)

    def require_newest_known(self) -> None:
        """Costs no request: a newer launch is known once this one has given its next sign of life."""
        if self._newer:
            raise self._newer[0]

    def begin(self, step: int) -> None:
        self.require_current()
        self.record["begins"].append(step)
        self._write()

    def show_life(self) -> None:
        """Nothing: a thread of its own does (`beat`), which may wait for the network."""

    def beat(self, at_each: Callable[[], None]) -> None:
        """Give signs of life, and look for newer launches, in a thread until `end`.

        Args:
            at_each: called as well; its OSErrors are ignored.
        """

        def beat() -> None:
            while not self._ends.wait(BEAT_SECONDS):
                with suppress(OSError):
                    self.record["beats"] += 1
                    self._write()
                    self.require_current()
                    at_each()

        def watched() -> None:
            try:
                beat()
            except Superseded as error:
                self._newer.append(error)

        thread = threading.Thread(target=watched, name="sign of life", daemon=True)
        self._beats.append(thread)
        thread.start()

    def end(self) -> None:
        """Record that this launch has ended, so that the next need not wait for a sign of life."""
        self._ends.set()
        for thread in self._beats:
            thread.join()
        self.record["ended"] = True
        self._write()

    def _write(self) -> None:
        with self._writing:
            self.bucket.put(_key(self.number), _text(self.record))


def claim_in(
    bucket: Bucket, folder: Path, facts: Mapping[str, Any], warn: Callable[[str], None], waits: bool = False
) -> Claim:
    """Claim the next number for this launch.

    Args:
        bucket: the run's.
        folder: the local folder that stands for it.
        facts: JSON-able; recorded with host, process and time.
        warn: called if the last launch has ended without a word.
        waits: whether a launch that is alive may be about to end, as in an elastic run.

    Raises:
        FolderInUse: another launch is alive.
        BucketError: as in `Bucket`.
    """
    told = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), **facts}
    while True:
        newest = max(numbers_in(bucket), default=0)
        if newest:
            _await_end(bucket, newest, warn, waits)
        record = {**told, "begins": [], "beats": 0, "ended": False}
        with suppress(FileExistsError):  # another was first: look whether it is alive
            bucket.create(_key(newest + 1), _text(record))
            return Claim(folder / FOLDER, newest + 1, bucket, record)


def _await_end(bucket: Bucket, number: int, warn: Callable[[str], None], waits: bool) -> None:
    """Wait until a launch has ended or has given no sign of life for long enough.

    Raises:
        FolderInUse: it is alive.
    """
    first = record_of(bucket, number)
    who = f"process {first.get('pid')} on host {first.get('host')}"
    deadline = time.monotonic() + SILENCE_SECONDS
    seen = first
    while not seen.get("ended"):
        if time.monotonic() > deadline:
            if seen != first:
                break
            warn(
                f"the last launch of {bucket.url} ({who}) has not ended, but has given no sign of life for "
                f"{SILENCE_SECONDS:.0f} s: this one takes it over"
            )
            return
        if seen != first and not waits:
            break
        time.sleep(_POLL_SECONDS)
        seen = record_of(bucket, number)
    else:
        return
    raise FolderInUse(f"{bucket.url} is in use by {who}; wait for it, stop it, or set job.output_dir to another place")


def beginnings(bucket: Bucket) -> list[tuple[int, int, int]]:
    """The launches' numbers, how often each had begun before, and the step at which it began then; in order."""
    numbers = sorted(numbers_in(bucket))
    records = bucket.pool.map(lambda number: record_of(bucket, number), numbers)
    return [
        (number, index, step)
        for number, record in zip(numbers, records, strict=True)
        for index, step in enumerate(record.get("begins") or [])
    ]


def numbers_in(bucket: Bucket) -> list[int]:
    """The numbers that launches have claimed."""
    stems = [key.removeprefix(f"{FOLDER}/").removesuffix(".json") for key in bucket.list(f"{FOLDER}/")]
    return [int(stem) for stem in stems if stem.isdecimal()]


def record_of(bucket: Bucket, number: int) -> dict[str, Any]:
    """A launch's record; empty if it is not in the form of `claim_in`."""
    try:
        record = parse_json(bucket.get(_key(number)).decode())
    except (FileNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _key(number: int) -> str:
    return f"{FOLDER}/{number:06d}.json"


def _text(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode()
