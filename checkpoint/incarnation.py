"""The incarnations of an elastic run: launches of one job, of which only the newest may write.

When a network splits or a host hangs, torchrun may form the job again while ranks of the attempt before still exist.
The kernel's lock of the run folder cannot tell: a process that hangs keeps it. So each launch claims the next number by
creating a file in `incarnations/`, which only one process can (O_EXCL), and before anything is committed looks whether
there is a higher one. A checkpoint is thus never committed by an older launch, at whatever moment it was halted:

- The folder of an unfinished save bears its launch's number, so two launches never write to the same files.
- A new launch first claims its number, then renames the folders of unfinished saves away, then looks which checkpoints
  there are. An older launch looks for a newer number after it has made such a folder, and before it renames it to a
  checkpoint. So it either sees the newer number, or its folder was there to be renamed away.

This relies on nothing but atomic creations and renames, as a POSIX file system has, and NFS between its clients. Lines
of `metrics.jsonl` and `status.json` are guarded by the same look, but not by a rename: a process that is halted in the
microseconds between the look and the write may, when it continues, still write one line.

A launch also records at which step it began.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.files import insist, synced, write_atomically
from configs.untrusted import MAX_JSON_BYTES, parse_json, read_file

FOLDER = "incarnations"
_SUFFIX = ".json"


class Superseded(UserError):
    """A newer launch of the job has taken the run over: this one may write nothing more."""

    may_pass = True


@dataclass(frozen=True)
class Incarnation:
    """One launch of an elastic run."""

    folder: Path
    """`incarnations/` of the run folder."""
    number: int

    @property
    def mark(self) -> str:
        """The mark in the names of its unfinished saves."""
        return f".of-{self.number}"

    def require_current(self) -> None:
        """Check that no newer launch has taken the run over.

        Raises:
            Superseded: one has.
        """
        newest = self.newest()
        if newest != self.number:
            other = self.facts(newest)
            who = f"process {other.get('pid')} on host {other.get('host')}"
            raise Superseded(
                f"incarnation {self.number} of this run was superseded by incarnation {newest} ({who}), which goes on "
                "from the newest checkpoint; this one ends, and has written nothing since"
            )

    def is_current(self) -> bool:
        """Whether no newer launch has taken the run over, as far as `require_newest_known` knows."""
        try:
            self.require_newest_known()
        except Superseded:
            return False
        return True

    def newest(self) -> int:
        """The number of the newest launch."""
        return newest_number(self.folder)

    def facts(self, number: int) -> dict[str, Any]:
        """A launch's record, as `facts_of`."""
        return facts_of(self.folder, number)

    def require_newest_known(self) -> None:
        """Like `require_current`, as far as is known at little cost: for each line of a file, not for a commit."""
        with suppress(OSError):  # of a disk that refuses for a moment; that alone ends no run
            self.require_current()

    def begin(self, step: int) -> None:
        """Record, once and again after going back, that the run continues from `step` completed steps.

        Raises:
            Superseded: a newer launch has taken the run over.
            OSError: the file system refuses.
        """
        insist(self.require_current)
        facts = facts_of(self.folder, self.number) | {"began": step}
        insist(lambda: write_atomically(_file(self.folder, self.number), [json.dumps(facts) + "\n"]))

    def show_life(self) -> None:
        """Renew the time of its file, by which another launch sees that this one is alive.

        Raises:
            OSError: the file system refuses.
        """
        os.utime(_file(self.folder, self.number))


class Alone:
    """The launch of a run that is not elastic: the lock of its folder keeps others out."""

    mark = ""

    def require_current(self) -> None:
        """Nothing can have taken the run over."""

    require_newest_known = require_current

    def begin(self, step: int) -> None:
        """Nothing is recorded."""


def claim(run_folder: Path, facts: Mapping[str, Any]) -> Incarnation:
    """Claim the next number for this launch.

    Args:
        run_folder: must exist.
        facts: JSON-able; recorded with host, process and time.

    Raises:
        OSError: the folder can't be written.
    """
    folder = run_folder / FOLDER
    folder.mkdir(exist_ok=True)
    told = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), **facts}
    while True:
        number = newest_number(folder) + 1
        try:
            with synced(_file(folder, number)) as file:
                file.write((json.dumps(told) + "\n").encode())
        except FileExistsError:
            continue
        return Incarnation(folder, number)


def newest_number(folder: Path) -> int:
    """The highest number in `incarnations/`; 0 if there is none."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return 0
    stems = [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]
    return max((int(stem) for stem in stems if stem.isdecimal()), default=0)


def facts_of(folder: Path, number: int) -> dict[str, Any]:
    """A launch's record; empty if its file is not in the form of `claim`."""
    try:
        facts = parse_json(read_file(_file(folder, number), MAX_JSON_BYTES).decode())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def last_sign_of_life(folder: Path) -> int:
    """A number that changes as long as the newest launch is alive (`show_life`); 0 if there is none."""
    try:
        with _file(folder, newest_number(folder)).open("rb") as file:  # opening makes NFS ask the server
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}{_SUFFIX}"
