"""The run folder: one that all hosts share, or one on each host's own disk.

If hosts share none, the folder of the first rank's host is the run's *home*. It has what a shared folder would have:
whole checkpoints, metrics.jsonl, status.json. The other hosts that train have what lets them take its place: before a
copy of the state in memory (`checkpoint.memory_copies`) is committed, the run's records go to all of them, and so does
the account of where each launch began, at once. When hosts are lost or join, torchrun may give the first rank to
another host. So a launch first brings home what is newer elsewhere: that account, the records, and the newest
checkpoint that is not out of date.

A checkpoint is written on all hosts, each with the files of its ranks, and then sent home, where it is committed. To
load one, the others fetch what their ranks need.

All methods are collective unless they say otherwise.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import xxhash

from checkpoint import folder as folders
from checkpoint import manifest as manifests
from checkpoint.exchange import assign, exchange
from checkpoint.incarnation import FOLDER, beginnings, facts_in, is_of_this_line, newest_number
from checkpoint.manifest import MANIFEST_NAME, UNFINISHED, FileEntry, step_folder, steps_in
from checkpoint.store import SaveFailed
from configs.errors import UserError, listed
from configs.files import identity, sync_folder, write_atomically
from parallelisms.ranks import gather, on_rank, on_rank_zero

RECORDS = ("metrics.jsonl", "fingerprints.jsonl")
"""Files that a launch appends to, and that the next one cuts back to where it begins."""
_STATUS = "status.json"
_STAMP = ".records.json"
"""Of which launch a folder's records are, and how often launches had begun by then."""
_FETCHED = f"step-fetched{UNFINISHED}"


@dataclass(frozen=True)
class _Seen:
    """What a folder has."""

    claims: dict[str, str]
    """The files of `incarnations/`, by name."""
    records: tuple[list[int], int]
    """How new they are: the stamp, then the bytes of metrics.jsonl."""
    status: str
    lines: dict[int, str | None]
    """Of its checkpoints, by step; None if one can't be read."""


class SharedFolder:
    """The run folder, if all ranks see the same one: nothing has to be sent."""

    index = 0
    """Which of the run's folders this rank has; 0 is the home."""
    readers: Sequence[int] | None = None
    """The ranks that can read what is at home; None: all."""
    is_shared = True

    def of(self, group: dist.ProcessGroup | None) -> "SharedFolder":
        """The same for the ranks of a group (None: the default one), which are the first ones of all."""
        return self

    def bring_home(self, log: Callable[[str], None], warn: Callable[[str], None]) -> None:
        """Bring home what is newer elsewhere, and tell all folders of this launch, which has its number now.

        Raises:
            UserError: a folder can't be written, or the records do not arrive.
        """

    def begin_launch(self) -> None:
        """Tell all folders where this launch begins, and remove what interrupted saves have left in them.

        Raises:
            UserError: a folder can't be written.
        """

    def mirror(self) -> None:
        """Bring the records, as they are now, from home to all other folders.

        Raises:
            SaveFailed: a folder can't be written.
        """

    def begin(self, unfinished: Path) -> None:
        """Create the folder of an unfinished save, which is at home, on the other hosts, too.

        Raises:
            SaveFailed: a host can't.
        """

    def send_home(self, unfinished: Path, files: Mapping[str, FileEntry]) -> None:
        """Send home what the ranks of the other hosts have written.

        Raises:
            SaveFailed: a file does not arrive.
        """

    def fetch(self, folder: Path, files: Mapping[str, FileEntry], needed: set[str]) -> Path:
        """Fetch what this rank needs of the checkpoint `folder` at home; returns where it then is, until `clear`.

        Raises:
            Damaged: a file does not arrive as it was written.
        """
        return folder

    def clear(self, unfinished: Path | None = None) -> None:
        """Remove an unfinished save (None: what was fetched) from this host unless it is home; waits for no rank."""


SHARED = SharedFolder()


class OwnFolders(SharedFolder):
    """The run folders of hosts that share none, as one rank sees them."""

    is_shared = False

    def __init__(self, folder: Path, owners: Sequence[Sequence[int]], group: dist.ProcessGroup | None = None) -> None:
        """
        Args:
            folder: this rank's run folder.
            owners: the ranks of each folder, in order; those of the home first.
            group: all of these ranks, of a backend for tensors on the CPU; None: the default one.
        """
        rank = dist.get_rank(group)
        self.folder, self._owners, self._group = folder, [list(ranks) for ranks in owners], group
        [self.index] = [index for index, ranks in enumerate(owners) if rank in ranks]
        self.readers = self._owners[0]
        self._is_first = rank == self._owners[self.index][0]
        self._seen: list[_Seen] = []
        self._newest = 0
        """Which folder has the newest records."""
        self._mirrored: dict[str, int] = {}
        """Bytes of each record that this folder has of this launch."""

    @classmethod
    def meet(cls, folder: Path, is_home: bool) -> "OwnFolders":
        """Find out which ranks have the same folder; creates it.

        Args:
            folder: this rank's run folder.
            is_home: whether it is that of rank 0.
        """
        problem = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"the run folder {folder} can't be created: {error.strerror}"
        _require_none([problem] if problem else [], None)
        owners: dict[tuple[object, ...], list[int]] = {}
        for rank, each in enumerate(gather(() if is_home else identity(folder))):
            owners.setdefault(each, []).append(rank)
        return cls(folder, list(owners.values()))

    def of(self, group: dist.ProcessGroup | None) -> "OwnFolders":
        n = dist.get_world_size(group)
        owners = [[rank for rank in ranks if rank < n] for ranks in self._owners]
        return OwnFolders(self.folder, list(filter(None, owners)), group)

    @property
    def count(self) -> int:
        """How many folders there are."""
        return len(self._owners)

    @property
    def _is_home(self) -> bool:
        return self.index == 0

    def _on_each(self, action: Callable[[], object], at_home: bool = False) -> None:
        """Run `action` on the first rank of each folder but the home's; an OSError becomes a UserError on all ranks."""
        problems = []
        if self._is_first and (at_home or not self._is_home):
            try:
                action()
            except OSError as error:
                problems = [f"{error.filename or self.folder} can't be written: {error.strerror or error}"]
        _require_none(problems, self._group)

    # ------------------------------------------------------------------ the start of a launch

    def unite(self) -> None:
        """Bring the account of all launches to all folders, and the newest status home; this launch has no number yet.

        Raises:
            UserError: a folder can't be written.
        """
        seen, problems = None, []
        try:
            seen = self._look() if self._is_first else None
        except OSError as error:
            problems = [f"{error.filename} can't be read: {error.strerror}"]
        _require_none(problems, self._group)
        told = gather(seen, self._group)
        self._seen = [each for ranks in self._owners if (each := told[ranks[0]])]
        self._newest = max(range(len(self._seen)), key=lambda index: (self._seen[index].records, -index))
        claims: dict[str, str] = {}
        for seen in self._seen:
            for name, text in seen.claims.items():
                claims[name] = max(claims.get(name, text), text, key=_age)

        def write() -> None:
            (self.folder / FOLDER).mkdir(exist_ok=True)
            for name, text in claims.items():
                if self._seen[self.index].claims.get(name) != text:
                    write_atomically(self.folder / FOLDER / name, [text])
            if self._is_home and self._newest:
                write_atomically(self.folder / _STATUS, [self._seen[self._newest].status])

        self._on_each(write, at_home=True)

    def _look(self) -> _Seen:
        claims = {path.name: path.read_text() for path in _claims(self.folder / FOLDER)}
        lines: dict[int, str | None] = {}
        for step in steps_in(self.folder / "checkpoints"):
            try:
                lines[step] = manifests.read_description(step_folder(self.folder / "checkpoints", step)).line
            except UserError:
                lines[step] = None
        stamp = facts_in(_text(self.folder / _STAMP)).get("of", [0, 0])
        size = path.stat().st_size if (path := self.folder / RECORDS[0]).is_file() else 0
        return _Seen(claims, (stamp, size), self._status(), lines)

    def bring_home(self, log: Callable[[str], None], warn: Callable[[str], None]) -> None:
        claims, here = self.folder / FOLDER, self._seen[0].lines
        kept = {step for step, line in here.items() if line is None or is_of_this_line(claims, line, step)}
        if outdated := here.keys() - kept:
            root, before = self.folder / "checkpoints", min(outdated) - 1
            aside = on_rank_zero(self._group, lambda: folders.set_aside(root, before, self.folder / RECORDS[0]))
            log(f"checkpoints of this host from which the run has not gone on were moved to {aside}")
        if self._newest:
            self._bring_records()
        elsewhere = [
            (step, index)
            for index, seen in enumerate(self._seen[1:], 1)
            for step, line in seen.lines.items()
            if step > max(kept, default=-1) and line is not None and is_of_this_line(claims, line, step)
        ]
        for step, index in sorted(elsewhere, reverse=True):
            problems = self._bring(step, self._owners[index])
            if not problems:
                log(f"checkpoint step {step} was brought from another host's disk (rank {self._owners[index][0]})")
                break
            warn(f"the checkpoint of step {step} on another host is not used: {listed(problems)}")
        self._tell_of_launch()

    def _bring_records(self) -> None:
        source = self._owners[self._newest]
        files = on_rank(source[0], self._group, lambda: _entries(self.folder, RECORDS))
        transfers = assign([(name, source, self._owners[0]) for name in files], files)
        _require_none(exchange(self.folder, transfers, files, self._group), self._group)

        def remove() -> None:
            for name in set(RECORDS) - files.keys():
                (self.folder / name).unlink(missing_ok=True)

        on_rank_zero(self._group, remove)

    def _bring(self, step: int, source: Sequence[int]) -> list[str]:
        """Bring a checkpoint home from the first of the ranks that have it; returns what is wrong with it."""
        folder = step_folder(self.folder / "checkpoints", step)
        unfinished = folder.with_name(folder.name + UNFINISHED)

        def describe() -> dict[str, FileEntry]:
            try:
                return {**manifests.read_manifest(folder).files, **_entries(folder, [MANIFEST_NAME])}
            except (OSError, UserError):
                return {}

        def begin() -> None:
            folder.parent.mkdir(exist_ok=True)
            manifests.begin(folder)

        def end() -> None:
            _sync(unfinished)
            unfinished.rename(folder)
            sync_folder(folder.parent)

        files = on_rank(source[0], self._group, describe)
        if not files:
            return ["it is damaged"]
        self._on_home(begin)
        transfers = assign([(name, source, self._owners[0]) for name in files], files)
        here = exchange(unfinished if self._is_home else folder, transfers, files, self._group)
        problems = sorted({problem for problems in gather(here, self._group) for problem in problems})
        self._on_home((lambda: shutil.rmtree(unfinished, ignore_errors=True)) if problems else end)
        return problems

    def _on_home(self, action: Callable[[], object]) -> None:
        try:
            on_rank_zero(self._group, action)
        except OSError as error:
            raise UserError(f"{error.filename or self.folder} can't be written: {error.strerror or error}") from None

    def _tell_of_launch(self) -> None:
        """Bring what the newest launch has recorded to all folders."""
        claims = self.folder / FOLDER
        name, text = on_rank_zero(self._group, lambda: _newest(claims))
        self._on_each(lambda: write_atomically(claims / name, [text]))

    def begin_launch(self) -> None:
        root = self.folder / "checkpoints"

        def prepare() -> None:
            root.mkdir(exist_ok=True)
            manifests.remove_unfinished(root, lambda line: None, lambda line: None)

        self._tell_of_launch()
        self._on_each(prepare)
        on_rank_zero(self._group, self._stamp)

    def _status(self) -> str:
        return _text(self.folder / _STATUS)

    def _stamp(self) -> None:
        """Note that this folder's records are those of the newest launch."""
        of = beginnings(self.folder / FOLDER)
        number = newest_number(self.folder / FOLDER)
        write_atomically(self.folder / _STAMP, [json.dumps({"of": [number, len(of)]})])

    # ------------------------------------------------------------------ records

    def mirror(self) -> None:
        starts = gather(self._mirrored, self._group)
        others = [starts[ranks[0]] for ranks in self._owners[1:]]
        from_byte = {name: min((start.get(name, 0) for start in others), default=0) for name in RECORDS}

        def read() -> tuple[dict[str, bytes | None], str]:
            return {name: _tail(self.folder / name, start) for name, start in from_byte.items()}, self._status()

        def write() -> None:
            for name, content in contents.items():
                known = self._mirrored.get(name, 0)
                if content is None:
                    (self.folder / name).unlink(missing_ok=True)
                    continue
                with (self.folder / name).open("r+b" if known else "wb") as file:
                    file.seek(known)
                    file.truncate()  # what an earlier call has left that failed
                    file.write(content[known - from_byte[name] :])
                self._mirrored[name] = max(known, from_byte[name] + len(content))
            write_atomically(self.folder / _STATUS, [status])
            self._stamp()

        try:
            contents, status = on_rank_zero(self._group, read)
            self._on_each(write)
        except (OSError, UserError) as error:
            raise SaveFailed(f"bringing the run's records to other hosts: {error}") from None

    # ------------------------------------------------------------------ checkpoints

    def _place(self, unfinished: Path) -> Path:
        return self.folder / "checkpoints" / unfinished.name

    def begin(self, unfinished: Path) -> None:
        folder = self._place(unfinished)

        def make() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

        try:
            self._on_each(make)
        except UserError as error:
            raise SaveFailed(f"checkpoint {unfinished.stem} could not be written: {error}") from None

    def send_home(self, unfinished: Path, files: Mapping[str, FileEntry]) -> None:
        folder = self._place(unfinished)
        written = gather([name for name in files if (folder / name).is_file()] if self._is_first else [], self._group)
        at_home = set(written[0])
        holders = [(name, ranks) for ranks in self._owners[1:] for name in written[ranks[0]] if name not in at_home]
        transfers = assign([(name, ranks, self._owners[0]) for name, ranks in holders], files)
        here = exchange(folder, transfers, files, self._group)
        if problems := sorted({problem for problems in gather(here, self._group) for problem in problems}):
            raise SaveFailed(f"checkpoint {unfinished.stem} could not be written: {listed(problems)}")
        self._on_home(lambda: _sync(folder))

    def fetch(self, folder: Path, files: Mapping[str, FileEntry], needed: set[str]) -> Path:
        place, needs = folder if self._is_home else self._place(Path(_FETCHED)), gather(needed, self._group)
        self.begin(place)
        wanted = [
            (name, self._owners[0], ranks)
            for ranks in self._owners[1:]
            for name in sorted(set().union(*(needs[rank] for rank in ranks)))
        ]
        here = exchange(place, assign(wanted, files), files, self._group)
        if problems := sorted({problem for problems in gather(here, self._group) for problem in problems}):
            raise manifests.damaged(folder, listed(problems))
        return place

    def clear(self, unfinished: Path | None = None) -> None:
        if self._is_first and not self._is_home:
            shutil.rmtree(self._place(unfinished or Path(_FETCHED)), ignore_errors=True)


def _require_none(problems: Sequence[str], group: dist.ProcessGroup | None) -> None:
    """Raise UserError on all ranks if one has a problem."""
    if found := sorted({line for lines in gather(list(problems), group) for line in lines}):
        raise UserError(f"the hosts' run folders: {listed(found)} (see job.output_dir)")


def _age(text: str) -> tuple[float, int]:
    """Of two accounts of a launch, the later one is larger."""
    facts = facts_in(text)
    return facts.get("time", 0.0), len(facts.get("lines", []))


def _claims(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if path.stem.isdecimal())


def _newest(folder: Path) -> tuple[str, str]:
    path = _claims(folder)[-1]
    return path.name, path.read_text()


def _entries(folder: Path, names: Sequence[str]) -> dict[str, FileEntry]:
    """Sizes and hashes of those of the files that exist."""
    contents = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    return {name: FileEntry(len(text), xxhash.xxh3_128_hexdigest(text)) for name, text in contents.items()}


def _tail(path: Path, start: int) -> bytes | None:
    """A file from a byte on; None if there is no such file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(start)
        return file.read()


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _sync(folder: Path) -> None:
    """Sync the files that have arrived in a folder."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(folder)
