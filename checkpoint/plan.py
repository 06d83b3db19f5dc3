"""Which rank writes which part of a tensor: each rank finds out by itself, from names, shapes and placements.

torch.distributed.checkpoint's own planner gathers a description of every part on the first rank, which takes that rank
minutes for a large model on many ranks. Here a rank describes its tensors by *families*: those that are spread over
the same ranks of a mesh. The ranks exchange a digest of each family, and where a digest is new, its list of names, so
that all of them know which ranks hold what, without a word on single parts. From that, every rank derives the same
assignment:

- A part is held by the ranks with the same coordinates on the mesh dimensions that cut the tensor. These are its
  *copies*. Families with equal lists on other ranks, such as the step counts that every rank has, hold copies as well.
- Of its copies one is written. Tensors with equally many copies are divided among them by size, the largest first;
  small ones among a few of them.
- If two families have a tensor of one name, but cut differently, the one with the lowest rank writes it.

Tensors of one kind (dtype, shape, placements) whose copies are written by the same ranks form a *group*: each rank has
the same box of each of them. So the directory of a checkpoint says where the parts of a group are, not of each tensor.
A plan is kept from one save to the next, and serves again as long as no rank's tensors have changed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.planner import WriteItem

from checkpoint.index import Box, Directory, Group
from checkpoint.shards import Shard
from checkpoint.verify import shares
from parallelisms.ranks import Json, gather

FRAME_BYTES = 1300
"""Bytes that torch.save adds to a tensor."""
SMALL_BYTES = 64 << 10
SMALL_WRITERS = 8
"""Tensors below this size, such as the step counts that every rank has, are divided among this many of their holders.
A rank that resumes needs all of these tensors, so it opens this many files for them."""


@dataclass(frozen=True)
class Kind:
    """What tensors have in common that are cut into the same boxes."""

    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    mesh: tuple[int, ...]
    """Sizes of the mesh over which it is spread; empty: a plain tensor, which is whole."""
    cut: tuple[bool, ...]
    """Whether each dimension of the mesh cuts the tensor; along the others, ranks hold copies."""
    placements: str
    """DTensor's, as text."""

    @property
    def bytes(self) -> int:
        """Bytes of a part on average, as written."""
        parts = prod(size for size, is_cut in zip(self.mesh, self.cut, strict=True) if is_cut)
        return prod(self.shape) * getattr(torch, self.dtype).itemsize // parts + FRAME_BYTES

    @property
    def copies(self) -> int:
        """Ranks of the mesh that hold the same part."""
        return prod(size for size, is_cut in zip(self.mesh, self.cut, strict=True) if not is_cut)

    def holders(self, position: int) -> list[int]:
        """The positions in the mesh, in row-major order, that hold the same part as `position`."""
        if not self.mesh:
            return [0]
        positions = torch.arange(prod(self.mesh)).view(self.mesh)
        here = torch.unravel_index(torch.tensor(position), self.mesh)
        box = tuple(int(at) if is_cut else slice(None) for at, is_cut in zip(here, self.cut, strict=True))
        return positions[box].flatten().tolist()


Names = dict[str, Kind]
"""The tensors of a family."""


@dataclass(frozen=True)
class Family:
    """The tensors of this rank that are spread over the same ranks."""

    names: Names
    first: int
    """The lowest rank that they are spread over."""
    position: int
    """This rank's position in the mesh, in row-major order."""

    @cached_property
    def digest(self) -> str:
        """Equal for families with the same tensors, whichever ranks they are spread over."""
        return xxhash.xxh3_128_hexdigest(json.dumps(_as_lists(self.names)).encode())


def families_of(shards: Mapping[str, Shard], rank: int) -> list[Family]:
    """Sort this rank's tensors by the ranks over which they are spread."""
    names: dict[int | None, Names] = {}
    ranks: dict[int | None, tuple[int, ...]] = {}
    kinds: dict[tuple[Any, ...], Kind] = {}
    for name, shard in shards.items():
        spread = shard.spread
        key = (shard.local.dtype, shard.shape, spread)
        if key not in kinds:
            dtype = str(shard.local.dtype).removeprefix("torch.")
            layout = (spread.mesh, spread.cut, spread.placements) if spread else ((), (), "")
            kinds[key] = Kind(dtype, tuple(shard.shape), *layout)
        digest = spread.digest if spread else None
        names.setdefault(digest, {})[name] = kinds[key]
        ranks[digest] = spread.ranks if spread else (rank,)
    return [Family(names[each], min(ranks[each]), ranks[each].index(rank)) for each in names]


Lists = list[list[Any]]


def _as_lists(names: Names) -> Lists:
    """Names by kind, as JSON holds them; the order is the same for equal families."""
    by_kind: dict[Kind, list[str]] = {}
    for name, kind in sorted(names.items()):
        by_kind.setdefault(kind, []).append(name)
    return [
        [kind.dtype, list(kind.shape), list(kind.mesh), list(kind.cut), kind.placements, members]
        for kind, members in by_kind.items()
    ]


def _as_names(lists: Lists) -> Names:
    """The inverse of `_as_lists`."""
    names: Names = {}
    for dtype, shape, mesh, cut, placements, members in lists:
        names |= dict.fromkeys(members, Kind(dtype, tuple(shape), tuple(mesh), tuple(cut), placements))
    return names


# --------------------------------------------------------------------------- what all ranks know

Place = tuple[str, int, int]
"""A family on one rank: its digest, its first rank, and the rank's position in the mesh."""


def places_of(families: Sequence[Family]) -> list[Place]:
    """What a rank tells all others of its families."""
    return [(family.digest, family.first, family.position) for family in families]


def lists_to_tell(families: Sequence[Family], told: Sequence[Sequence[Place]], rank: int) -> dict[str, Lists]:
    """The lists, by digest, of the families that no lower rank has."""
    lowest: dict[str, int] = {}
    for other, places in enumerate(told):
        for digest, _, _ in places:
            lowest.setdefault(digest, other)
    return {family.digest: _as_lists(family.names) for family in families if lowest[family.digest] == rank}


@dataclass(frozen=True)
class Holding:
    """The ranks that hold families with equal tensors: rank by position, for each set of ranks by its lowest."""

    sets: dict[int, dict[int, int]]

    def ranks(self, positions: Sequence[int]) -> list[int]:
        """The ranks at these positions, of all sets."""
        return [ranks[position] for ranks in self.sets.values() for position in positions]


Owned = tuple[tuple[str, ...], Kind, int]
"""What tensors of one group have in common: the digests of the families that have them, kind, number of the copy."""


class Assignment:
    """Who writes what; the same on all ranks."""

    def __init__(self, told: Sequence[Sequence[Place]], lists: Mapping[str, Lists]) -> None:
        """
        Args:
            told: each rank's places, in rank order.
            lists: of every family, by digest, in the order of the lowest rank that has it.
        """
        self._holdings = {digest: Holding({}) for digest in lists}
        for rank, places in enumerate(told):
            for digest, first, position in places:
                self._holdings[digest].sets.setdefault(first, {})[position] = rank
        self.owned: dict[str, Owned] = self._owned({digest: _as_names(each) for digest, each in lists.items()})
        self.groups: dict[Owned, list[str]] = {}
        """The names of each group, sorted; in the same order on all ranks."""
        for name in sorted(self.owned):
            self.groups.setdefault(self.owned[name], []).append(name)
        self._writers: dict[tuple[Any, ...], list[int]] = {}

    def _owned(self, families: Mapping[str, Names]) -> dict[str, Owned]:
        found: dict[str, tuple[tuple[str, ...], Kind]] = {}
        for digest, names in families.items():
            for name, kind in names.items():
                holders, known = found.setdefault(name, ((), kind))
                if known == kind:
                    found[name] = ((*holders, digest), kind)
        # Tensors whose copies are on the same ranks are divided together.
        divided: dict[tuple[Any, ...], dict[str, int]] = {}
        for name, (holders, kind) in found.items():
            is_small = kind.bytes < SMALL_BYTES
            divided.setdefault((holders, kind.mesh, kind.cut, is_small), {})[name] = kind.bytes
        copy_of: dict[str, int] = {}
        for (holders, *_, is_small), sizes in divided.items():
            kind = found[next(iter(sizes))][1]
            copies = kind.copies * sum(len(self._holdings[digest].sets) for digest in holders)
            copies = min(copies, SMALL_WRITERS) if is_small else copies
            for copy, share in enumerate(shares(sizes, copies)):
                copy_of |= dict.fromkeys(share, copy)
        return {name: (*found[name], copy_of[name]) for name in found}

    def writes(self, name: str, family: Family, rank: int) -> bool:
        """Whether this rank writes its part of a tensor, which it has in `family`."""
        holders, kind, copy = self.owned[name]
        if family.digest not in holders:
            return False
        key = (holders, kind.mesh, kind.cut, family.position)
        if key not in self._writers:
            positions = kind.holders(family.position)
            ranks = [self._holdings[digest].ranks(positions) for digest in holders]
            self._writers[key] = sorted(chain.from_iterable(ranks))
        return self._writers[key][copy] == rank

    def boxes(self, items: Sequence[WriteItem]) -> list[tuple[int, Box]]:
        """This rank's box in each of the groups of which it writes, by the group's number."""
        numbers = {owned: number for number, owned in enumerate(self.groups)}
        boxes: dict[int, Box] = {}
        for item in items:
            assert item.tensor_data is not None  # all items are tensors
            chunk = item.tensor_data.chunk
            boxes.setdefault(numbers[self.owned[item.index.fqn]], (list(chunk.offsets), list(chunk.sizes)))
        return sorted(boxes.items())

    def directory(self, told: Sequence[Sequence[tuple[int, Box]]], files: list[str]) -> Directory:
        """Where the parts of all tensors are.

        Args:
            told: each rank's boxes, in rank order.
            files: each rank's file.

        Raises:
            RuntimeError: the ranks together would not write each tensor once.
        """
        parts: list[list[tuple[list[int], list[int], int]]] = [[] for _ in self.groups]
        for rank, boxes in enumerate(told):
            for number, (offsets, sizes) in boxes:
                parts[number].append((offsets, sizes, rank))
        groups = []
        for ((_, kind, _), names), of_group in zip(self.groups.items(), parts, strict=True):
            if sum(prod(sizes) for _, sizes, _ in of_group) != prod(kind.shape):
                raise RuntimeError(f"the ranks do not hold {names[0]} in parts that make up the whole, once")
            if of_group:
                groups.append(Group(names, kind.dtype, list(kind.shape), of_group))
        return Directory(groups, files)


# --------------------------------------------------------------------------- a plan, and keeping it


@dataclass(frozen=True)
class Plan:
    """What this rank writes, and where the parts of all ranks are."""

    items: list[WriteItem]
    directory: Directory


@dataclass
class Plans:
    """Makes the plan of a save, or takes the last one again if all ranks save the same tensors as then."""

    _last: Plan | None = None
    _made_for: list[Any] = field(default_factory=list)

    @staticmethod
    def described(shards: Mapping[str, Shard]) -> list[Any]:
        """What a plan is made for: it serves again for tensors that are described alike."""
        return [(name, shard.local.dtype, shard.shape, shard.offsets, shard.spread) for name, shard in shards.items()]

    def plan(self, shards: Mapping[str, Shard], group: dist.ProcessGroup) -> Plan:
        """The plan for a state; all ranks of `group`, which holds all ranks, must call it."""
        made_for = self.described(shards)
        serves = torch.tensor(int(self._last is not None and made_for == self._made_for))
        # Whether the last plan serves on all ranks.
        dist.all_reduce(serves, op=dist.ReduceOp.MIN, group=group)
        if self._last is None or not serves:
            self._last = planned(shards, group)
            self._made_for = made_for
        return self._last


def planned(shards: Mapping[str, Shard], group: dist.ProcessGroup) -> Plan:
    """Make a plan; all ranks of `group` must call it."""
    rank = dist.get_rank(group)
    families = families_of(shards, rank)
    own_places: Json = places_of(families)
    # A line for each family of each rank.
    told = gather(own_places, group)
    # The lists that differ, each once.
    lists = gather(lists_to_tell(families, told, rank), group)
    assignment = Assignment(told, {digest: each for of_rank in lists for digest, each in of_rank.items()})
    items = items_of(assignment, families, shards, rank)
    # A rank's boxes: one for each group.
    boxes = gather(assignment.boxes(items), group)
    return Plan(items, assignment.directory(boxes, [file_of(each) for each in range(len(boxes))]))


def items_of(
    assignment: Assignment, families: Sequence[Family], shards: Mapping[str, Shard], rank: int
) -> list[WriteItem]:
    """What this rank writes, in the order of `shards`, as DCP's writer takes it."""
    family_of = {name: family for family in families for name in family.names}
    return [
        item
        for name, shard in shards.items()
        if assignment.writes(name, family_of[name], rank)
        for item in shard.__create_write_items__(name, None)
    ]


def file_of(rank: int) -> str:
    """The file of a rank's tensors."""
    return f"__{rank}_0.distcp"
