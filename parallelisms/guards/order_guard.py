"""The order guard: proof that all ranks issue the same collectives in the same order.

Collectives are matched by their order alone. If two ranks differ in it and the sizes happen to fit, nothing fails:
a layer computes with another layer's parameters, and the values are wrong. If the sizes do not fit, or the ranks
differ in which of two process groups comes first, a step may hang.

On the steps that it guards, the guard records what each rank issues, from FSDP's all-gathers to the clipping's sums:
operator, process group, shape, dtype, and the module or code line that issued it, which tells equal shapes apart.
Before the optimizer changes anything, all ranks compare checksums. Given groups A and B, the ranks in both must agree
on the order of A's collectives, of B's, and of A's relative to B's, so there is a checksum for every pair of groups.
Point-to-point messages are compared between the two ranks, in order, for each direction.

The comparison is one sum of one number over all ranks. Of the m ranks that share a checksum c, the first adds (m - 1) c
and each other subtracts its own: the terms cancel where all are equal, and leave a random remainder where one is not.
So its cost does not grow with the number of ranks. Only if the sum is not zero are the checksums themselves exchanged,
and then the logs, to name the first collective that differs.

Only the groups that training computes with are watched. A background thread, such as the one that writes a checkpoint,
has its own groups, and issues their collectives at any time.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import combinations, groupby, zip_longest
from pathlib import Path
from sys import _getframe
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from configs.errors import UserError
from parallelisms.ranks import gather
from parallelisms.torch_internals import issuing_group, listening, prepare_listening, tensors_of, world_name

_HOME = str(Path(__file__).resolve().parents[2]) + os.sep
_HERE = Path(__file__).resolve()
_NOT_CALLERS = {str(path) for path in (_HERE, _HERE.parents[1] / "torch_internals.py", _HERE.parents[1] / "ranks.py")}

_MODULUS = 2**40
"""The range of a checksum: terms of a million ranks can be summed in 64 bits."""


class Channel(NamedTuple):
    """The ranks that must agree on an order."""

    name: str
    """A process group's, or that of the group through which messages go."""
    ranks: tuple[int, ...]
    """The group's, or a message's sender and receiver."""

    def __hash__(self) -> int:
        return hash(self.name)  # in a large job there are thousands of ranks


Key = tuple[Channel, ...]
"""One channel, or two whose relative order is compared."""


@dataclass(frozen=True)
class Issued:
    """A collective, or a message, that a rank issued."""

    channel: Channel
    what: str
    """Description in words; equal on all ranks that take part."""
    is_message: bool


class OrderGuard:
    """Watches the steps of one launch on this rank; every rank has one."""

    def __init__(self, interval: int, groups: Collection[dist.ProcessGroup]) -> None:
        """
        Args:
            interval: guard the first step and every `interval`-th step after it; 0: none.
            groups: the groups that steps compute with, besides the group of all ranks; others are ignored.
        """
        self._interval = interval
        self._watched = {str(group.group_name) for group in groups} | {world_name()}
        self._channels: dict[str, Channel] = {}
        self._members: dict[Key, list[int]] = {}
        self._step = 0
        self._is_noting = False
        self.log: list[Issued] = []
        """Collectives and messages that guarded steps issued since the last comparison."""
        if interval > 0 and dist.get_world_size() > 1:
            prepare_listening()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the part of a step that runs inside this context, if the step is due.

        What a step issues after `compare`, in the optimizer, becomes part of the next comparison.
        """
        is_due = self._interval > 0 and self._step % self._interval == 0 and dist.get_world_size() > 1
        self._is_noting = is_due
        try:
            with listening(self._note) if is_due else nullcontext():
                yield
        finally:
            self._is_noting = False

    def compare(self) -> None:
        """Compare what was issued so far with the other ranks; all ranks must call it, inside `watch`.

        Raises:
            UserError: the ranks differ. All ranks raise it, with the same text.
        """
        if not self._is_noting:
            return
        self._is_noting = False  # exclude the comparison's own collectives
        log = self.log
        self.log = []
        checksums = _checksums(log, self._members)
        remainder = torch.tensor(term(checksums, self._members, dist.get_rank()))
        # Zero, as explained above, if all ranks agree.
        dist.all_reduce(remainder)
        if int(remainder) % _MODULUS:
            told = gather({_name(key): checksum for key, checksum in checksums.items()})
            # In a simulated world, whose collectives compute nothing, the sum is this rank's term, and nothing differs.
            if wrong := _first_of_all(_first_difference(checksums, told)):
                logs = gather(_lines(log, wrong))
                raise UserError(_message(wrong, logs, self._step + 1))
        self._is_noting = True

    def finish_step(self) -> None:
        """Count a step; what follows belongs to the next one."""
        self._step += 1

    def _note(self, operator: str, group: dist.ProcessGroup, arguments: tuple[Any, ...]) -> None:
        name = str(group.group_name)
        if not self._is_noting or name not in self._watched:
            return
        if name not in self._channels:
            self._channels[name] = Channel(name, tuple(dist.get_process_group_ranks(group)))
        if group.size() > 1:
            self.log.append(issued(operator, self._channels[name], arguments))


def issued(
    operator: str, channel: Channel, arguments: tuple[Any, ...], is_skipped: Callable[[str], bool] | None = None
) -> Issued:
    """What this rank issues, in words that are equal on all ranks that take part.

    Args:
        operator: its name in torch's namespace `c10d`.
        channel: the group's.
        arguments: the operator's.
        is_skipped: whether the lines of a file are not named; default: of all but Keel's.
    """
    if operator not in ("send", "recv_"):
        issuer = issuing_group() or calling_line(is_skipped or _is_not_keels)
        what = f"{operator.strip('_')} of {_shapes(operator, arguments)} for {issuer}"
        return Issued(channel, what, False)
    here = dist.get_rank()
    there = channel.ranks[arguments[2]]
    pair = (here, there) if operator == "send" else (there, here)
    # By count, and without the line of code, which differs between sender and receiver: torch 2.11's pipelining opens
    # a connection by sending a scalar, received with shape (1,).
    message = " and ".join(f"{t.numel()} elements {_dtype(t)}" for t in tensors_of(arguments))
    return Issued(Channel(f"messages of {channel.name}", pair), f"message of {message}", True)


def _shapes(operator: str, arguments: tuple[Any, ...]) -> str:
    """Shapes and dtype of what is exchanged, as far as they are equal on all ranks."""
    tensors = tensors_of(arguments)
    if operator in ("gather_", "scatter_"):  # only one rank has all the parts
        tensors = tensors[-1:] if operator == "gather_" else tensors[:1]
    shapes: list[tuple[int | str, ...]] = [tuple(t.shape) for t in tensors]
    if tensors and tensors[0].dtype == torch.uint8:  # JSON, as long as the ranks have just agreed
        return "JSON"
    if operator.startswith("alltoall"):  # how much each pair exchanges may differ
        shapes = sorted({("any", *shape[1:]) for shape in shapes}, key=str)
    counted = [(shape, len(list(equal))) for shape, equal in groupby(shapes)]
    of_all = ", ".join(f"{n} x {shape}" if n > 1 else str(shape) for shape, n in counted)
    return f"{of_all} {_dtype(tensors[0])}" if tensors else "nothing"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def calling_line(is_skipped: Callable[[str], bool]) -> str:
    """The innermost line that led here whose file is not skipped: "models/llama.py:88"; outside Keel "my_loss.py:10".

    There is none in an autograd thread.
    """
    frame = _getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_skipped(file):
            place = file.removeprefix(_HOME) if file.startswith(_HOME) else Path(file).name
            return f"{place}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the backward pass"


def passes_on(file: str) -> bool:
    """Whether a file's lines pass on what others issue: some of Keel's, and packages'."""
    # A virtual environment may be in Keel's folder: the README's is.
    return file in _NOT_CALLERS or "site-packages" in file.removeprefix(_HOME)


@cache
def _is_not_keels(file: str) -> bool:
    """Whether a file is skipped: ranks generate compiled code into files of other names."""
    return passes_on(file) or not file.startswith(_HOME)


def _checksums(log: list[Issued], members: dict[Key, list[int]]) -> dict[Key, int]:
    """A checksum for every channel, and one for every two process groups that share ranks besides this one.

    Args:
        log: a rank's collectives and messages.
        members: the ranks in all channels of a key; keys that it lacks are added.
    """
    channels = sorted({issued.channel for issued in log})
    groups = sorted({issued.channel for issued in log if not issued.is_message})
    keys: list[Key] = [(channel,) for channel in channels]
    keys += combinations(groups, 2)
    for key in keys:
        if key not in members:
            members[key] = _members(key)
    return {key: _checksum([_name(key), *_lines(log, key)]) for key in keys if len(members[key]) > 1}


def term(checksums: dict[Key, int], members: dict[Key, list[int]], rank: int) -> int:
    """A rank's term of the sum over all ranks that is 0, modulo the range of checksums, where they agree."""
    balance = 0
    for key, checksum in checksums.items():
        first, *others = members[key]
        balance += len(others) * checksum if rank == first else -checksum
    return balance % _MODULUS


def _lines(log: Sequence[Issued], key: Key) -> list[str]:
    """The lines over which a key's checksum is taken: one for each collective of its channels."""
    return [f"{key.index(issued.channel)} {issued.what}" for issued in log if issued.channel in key]


def _checksum(lines: list[str]) -> int:
    return int.from_bytes(blake2b("\n".join(lines).encode(), digest_size=8).digest(), "big") % _MODULUS


@cache
def _name(key: Key) -> str:
    """The name that ranks send in place of a key, which lists ranks: 4,096 of them, for each group of 4,096 ranks."""
    return str(_checksum([repr(key)]))


def _members(key: Key) -> list[int]:
    """The ranks that take part in all channels of a key."""
    return sorted(set.intersection(*(set(channel.ranks) for channel in key)))


def _first_difference(mine: Collection[Key], told: list[dict[str, int]]) -> Key | None:
    """The first of this rank's keys on which its members differ; a rank that has not used it differs, too."""
    for key in sorted(mine, key=_order):
        name = _name(key)
        if len({told[rank].get(name) for rank in _members(key)}) > 1:
            return key
    return None


def _first_of_all(found: Key | None) -> Key | None:
    """The first of the keys that ranks have found, the same on all; None if there is none."""
    told = [key for key in gather(found) if key]
    keys = (tuple(Channel(name, tuple(ranks)) for name, ranks in key) for key in told)
    return min(keys, key=_order, default=None)


def _order(key: Key) -> tuple[int, Key]:
    """Single channels come first."""
    return len(key), key


def _message(key: Key, logs: list[list[str]], step: int) -> str:
    members = _members(key)
    side_by_side = enumerate(zip_longest(*(logs[rank] for rank in members)), start=1)
    number, lines = next((number, lines) for number, lines in side_by_side if len(set(lines)) > 1)
    (usual, _), *_ = Counter(lines).most_common(1)
    odd = next(rank for rank, line in zip(members, lines, strict=True) if line != usual)
    usual_rank = members[lines.index(usual)]
    says = {rank: _in_words(lines[members.index(rank)], key) for rank in (odd, usual_rank)}
    return (
        f"the ranks issue their collectives in different orders: in step {step} of this launch, rank {odd} issued as "
        f"number {number} {says[odd]}, where rank {usual_rank} issued {says[usual_rank]}. The step was not applied. "
        "Nothing that differs between ranks may decide what they compute: check that place in the code, and that "
        "all ranks run the same version of it; comm.order_guard_interval = 1 finds the first step that differs"
    )


def _in_words(line: str | None, key: Key) -> str:
    if line is None:
        return "nothing more"
    index, what = line.split(" ", 1)
    _, ranks = key[int(index)]
    return f"{what} (among ranks {', '.join(map(str, ranks))})"
