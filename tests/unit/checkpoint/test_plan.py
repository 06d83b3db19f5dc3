"""Who writes what: on each mesh every part once, by one of those that hold it, and about equally much by each."""

from collections import Counter
from math import prod

import pytest
import torch

from checkpoint.plan import SMALL_WRITERS, Assignment, families_of, file_of, items_of, lists_to_tell, places_of
from checkpoint.shards import Shard, Spread
from tests.scale.saves import World, measure

SHAPES = {"matrix": (8, 6), "uneven": (5, 7), "small": (1, 3), "vector": (9,), "cube": (2, 4, 3)}


def part_of(size, parts, number):
    """First row and number of rows of a part, cut as torch.chunk cuts."""
    rows = -(-size // parts)
    first = min(number * rows, size)
    return first, min(rows, size - first)


def spread_over(ranks, mesh, rank, shape, dims):
    """A rank's shard of a tensor over a mesh; dims: for each mesh dimension the dimension that it cuts, or None."""
    at = torch.unravel_index(torch.tensor(ranks.index(rank)), mesh)
    offsets, sizes = [0] * len(shape), list(shape)
    for position, size, dim in zip(map(int, at), mesh, dims, strict=True):
        if dim is not None:
            first, sizes[dim] = part_of(sizes[dim], size, position)
            offsets[dim] += first
    cut = tuple(dim is not None for dim in dims)
    spread = Spread(tuple(ranks), hash(tuple(ranks)), mesh, cut, repr(dims))
    return Shard(torch.empty(sizes, device="meta"), torch.Size(shape), torch.Size(offsets), spread)


def plain(shape=()):
    return Shard(torch.empty(shape, device="meta"), torch.Size(shape), torch.Size([0] * len(shape)))


def planned(by_rank):
    """What each rank writes, as `planned` finds it with collectives, and the directory."""
    families = [families_of(shards, rank) for rank, shards in enumerate(by_rank)]
    told = [places_of(each) for each in families]
    lists = [lists_to_tell(each, told, rank) for rank, each in enumerate(families)]
    assignment = Assignment(told, {digest: names for of_rank in lists for digest, names in of_rank.items()})
    items = [items_of(assignment, families[rank], shards, rank) for rank, shards in enumerate(by_rank)]
    files = [file_of(rank) for rank in range(len(by_rank))]
    return items, assignment.directory([assignment.boxes(each) for each in items], files)


def parts_held(by_rank):
    """Every part that any rank holds: name, offsets."""
    return {(name, shard.offsets) for shards in by_rank for name, shard in shards.items() if all(shard.local.shape)}


def assert_each_part_once(by_rank):
    items, directory = planned(by_rank)
    written = Counter((item.index.fqn, item.index.offset) for of_rank in items for item in of_rank)
    assert set(written) == parts_held(by_rank)
    assert set(written.values()) == {1}
    listed = {
        (name, torch.Size(offsets)): file
        for group in directory.groups
        for name in group.names
        for offsets, _, file in group.parts
    }
    assert listed == {
        (item.index.fqn, item.index.offset): rank for rank, of_rank in enumerate(items) for item in of_rank
    }
    for rank, of_rank in enumerate(items):
        assert {item.index.fqn for item in of_rank} <= by_rank[rank].keys()
    return items


@pytest.mark.parametrize(
    ("mesh", "dims"),
    [
        ((4,), (0,)),
        ((4,), (None,)),
        ((2, 2), (None, 0)),
        ((2, 2), (0, None)),
        ((2, 4), (0, 0)),
        ((2, 3, 2), (None, 0, None)),
        ((1, 1), (0, 0)),
    ],
)
def test_a_mesh_of_all_ranks(mesh, dims):
    ranks = list(range(prod(mesh)))
    by_rank = [
        {name: spread_over(ranks, mesh, rank, shape, dims) for name, shape in SHAPES.items()}
        | {f"{name}.step": plain() for name in SHAPES}
        for rank in ranks
    ]
    items = assert_each_part_once(by_rank)
    assert max(map(len, items)) <= min(map(len, items)) + 2 * len(SHAPES) / min(mesh[0], 2)


def test_copies_are_divided_by_size():
    ranks = list(range(4))
    sizes = {f"t{n}": (2 ** (n % 5) * 1000, 3) for n in range(40)}
    by_rank = [
        {name: spread_over(ranks, (4,), rank, shape, (None,)) for name, shape in sizes.items()} for rank in ranks
    ]
    items = assert_each_part_once(by_rank)
    totals = [sum(prod(item.tensor_data.size) for item in of_rank) for of_rank in items]
    assert max(totals) < 1.05 * min(totals)


def test_few_ranks_write_what_is_small():
    """A rank that resumes needs the step count of every parameter, and opens the files of all that have one."""
    items = assert_each_part_once([{f"{n}.step": plain() for n in range(100)} for _ in range(30)])
    assert sum(map(bool, items)) == SMALL_WRITERS


def test_stages_and_what_all_of_them_have():
    """Two stages of four ranks, each cut over its own; a count on all ranks; a bias on each rank of a stage."""
    by_rank = []
    for rank in range(8):
        stage = rank // 4
        ranks = list(range(4 * stage, 4 * stage + 4))
        by_rank.append(
            {f"{stage}.{name}": spread_over(ranks, (2, 2), rank, shape, (0, None)) for name, shape in SHAPES.items()}
            | {"step": plain(), f"{stage}.bias": plain((3,))}
        )
    assert_each_part_once(by_rank)


def test_the_same_tensors_on_several_meshes():
    """Tensor parallelism without a word of it in the placements: each of two meshes of rows holds everything."""
    by_rank = [
        {name: spread_over(list(range(rank % 2, 8, 2)), (4,), rank, shape, (0,)) for name, shape in SHAPES.items()}
        for rank in range(8)
    ]
    items = assert_each_part_once(by_rank)
    assert items[0]
    assert items[1]


def test_owners_and_what_all_have():
    by_rank = [
        {f"weight {rank}": plain((5, 5)), f"moment {rank}": plain((5, 5)), "bias": plain((2,))} for rank in range(5)
    ]
    items = assert_each_part_once(by_rank)
    assert sum(len(of_rank) for of_rank in items) == 11


def test_one_name_cut_differently():
    """Whole on rank 0, and cut over ranks 1 and 2: rank 0 alone writes it."""
    by_rank = [{"w": plain((4, 4))}] + [
        {"w": spread_over([1, 2], (2,), rank, (4, 4), (0,)), "only": plain()} for rank in (1, 2)
    ]
    items, _ = planned(by_rank)
    assert [[item.index.fqn for item in of_rank] for of_rank in items] == [["w"], ["only"], []]


def test_parts_that_are_missing():
    """A mesh one of whose ranks does not take part."""
    by_rank = [{"w": spread_over([0, 1, 2], (3,), rank, (6,), (0,))} for rank in (0, 1)]
    with pytest.raises(RuntimeError, match="do not hold w in parts that make up the whole"):
        planned(by_rank)


def test_the_program_that_measures_planning():
    """Its simulated ranks write every tensor once, or the directory would be refused."""
    assert measure(World({"matrix": (64, 8), "vector": (16,)}, 16)).startswith("| 16 | ")
