"""How the order guard compares logs, on logs made by hand."""

import random
import time
from itertools import product

import pytest

from parallelisms.guards.order_guard import (
    _MODULUS,
    Channel,
    Issued,
    _checksums,
    _first_difference,
    _lines,
    _members,
    _message,
    _name,
    _order,
    term,
)

DENSE, EXPERTS = Channel("dense", (0, 1, 2, 3)), Channel("experts", (0, 1))


def logs(*lines: str) -> list[list[Issued]]:
    """A rank each, from words such as "d1 e1 m01": a gather of the dense or expert group, a message from 0 to 1."""
    channels = {"d": DENSE, "e": EXPERTS}
    return [
        [
            Issued(Channel("messages", (int(w[1]), int(w[2]))), "message", True)
            if w[0] == "m"
            else Issued(channels[w[0]], f"gather {w[1]}", False)
            for w in line.split()
        ]
        for line in lines
    ]


def difference(ranks: list[list[Issued]]):
    """The first difference that any rank sees; there is one where the ranks' terms do not cancel."""
    checksums = [_checksums(log, {}) for log in ranks]
    told = [{_name(key): checksum for key, checksum in each.items()} for each in checksums]
    first = min(filter(None, (_first_difference(each, told) for each in checksums)), key=_order, default=None)
    assert is_balanced(ranks) == (first is None)
    return first


def is_balanced(ranks: list[list[Issued]]) -> bool:
    """Whether the sum over all ranks, which the guard reduces, says that they agree."""
    terms = []
    for rank, log in enumerate(ranks):
        members = {}
        terms.append(term(_checksums(log, members), members, rank))
    return sum(terms) % _MODULUS == 0


@pytest.mark.parametrize(
    "lines",
    [
        ("d1 e1 d2", "d1 e1 d2", "d1 d2", "d1 d2"),
        ("d1 m01 d2 m10", "m10 d1 m01 d2", "d1 d2", "d1 d2"),  # when a message is sent and received may differ
        ("", "", "", ""),
    ],
)
def test_ranks_that_agree(lines):
    assert difference(logs(*lines)) is None


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        (("d1 d2", "d1 d2", "d2 d1", "d1 d2"), (DENSE,)),
        (("d1 d2", "d1 d2", "d1 d2", "d1"), (DENSE,)),
        (("d1", "d1", "d1", ""), (DENSE,)),
        (("d1 e1", "d1 e2", "d1", "d1"), (EXPERTS,)),
        (("d1 e1", "e1 d1", "d1", "d1"), (DENSE, EXPERTS)),  # each group's own order is right
        (("d1 m01 m01", "d1 m01", "d1", "d1"), (Channel("messages", (0, 1)),)),
    ],
)
def test_ranks_that_differ(lines, key):
    assert difference(logs(*lines)) == key


def test_the_message_names_the_rank_and_the_first_that_differs():
    ranks = logs("d1 d2 e1", "d1 d2 e1", "d1 d3", "d1 d2")
    key = difference(ranks)
    message = _message(key, [_lines(log, key) for log in ranks], step=7)
    assert "in step 7 of this launch, rank 2 issued as number 2 gather 3 (among ranks 0, 1, 2, 3)" in message
    assert "where rank 0 issued gather 2 (among ranks 0, 1, 2, 3). The step was not applied." in message
    shorter = logs("d1 d2", "d1", "d1 d2", "d1 d2")
    lines = [_lines(log, (DENSE,)) for log in shorter]
    assert "rank 1 issued as number 2 nothing more, where rank 0" in _message((DENSE,), lines, 1)
    assert _members((DENSE, EXPERTS)) == [0, 1]


SIZES = {"replicate": 2, "shard": 2, "cp": 2, "tp": 2}
AXES = [("replicate", "shard"), ("replicate", "shard", "cp"), ("shard", "cp"), ("cp",), ("tp",), tuple(SIZES)]
"""Groups of a mesh; two of them, (replicate, shard) and (shard, cp), share ranks that are no group themselves."""


def groups_of(rank: int, sizes: dict[str, int], axes: list[tuple[str, ...]]) -> list[Channel]:
    """The groups of a rank; ranks count the last axis first."""
    places = list(product(*map(range, sizes.values())))
    mine = dict(zip(sizes, places[rank], strict=True))

    def is_in(place: tuple[int, ...], group: tuple[str, ...]) -> bool:
        return all(name in group or mine[name] == at for name, at in zip(sizes, place, strict=True))

    return [Channel("-".join(group), tuple(n for n, at in enumerate(places) if is_in(at, group))) for group in axes]


@pytest.mark.slow
def test_one_number_of_each_rank_finds_any_difference():
    draw = random.Random(7)
    for _ in range(200):
        order = [(draw.randrange(len(AXES)), draw.randrange(3)) for _ in range(12)]
        ranks = [
            [Issued(groups[group], f"gather {what}", False) for group, what in order]
            for groups in (groups_of(rank, SIZES, AXES) for rank in range(16))
        ]
        assert is_balanced(ranks)
        changed = ranks[draw.randrange(16)]
        at = draw.randrange(11)
        kind = draw.choice(["swap", "lose", "repeat"])
        if kind == "swap":
            changed[at], changed[at + 1] = changed[at + 1], changed[at]
        elif kind == "lose":
            del changed[at]
        else:
            changed.insert(at, changed[at])
        # A swap of equal collectives, or of collectives of groups that share no other rank, is none: both agree on it.
        difference(ranks)


def test_the_cost_does_not_grow_with_the_number_of_ranks():
    spent = {}
    for n_ranks in (64, 4096):
        sizes = {"replicate": n_ranks // 64, "shard": 8, "tp": 8}
        groups = groups_of(n_ranks - 1, sizes, [("replicate", "shard"), ("shard",), ("tp",), tuple(sizes)])
        log = [Issued(groups[n % 4], f"allgather of ({n % 7}, 4096) bfloat16", False) for n in range(2000)]
        members = {}
        _checksums(log, members)  # the first comparison of a launch also finds which groups share ranks
        began = time.process_time()
        term(_checksums(log, members), members, n_ranks - 1)
        spent[n_ranks] = time.process_time() - began
    assert spent[4096] < 4 * spent[64] + 0.01, spent
