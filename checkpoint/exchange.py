"""Files sent from the memory of one host to that of another, by all ranks of a group together.

Each rank's outgoing files form one stream, cut into rounds of bounded size. In a round, a rank first posts all that it
sends and receives, then waits. So no two ranks wait for each other, whatever the order of the files; ranks that
exchange nothing need no connection; and a rank whose disk or memory fails takes part to the end.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from checkpoint.manifest import FileEntry

ROUND_BYTES = 4 << 20
"""What a rank sends in a round, at most."""
PART = ".part"


@dataclass(frozen=True)
class Transfer:
    """One file that one rank sends to another."""

    name: str
    source: int
    target: int


@dataclass(frozen=True)
class _Piece:
    transfer: Transfer
    start: int
    length: int


def assign(
    wanted: Iterable[tuple[str, Sequence[int], Sequence[int]]], files: Mapping[str, FileEntry]
) -> list[Transfer]:
    """Choose who sends and who receives each file, such that each rank has about as much to do; the same on all ranks.

    Args:
        wanted: the name of a file, the ranks that can send it, and those of which one is to receive it.
        files: with the sizes.
    """
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    chosen = []
    for name, sources, targets in sorted(wanted, key=lambda each: (-files[each[0]].size, *each)):
        source = min(sources, key=lambda rank: (sent[rank], rank))
        target = min(targets, key=lambda rank: (received[rank], rank))
        sent[source] += files[name].size
        received[target] += files[name].size
        chosen.append(Transfer(name, source, target))
    return chosen


def exchange(
    folder: Path, transfers: Sequence[Transfer], files: Mapping[str, FileEntry], group: dist.ProcessGroup | None
) -> list[str]:
    """Send files of `folder` and receive others into it; all ranks of `group` must call it.

    Args:
        folder: this host's.
        transfers: the same on all ranks.
        files: sizes and hashes of the files; what arrives otherwise is not kept.
        group: of a backend for tensors on the CPU; None: the default one.

    Returns:
        What went wrong on this rank, one line for each file.
    """
    me = dist.get_rank(group)
    rounds = {source: _rounds(source, transfers, files) for source in {each.source for each in transfers}}
    arriving = {each.name: _Arriving(folder / each.name) for each in transfers if each.target == me}
    problems: dict[str, str] = {}
    for number in range(max(map(len, rounds.values()), default=0)):
        now = {source: cut[number] for source, cut in rounds.items() if number < len(cut)}
        outgoing = now.get(me, [])
        incoming = [piece for source in sorted(now) for piece in now[source] if piece.transfer.target == me]
        received = [torch.empty(piece.length, dtype=torch.uint8) for piece in incoming]
        sent = [_read(folder, piece, problems) for piece in outgoing]
        works = [
            dist.irecv(content, group=group, group_src=piece.transfer.source)
            for piece, content in zip(incoming, received, strict=True)
        ]
        works += [
            dist.isend(content, group=group, group_dst=piece.transfer.target)
            for piece, content in zip(outgoing, sent, strict=True)
        ]
        for work in filter(None, works):
            work.wait()
        for piece, content in zip(incoming, received, strict=True):
            arriving[piece.transfer.name].write(content.numpy().data)
    problems |= {name: problem for name, each in arriving.items() if (problem := each.finish(files[name]))}
    return list(problems.values())


def _rounds(source: int, transfers: Sequence[Transfer], files: Mapping[str, FileEntry]) -> list[list[_Piece]]:
    """What a rank sends in each round."""
    rounds: list[list[_Piece]] = [[]]
    room = ROUND_BYTES
    for transfer in transfers:
        start, size = 0, files[transfer.name].size if transfer.source == source else 0
        while start < size:
            if not room:
                rounds.append([])
                room = ROUND_BYTES
            length = min(room, size - start)
            rounds[-1].append(_Piece(transfer, start, length))
            start, room = start + length, room - length
    return rounds


def _read(folder: Path, piece: _Piece, problems: dict[str, str]) -> Tensor:
    """Read what is sent; what can't be read is sent as zeros, whose hash is another one."""
    content, name = torch.zeros(piece.length, dtype=torch.uint8), piece.transfer.name
    try:
        with (folder / name).open("rb", buffering=0) as file:
            file.seek(piece.start)
            if file.readinto(content.numpy().data) != piece.length:
                problems[name] = f"{name} ends early"
    except OSError as error:
        problems[name] = f"{name} can't be read: {error.strerror}"
    return content


class _Arriving:
    """A file that is received; it gets its name when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_name(path.name + PART)
        self._hash, self._problem = xxhash.xxh3_128(), ""
        self._try(lambda: self._part.write_bytes(b""))

    def write(self, content: memoryview) -> None:
        self._hash.update(content)
        if not self._problem:
            self._try(lambda: self._append(content))

    def finish(self, entry: FileEntry) -> str:
        """Returns what is wrong with the file; "" if nothing is."""
        if not self._problem and self._hash.hexdigest() != entry.xxh3:
            self._problem = f"{self._path.name} has arrived with other bytes than it was written with"
        if not self._problem:
            self._try(lambda: self._part.replace(self._path))
        if self._problem:
            self._part.unlink(missing_ok=True)
        return self._problem

    def _append(self, content: memoryview) -> None:
        with self._part.open("ab") as file:
            file.write(content)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self._problem = f"{self._path.name} can't be written: {error.strerror}"
