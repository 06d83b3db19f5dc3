"""What planning a save costs the first rank, and what a resume reads: python -m tests.scale.saves [--before]

Ranks are simulated: the first rank's work runs as in a save (`checkpoint.plan.planned`), and what it receives from the
others, as JSON, is made beforehand, from the arithmetic of an FSDP x tensor-parallel mesh of 8 columns. No collective
runs, so their time on a network is not in the figures.

--before measures DCP's own planner in its place, on `--layers` of the layers, with the plans of all ranks pickled.
"""

import argparse
import json
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from checkpoint.index import metadata_of, places_text
from checkpoint.plan import Assignment, Plans, families_of, file_of, items_of, lists_to_tell, places_of
from checkpoint.shards import Shard, Spread
from checkpoint.store import needed
from configs.load import load
from models import build_model
from tests.conftest import ROOT

COLUMNS = 8
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class World:
    """A model's tensors, and the ranks over which they are spread."""

    shapes: dict[str, tuple[int, ...]]
    ranks: int

    def shards(self, rank: int) -> dict[str, Shard]:
        """What a rank saves."""
        return {name: self.shard(name, rank) for name in self.names()}

    def names(self) -> list[str]:
        """The tensors' names, in the order of a state."""
        keys = [f"optimizer.{name}.{key}" for name in self.shapes for key in (*MOMENTS, "step")]
        return [f"model.{name}" for name in self.shapes] + keys

    def shard(self, name: str, rank: int) -> Shard:
        """A rank's part: matrices are cut by rows over both dimensions, vectors over the first."""
        if name.endswith(".step"):
            return Shard(torch.empty((), device="meta"), torch.Size([]), torch.Size([]))
        shape = self.shapes[name.removeprefix("model.").removeprefix("optimizer.").removesuffix(_key(name))]
        rows, column = divmod(rank, COLUMNS)
        if len(shape) == 1:
            part, parts, cut = rows, self.ranks // COLUMNS, (True, False)
        else:
            part, parts, cut = column * (self.ranks // COLUMNS) + rows, self.ranks, (True, True)
        first = shape[0] * part // parts
        sizes = (shape[0] * (part + 1) // parts - first, *shape[1:])
        offsets = torch.Size([first] + [0] * (len(shape) - 1))
        mesh = (self.ranks // COLUMNS, COLUMNS)
        spread = Spread(_range(self.ranks), self.ranks, mesh, cut, "rows")
        return Shard(torch.empty(sizes, device="meta"), torch.Size(shape), offsets, spread)


_RANGES: dict[int, tuple[int, ...]] = {}


def _range(n: int) -> tuple[int, ...]:
    return _RANGES.setdefault(n, tuple(range(n)))


def _key(name: str) -> str:
    return next((f".{key}" for key in MOMENTS if name.endswith(f".{key}")), "")


def world_of(job: str, ranks: int, layers: int | None = None) -> World:
    """The tensors of a job's model, with `layers` of its layers."""
    settings = ["--data.sources", '[{name = "random", kind = "synthetic"}]']
    settings += ["--model.n_layers", str(layers)] if layers else []
    config = load(str(ROOT / "configs" / f"{job}.toml"), settings).config
    with torch.device("meta"):
        model = build_model(config.model)
    return World({name: tuple(p.shape) for name, p in model.named_parameters()}, ranks)


class Clock:
    """Adds up the CPU seconds of what it is given to do."""

    seconds = 0.0

    def __call__(self, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = work()
        self.seconds += time.process_time() - started
        return result


def measure(world: World) -> str:
    """A row of the table: the first rank's planning, its next plan, and a resume."""
    shards = world.shards(0)
    clock = Clock()
    families = clock(lambda: families_of(shards, 0))
    others = [[[f.digest, *_elsewhere(f, rank)] for f in families] for rank in range(1, world.ranks)]
    rows = [json.dumps(each) for each in [places_of(families), *others]]
    told = clock(lambda: [json.loads(row) for row in rows])
    lists = clock(lambda: json.loads(json.dumps(lists_to_tell(families, told, 0))))
    assignment = clock(lambda: Assignment(told, lists))
    items = clock(lambda: items_of(assignment, families, shards, 0))
    own = clock(lambda: assignment.boxes(items))
    received = [json.dumps(each) for each in [own, *(boxes_of(world, assignment, r) for r in range(1, world.ranks))]]
    files = [file_of(rank) for rank in range(world.ranks)]
    directory = clock(lambda: assignment.directory([json.loads(each) for each in received], files))
    text = clock(directory.text)
    described = Plans.described(world.shards(0))
    again = Clock()
    again(lambda: Plans.described(shards) == described)
    index = places_text({item.index.fqn: (10**9, 10**7) for item in items})
    resume = Clock()
    metadata = resume(lambda: metadata_of(text, Path("/nowhere")))
    resume(lambda: needed(metadata, shards))
    n = directory.n_parts
    return (
        f"| {world.ranks:,} | {n:,} | {clock.seconds:.2f} | {1e6 * clock.seconds / n:.2f} | {again.seconds:.3f} "
        f"| {len(index):,} | {len(text):,} | {resume.seconds:.2f} |"
    )


def _elsewhere(family: Any, rank: int) -> tuple[int, int]:
    """First rank and position of a family on another rank."""
    is_plain = all(not kind.mesh for kind in family.names.values())
    return (rank, 0) if is_plain else (0, rank)


def boxes_of(world: World, assignment: Assignment, rank: int) -> list[Any]:
    """What a rank tells of its boxes, found with one tensor of each group."""
    names = [members[0] for members in assignment.groups.values()]
    shards = {name: world.shard(name, rank) for name in names}
    # The digests are those of the whole families, which every rank has.
    whole = {bool(assignment.owned[name][1].mesh): assignment.owned[name][0][0] for name in names}
    items = []
    for family in families_of(shards, rank):
        is_spread = any(kind.mesh for kind in family.names.values())
        family.__dict__["digest"] = whole[is_spread]
        items += items_of(assignment, [family], {name: shards[name] for name in family.names}, rank)
    return assignment.boxes(items)


def measure_before(world: World) -> str:
    """A row with DCP's own planner, on the plans of all ranks."""
    pickled = []
    for rank in range(world.ranks):
        shards = world.shards(rank)
        pickled.append(
            pickle.dumps(SavePlan([i for n, s in shards.items() for i in s.__create_write_items__(n, None)]))
        )
    clock = Clock()
    plans = clock(lambda: [pickle.loads(each) for each in pickled])
    n = sum(len(plan.items) for plan in plans)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({}, None, is_coordinator=True)
    clock(lambda: planner.create_global_plan(plans))
    return f"| {world.ranks:,} | {n:,} | {clock.seconds:.1f} | {1e6 * clock.seconds / n:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", default="llama_405b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128, 512, 4096])
    parser.add_argument("--before", action="store_true")
    parser.add_argument("--layers", type=int, help="of the model; default: all, before: 2")
    options = parser.parse_args()
    if options.before:
        print("| ranks | items | planning, s | us an item |\n|---|---|---|---|")
    else:
        print(
            "| ranks | parts | planning, s | us a part | again, s | a rank's index, bytes | directory, bytes "
            "| its part of a resume, s |\n|---|---|---|---|---|---|---|---|"
        )
    row = measure_before if options.before else measure
    for ranks in options.ranks:
        print(row(world_of(options.job, ranks, options.layers or (2 if options.before else None))), flush=True)


if __name__ == "__main__":
    main()
