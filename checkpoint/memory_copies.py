"""Copies of the state in the memory of hosts, from which an elastic run goes on that has lost ranks or hosts.

A copy is a checkpoint whose files are spread over hosts: each host has, in a folder of a file system in memory (tmpfs),
the files that its own ranks wrote and those of the hosts before it in a ring, as many as `checkpoint.memory_copies`
says. The index, the trainer's state and the manifest are on each host. A copy gets its name, by a rename on each host,
only when all hosts have everything; the one before it is kept until the next one begins.

The folder outlives the ranks. The next launch asks all of its hosts what they have. A copy is complete if they have all
files together, and each rank then fetches what its shards need. It may be out of date: of a host that hung while the
run went on from an earlier step without it. So its name bears the launch that made it and that launch's line, which the
run folder can refute (see `checkpoint.incarnation`).

All methods are collective. Ranks that have the same folder are one host, whatever it is called.
"""

import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from checkpoint import manifest as manifests
from checkpoint.exchange import assign, exchange
from checkpoint.incarnation import Incarnation, is_of_this_line
from checkpoint.manifest import MANIFEST_NAME, TRAINER_NAME, UNFINISHED, Damaged, FileEntry, Manifest, content_damage
from checkpoint.room import MEMORY_SHARE, free_memory
from checkpoint.safe_read import METADATA_NAME
from checkpoint.seals import seal_of
from checkpoint.store import SaveFailed, Shard
from checkpoint.verify import shares
from configs.errors import UserError, listed
from configs.files import identity, synced
from parallelisms.ranks import gather, on_rank, on_rank_zero

PARENT = "KEEL_MEMORY_FOLDER"
"""Environment variable that replaces /dev/shm."""
AT_ONCE = 2
"""Copies that a host holds while the next one is made."""
TENSOR_BYTES = 1500
"""What torch.save adds to a tensor, and the index has of it, about."""
_NAME = re.compile(r"step-(\d{8,})-of-(\d+)-([0-9a-f]+)")
_EVERYWHERE = (METADATA_NAME, TRAINER_NAME)


@dataclass(frozen=True)
class Host:
    """Ranks that have the same folder in memory."""

    name: str
    ranks: list[int]
    """In order; the first one acts for the host."""


@dataclass(frozen=True)
class Copy:
    """A copy that the hosts hold completely."""

    name: str
    """Of its folder, on each host that has it."""
    step: int
    files: Mapping[str, FileEntry]
    held: tuple[frozenset[str], ...]
    """For each host, the names of the files that it has."""

    @property
    def holders(self) -> list[int]:
        """Indexes of the hosts that have some of it."""
        return [index for index, held in enumerate(self.held) if held]


def folder_in_memory(run_folder: Path) -> Path:
    """Where this host keeps copies of a run; the same for each launch of the run."""
    name = xxhash.xxh3_64_hexdigest(str(run_folder.resolve()).encode())
    return Path(os.environ.get(PARENT, "/dev/shm")) / f"keel-{os.getuid()}-{name}"


def with_copies(checkpoints: Sequence[Path], copies: Sequence[Copy]) -> "list[Path | Copy]":
    """Checkpoints and copies, each the newest first, in one order; of the same step, the checkpoint first."""
    steps = {path: int(path.name.removeprefix("step-")) for path in checkpoints}
    both: list[Path | Copy] = [*checkpoints, *copies]
    return sorted(both, key=lambda each: each.step if isinstance(each, Copy) else steps[each], reverse=True)


def bytes_there(run_folder: Path) -> int:
    """Bytes of the copies of a run that are in this host's memory, such as those of the launch before."""
    return sum(path.stat().st_size for path in folder_in_memory(run_folder).rglob("*") if path.is_file())


def remove_copies(run_folder: Path) -> None:
    """Remove all copies of a run from this host's memory; any process may call it once the run is over."""
    shutil.rmtree(folder_in_memory(run_folder), ignore_errors=True)


class MemoryCopies:
    """The copies of one run."""

    def __init__(
        self,
        run_folder: Path,
        copies: int,
        group: dist.ProcessGroup,
        incarnation: Incarnation,
        log: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        """Find out which ranks are on one host.

        Args:
            run_folder: of the run.
            copies: other hosts that hold each host's files.
            group: all ranks, of a backend for tensors on the CPU.
            incarnation: of this launch.
            log, warn: called with lines for the user.

        Raises:
            UserError: a host has no such folder, or it is someone else's.
        """
        self.folder, self._group, self._incarnation = folder_in_memory(run_folder), group, incarnation
        self._run_folder = run_folder
        self._log, self._warn = log, warn
        self.hosts = self._meet()
        self._copies = min(copies, len(self.hosts) - 1)
        rank = dist.get_rank(group)
        [self._here] = [index for index, host in enumerate(self.hosts) if rank in host.ranks]
        self._is_first = self.hosts[self._here].ranks[0] == rank
        self._line = ""
        self.before_commit: Callable[[], None] = lambda: None
        """Called by all ranks before a copy gets its name; its SaveFailed ends that copy."""
        self._complete: list[str] = []
        """Names of the copies that are complete on all hosts, the newest last."""
        self._is_announced = False
        if self._copies < copies:
            n = len(self.hosts)
            only = "its own memory only, which survives its ranks, but not the host" if n == 1 else f"{n - 1} others"
            warn(f"checkpoint.memory_copies = {copies}, but there {_are(n)}: the state of a host is copied to {only}")

    def _meet(self) -> list[Host]:
        identity: tuple[object, ...] = ()
        problem = ""
        try:
            identity = _prepare(self.folder)
        except OSError as error:
            problem = f"{self.folder} can't be used: {error.strerror}"
        told = gather((identity, socket.gethostname(), problem), self._group)
        if problems := {f"{problem} (host {name})" for _, name, problem in told if problem}:
            raise UserError(f"checkpoint.memory_copies: {listed(sorted(problems))}; or set {PARENT}")
        hosts: dict[tuple[object, ...], Host] = {}
        for rank, (identity, name, _) in enumerate(told):
            hosts.setdefault(identity, Host(name, [])).ranks.append(rank)
        return list(hosts.values())

    def _successors(self, host: int) -> list[int]:
        """The hosts that hold copies of a host's files."""
        return [(host + distance) % len(self.hosts) for distance in range(1, self._copies + 1)]

    def names(self, hosts: Iterable[int]) -> str:
        """ "hosts h1, h2"."""
        names = [self.hosts[index].name for index in hosts]
        return f"host{'s' * (len(names) != 1)} {listed(names, ', ')}"

    def _agree(self, problems: Iterable[str], doing: str) -> None:
        """Raise SaveFailed on all ranks if one has a problem."""
        here = [f"{problem} (host {self.hosts[self._here].name})" for problem in problems]
        if found := sorted({line for lines in gather(here, self._group) for line in lines}):
            raise SaveFailed(f"{doing}: {listed(found)}")

    def _on_each_host(self, action: Callable[[], object], doing: str) -> None:
        """Run `action` on the first rank of each host; an OSError becomes SaveFailed on all ranks."""
        problems = []
        if self._is_first:
            try:
                action()
            except OSError as error:
                problems = [str(error)]
        self._agree(problems, doing)

    # ------------------------------------------------------------------ room

    def check_room(self, shards: Mapping[str, Shard], dtype: Callable[[str, Tensor], torch.dtype]) -> None:
        """Check that each host has room for its part of the copies, beside what its ranks stage.

        Args:
            shards: this rank's.
            dtype: maps a name and tensor to the dtype in which it is saved.

        Raises:
            UserError: a host lacks room.
        """
        parts = [_part(name, shard, dtype) for name, shard in shards.items() if shard.local.numel()]
        ids = np.array([identity for identity, _ in parts], dtype=np.uint64)
        known, ranks_of = np.unique(np.concatenate(gather(ids, self._group)), return_counts=True)
        shared_by = ranks_of[np.searchsorted(known, ids)]  # of the ranks that hold a part, one writes it
        written = sum(n_bytes / n for (_, n_bytes), n in zip(parts, shared_by, strict=True))
        there = bytes_there(self._run_folder) if self._is_first else 0
        room = (shutil.disk_usage(self.folder).free + there, int(MEMORY_SHARE * free_memory()) + there)
        staged_here = sum(n_bytes for _, n_bytes in parts)
        told = gather((written, staged_here, room, self.folder.parent), self._group)
        own = [sum(told[rank][0] for rank in host.ranks) for host in self.hosts]
        holds = [AT_ONCE * each for each in own]
        for index, each in enumerate(own):
            for successor in self._successors(index):
                holds[successor] += AT_ONCE * each
        for index, host in enumerate(self.hosts):
            in_folder, in_memory = told[host.ranks[0]][2]
            needed, staged = int(holds[index]), sum(told[rank][1] for rank in host.ranks)
            if needed > in_folder or needed + staged > in_memory:
                raise UserError(
                    f"checkpoint.memory_copies: host {host.name} would hold {needed:,} bytes of copies ({AT_ONCE} at "
                    f"once) in {told[host.ranks[0]][3]}, which has room for {in_folder:,}, and its ranks stage "
                    f"{staged:,} more; {in_memory:,} bytes of memory are free. Use more hosts, fewer copies, or none"
                )

    # ------------------------------------------------------------------ making one

    def begin_line(self, line: str, kept: Copy | None) -> None:
        """Begin after what the run goes on from: all other copies are removed."""
        self._line, self._complete = line, [kept.name] if kept else []

        def remove_others() -> None:
            for path in self.folder.iterdir():
                if path.name not in self._complete:
                    shutil.rmtree(path)

        self._on_each_host(remove_others, "old copies can't be removed from memory")

    def begin(self, step: int) -> Path | None:
        """Create the folder in which the copy of `step` is written on this host; None, with a warning, if one can't."""
        unfinished = self.folder / f"step-{step:08d}-of-{self._incarnation.number:06d}-{self._line}{UNFINISHED}"

        *older, newest = self._complete or [""]

        def make() -> None:
            for path in self.folder.iterdir():  # only this launch's, since a newer one may be at work on this host
                if path.name in older or (self._line in path.name and path.name != newest):
                    shutil.rmtree(path)
            unfinished.mkdir()

        try:
            self._on_each_host(make, "no folder in memory")
        except SaveFailed as error:
            self.warn_of(step, error)
            return None
        self._complete = self._complete[-1:]
        return unfinished

    def commit(self, unfinished: Path, draft: Manifest, files: Mapping[str, FileEntry], trainer_state: str) -> Manifest:
        """Send the files that the ranks have written to the hosts that are to hold them, and complete the copy.

        Args:
            unfinished: from `begin`.
            draft: the manifest without its files.
            files: those that all ranks have written, each on its host.
            trainer_state: JSON.

        Raises:
            SaveFailed: a host has no room.
            Superseded: a newer launch has taken the run over.
        """
        here = [name for name in files if (unfinished / name).is_file()] if self._is_first else []
        written = gather(here, self._group)
        wanted = [
            (name, self.hosts[index].ranks, self.hosts[successor].ranks)
            for index, host in enumerate(self.hosts)
            for name in written[host.ranks[0]]
            for successor in self._successors(index)
            if name != METADATA_NAME
        ]
        self._agree(exchange(unfinished, assign(wanted, files), files, self._group), "sending it to other hosts")
        manifest = on_rank_zero(self._group, lambda: _described(unfinished, draft, files, trainer_state))
        self._put_description(unfinished, 0, unfinished)
        self.before_commit()
        on_rank_zero(self._group, self._incarnation.require_current)
        name = unfinished.name.removesuffix(UNFINISHED)
        self._on_each_host(lambda: unfinished.rename(self.folder / name), "it can't be renamed")
        self._complete.append(name)
        return manifest

    def announce(self, manifest: Manifest, seconds: float) -> None:
        """Tell the user of the first copy, which was made in `seconds`."""
        if not self._is_announced:
            self._is_announced = True
            megabytes = sum(entry.size for entry in manifest.files.values()) / 1e6
            self._log(
                f"the state of step {manifest.step}, {megabytes:.1f} MB, is in the memory of "
                f"{self.names(range(len(self.hosts)))}, {seconds:.1f} s after its step; the next copies are not "
                "announced"
            )

    def warn_of(self, step: int, error: SaveFailed) -> None:
        """Tell the user that a copy has failed."""
        why = str(error).removesuffix(" (see job.output_dir)")
        self._warn(f"the copy of step {step} in the hosts' memory has failed, TRAINING GOES ON without it: {why}")

    def discard(self, unfinished: Path) -> None:
        """Remove what a failed save has left on this host; may be called on one rank alone."""
        if self._is_first:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _put_description(self, folder: Path, rank: int, source: Path) -> None:
        """Copy what is on each host from a rank's host to those that lack it; the manifest last."""
        names = (*_EVERYWHERE, MANIFEST_NAME)
        contents = on_rank(rank, self._group, lambda: [(source / name).read_bytes() for name in names])

        def put() -> None:
            for name, content in zip(names, contents, strict=True):
                if not (folder / name).exists():
                    with synced(folder / name) as file:
                        file.write(content)

        self._on_each_host(put, "writing its description")

    def forget(self) -> None:
        """Remove all copies: the run is over, or has its state on disk."""
        if self._is_first:
            shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------------ going on from one

    def find(self) -> list[Copy]:
        """The copies that the hosts have completely and that are not out of date, the newest first."""
        seen = gather(self._look() if self._is_first else [], self._group)
        groups: dict[tuple[str, str], tuple[Mapping[str, FileEntry], dict[int, frozenset[str]]]] = {}
        for index, host in enumerate(self.hosts):
            for name, seal, files, held in seen[host.ranks[0]]:
                if files is None:
                    self._warn(f"a copy in the memory of host {host.name} is not used: {seal}")
                else:
                    groups.setdefault((name, seal), (files, {}))[1][index] = frozenset(held)
        current = on_rank_zero(self._group, lambda: {name for name, _ in groups if self._is_current(name)})
        found = []
        for (name, _), (files, held_by) in groups.items():
            step = int(_NAME.fullmatch(name)[1])  # type: ignore[index]
            if name not in current:
                self._log(f"a copy of step {step} in memory is not used: the run has gone on from an earlier step")
                continue
            by_host = tuple(held_by.get(index, frozenset()) for index in range(len(self.hosts)))
            if missing := files.keys() - frozenset().union(*by_host):
                self._warn(
                    f"the copy of step {step} in memory is incomplete: {len(missing)} of {len(files)} files were lost "
                    "with their hosts"
                )
                continue
            found.append(Copy(name, step, files, by_host))
        return sorted(found, key=lambda copy: copy.step, reverse=True)

    def _look(self) -> list[tuple[str, str, Mapping[str, FileEntry] | None, list[str]]]:
        """For each copy on this host: name, seal, its files, and the names of those that are here.

        In place of the seal and the files, what is wrong with it and None.
        """
        found: list[tuple[str, str, Mapping[str, FileEntry] | None, list[str]]] = []
        for path in sorted(self.folder.iterdir()):
            if not _NAME.fullmatch(path.name) or not (path / MANIFEST_NAME).exists():
                continue
            try:
                files = manifests.read_description(path).files
                held = [name for name, entry in files.items() if _size(path / name) == entry.size]
                found.append((path.name, seal_of(path), files, held))
            except UserError as error:
                found.append((path.name, str(error), None, []))
        return found

    def _is_current(self, name: str) -> bool:
        step, _, line = _NAME.fullmatch(name).groups()  # type: ignore[union-attr]
        return is_of_this_line(self._incarnation.folder, line, int(step))

    def verified(self, copy: Copy) -> Copy:
        """Read what the hosts hold of a copy, and leave out what is damaged.

        Raises:
            Damaged: no host has one of its files undamaged.
        """
        mine = self.hosts[self._here].ranks.index(dist.get_rank(self._group))
        held = copy.held[self._here]
        share = shares({name: copy.files[name].size for name in held}, len(self.hosts[self._here].ranks))[mine]
        folder = self.folder / copy.name
        found = [(name, why) for name in share if (why := content_damage(folder, name, copy.files[name]))]
        by_host: list[set[str]] = [set() for _ in self.hosts]
        told = []
        for rank, damages in enumerate(gather(found, self._group)):
            [index] = [index for index, host in enumerate(self.hosts) if rank in host.ranks]
            by_host[index] |= {name for name, _ in damages}
            told += [f"{why} (host {self.hosts[index].name})" for _, why in damages]
        good = tuple(names - by_host[index] for index, names in enumerate(copy.held))
        if copy.files.keys() - frozenset().union(*good):
            raise Damaged(f"the copy of step {copy.step} in memory is damaged: {listed(sorted(told))}")
        if told:
            self._warn(f"the copy of step {copy.step} in memory is damaged, another host has it: {listed(told)}")
        return replace(copy, held=good)

    def describer(self, copy: Copy) -> int:
        """A rank whose host has what describes the copy."""
        return next(self.hosts[index].ranks[0] for index in copy.holders if {*_EVERYWHERE} <= copy.held[index])

    def fetch(self, copy: Copy, needed: set[str]) -> Path:
        """Fetch what this rank needs of a copy from the hosts that have it; returns this host's folder of the copy.

        Raises:
            Damaged: a file does not arrive.
        """
        folder, needs = self.folder / copy.name, gather(needed, self._group)
        holders = {
            name: [rank for index, host in enumerate(self.hosts) if name in copy.held[index] for rank in host.ranks]
            for name in copy.files
        }
        wanted = [
            (name, holders[name], host.ranks)
            for index, host in enumerate(self.hosts)
            for name in sorted(set().union(*(needs[rank] for rank in host.ranks)) - copy.held[index])
        ]
        try:
            self._on_each_host(lambda: folder.mkdir(exist_ok=True), "no folder in memory")
            self._agree(exchange(folder, assign(wanted, copy.files), copy.files, self._group), "fetching its files")
            self._put_description(folder, self.describer(copy), folder)
        except SaveFailed as error:
            raise Damaged(f"the copy of step {copy.step} in memory can't be used: {error}") from None
        return folder


def _part(name: str, shard: Shard, dtype: Callable[[str, Tensor], torch.dtype]) -> tuple[int, int]:
    """What identifies a rank's part of a tensor, and the bytes that it takes in a file."""
    identity = xxhash.xxh3_64_intdigest(f"{name} {tuple(shard.offsets)}".encode())
    return identity, shard.local.numel() * dtype(name, shard.local).itemsize + TENSOR_BYTES


def _described(unfinished: Path, draft: Manifest, files: Mapping[str, FileEntry], trainer_state: str) -> Manifest:
    try:
        return manifests.describe(unfinished, draft, files, trainer_state)
    except OSError as error:
        raise SaveFailed(f"writing its description: {error}") from None


def _prepare(folder: Path) -> tuple[object, ...]:
    """Create a folder that only this user can enter; returns its `identity`.

    Raises:
        OSError: it can't be created, or is not this user's alone.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(0, "it is not a folder of this user alone; remove it")
    return identity(folder)


def _are(n: int) -> str:
    return "is 1 host" if n == 1 else f"are {n} hosts"


def _size(path: Path) -> int | None:
    try:
        return path.lstat().st_size if path.is_file() else None
    except OSError:
        return None
