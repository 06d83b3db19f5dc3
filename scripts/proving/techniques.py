"""The techniques that `keel prove` tries, and the rows in which it tries them: each alone, then in company.

A row of several techniques proves all pairs of them at once, so that few rows cover all pairs. Techniques of one axis
exclude each other, and so do those that divide the batch. A technique meets each other axis at least once, in one of
that axis' variants (compilation meets one of each axis); with `every_pair` each technique meets each other.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from configs.reading.overrides import words
from scripts.parity_rows import DOCUMENTS, Row


@dataclass(frozen=True, eq=False)
class Technique:
    """A way to compute the same, as changes of a job."""

    name: str
    axis: str
    sizes: dict[str, int] = field(default_factory=dict)
    """Axes of [mesh]; the sizes of several techniques multiply."""
    keys: dict[str, object] = field(default_factory=dict)
    """Other machine keys."""
    run: dict[str, object] = field(default_factory=dict)
    """Run keys, which the reference has as well."""
    micro_batches: int = 1
    """Factor of the number of micro-batches in a step."""

    @property
    def ranks(self) -> int:
        """Ranks that it needs alone."""
        return math.prod(size for axis, size in self.sizes.items() if axis != "ep")


def _pipeline(schedule: str, name: str) -> Technique:
    return Technique(f"PP 2 {name}", "pp", {"pp": 2}, {"pipeline.schedule": schedule}, micro_batches=2)


def _context(method: str) -> Technique:
    return Technique(f"CP 2 {method}", "cp", {"cp": 2}, {"context.method": method})


_BY_OWNER: dict[str, object] = {"fsdp.partition": "owner"}
TECHNIQUES = (
    Technique("DDP 2", "ddp", {"dp_replicate": 2}),
    Technique("FSDP 2", "fsdp", {"dp_shard": 2}),
    Technique("HSDP 2x2", "hsdp", {"dp_replicate": 2, "dp_shard": 2}),
    Technique("ZeRO 1", "zero", {"dp_shard": 2}, {"fsdp.zero_stage": 1}),
    Technique("ZeRO 2", "zero", {"dp_shard": 2}, {"fsdp.zero_stage": 2}),
    Technique("owner 2", "owner", {"dp_replicate": 2}, _BY_OWNER),
    Technique("TP 2", "tp", {"tp": 2}),
    _context("gather"),
    _context("ring"),
    _context("all_to_all"),
    _pipeline("1f1b", "1f1b"),
    _pipeline("gpipe", "gpipe"),
    _pipeline("interleaved_1f1b", "interleaved"),
    _pipeline("zero_bubble_v", "zero-bubble"),
    Technique("EP 2", "ep", {"dp_shard": 2, "ep": 2}),
    Technique("AC full", "ac", keys={"activation_checkpoint.mode": "full"}),
    Technique("AC selective", "ac", keys={"activation_checkpoint.mode": "selective"}),
    Technique("compile", "compile", keys={"compile.enable": "true"}),
    Technique("accumulation", "accumulation", micro_batches=2),
    Technique("documents", "documents", run=DOCUMENTS),
)
AXES = tuple(dict.fromkeys(each.axis for each in TECHNIQUES))
_DATA_PARALLEL = ("ddp", "fsdp", "hsdp", "zero", "owner")
"""Axes that exclude each other: each is one way to divide the same batch."""

Combination = tuple[Technique, ...]


def chosen(axes: Collection[str], has_documents: bool) -> list[Technique]:
    """The techniques with these axes or names; without the document mask if the job has one in every row."""
    named = [each for each in TECHNIQUES if each.axis in axes or each.name in axes]
    return [each for each in named if not (has_documents and each.axis == "documents")]


def name_of(techniques: Combination) -> str:
    """The name of a row, and of its techniques."""
    return " x ".join(each.name for each in techniques) or "1 process"


def row_of(techniques: Combination, batch: int, micro_batch: int | None = None) -> Row:
    """The row of the parity table that tries techniques together.

    Args:
        batch: the global batch, in sequences.
        micro_batch: the micro-batch, where it is part of the run; default: the largest, which the techniques shrink.
    """
    sizes = {axis: math.prod(each.sizes.get(axis, 1) for each in techniques) for axis in _MESH}
    if any(each.axis == "owner" for each in techniques):  # what shares experts out is then no shard
        sizes |= {"dp_replicate": sizes["dp_replicate"] * sizes["dp_shard"], "dp_shard": 1}
    keys: dict[str, object] = {f"mesh.{axis}": size for axis, size in sizes.items() if size > 1 or axis == "dp_shard"}
    run: dict[str, object] = {}
    for each in techniques:
        keys |= each.keys
        run |= each.run
    parts = sizes["dp_replicate"] * sizes["dp_shard"] * math.prod(each.micro_batches for each in techniques)
    keys["training.micro_batch_size"] = micro_batch or max(1, batch // parts)
    return Row(name_of(techniques), ranks_of(techniques), words(keys), words(run))


_MESH = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


def _kind(technique: Technique) -> str:
    """The axis, where those that divide the same batch are one."""
    return "data" if technique.axis in _DATA_PARALLEL else technique.axis


@dataclass
class Pairs:
    """The pairs of techniques, and what is known of each before it runs."""

    possible: set[Combination] = field(default_factory=set)
    """The job accepts them, and there are enough ranks."""
    refused: dict[Combination, str] = field(default_factory=dict)
    """The job's reason."""
    too_large: dict[Combination, int] = field(default_factory=dict)
    """The ranks that they need."""


@dataclass
class Search:
    """Which techniques are tried together."""

    techniques: Sequence[Technique]
    """Those that work alone."""
    ranks: int
    """The most ranks."""
    refusal: Callable[[Combination], str]
    """Returns the job's reason to refuse a combination, "" if it accepts it."""
    every_pair: bool = False
    """Cover each pair, and not only each technique with each other axis."""

    def pairs(self) -> Pairs:
        """Sort the pairs of techniques that do not exclude each other."""
        pairs = Pairs()
        for pair in combinations(self.techniques, 2):
            needed = ranks_of(pair)
            if _kind(pair[0]) == _kind(pair[1]):  # they exclude each other
                continue
            if needed > self.ranks:
                pairs.too_large[pair] = needed
            elif reason := self.refusal(pair):
                pairs.refused[pair] = reason
            else:
                pairs.possible.add(pair)
        return pairs

    def rows(self, possible: Collection[Combination]) -> Iterator[Combination]:
        """Yield combinations that together cover the possible pairs.

        A greedy cover: each begins with the pair that covers most, and takes in what adds most of the rest.
        """
        uncovered = {goal for pair in possible for goal in self._goals(pair)}
        ordered = sorted(possible, key=_order)
        while uncovered:
            row = max(ordered, key=lambda pair: len(self._goals(pair) & uncovered))
            while larger := self._larger(row, possible, uncovered):
                row = larger
            uncovered -= {goal for pair in combinations(row, 2) for goal in self._goals(pair)}
            yield row

    def _larger(self, row: Combination, possible: Collection[Combination], uncovered: set["Goal"]) -> Combination:
        """The row with the technique that adds most of what is uncovered; empty if none adds any."""
        best: Combination = ()
        most = 0
        for each in self.techniques:
            larger = tuple(sorted((*row, each), key=TECHNIQUES.index))
            added = [pair for pair in combinations(larger, 2) if each in pair]
            if each in row or not all(pair in possible for pair in added):
                continue
            gained = sum(len(self._goals(pair).intersection(uncovered)) for pair in added)
            if gained > most and ranks_of(larger) <= self.ranks and not self.refusal(larger):
                best = larger
                most = gained
        return best

    def _goals(self, pair: Combination) -> set["Goal"]:
        """What a pair covers: itself, or each of its techniques with the other's axis; compilation, only both axes.

        Compiling takes ten times as long as all the rest of a row.
        """
        one, other = pair
        if "compile" in (one.axis, other.axis) and not self.every_pair:
            return {(_kind(one), _kind(other))}
        return {(one.name, other.name)} if self.every_pair else {(one.name, _kind(other)), (other.name, _kind(one))}


Goal = tuple[str, str]


def ranks_of(techniques: Combination) -> int:
    """The ranks that a combination needs."""
    return math.prod(each.ranks for each in techniques)


def _order(pair: Combination) -> list[int]:
    """Place of a pair, in the order of the techniques."""
    return [TECHNIQUES.index(each) for each in pair]
