"""How the order guard compares logs, on logs made by hand."""

import pytest

from parallelisms.guards.order_guard import (
    Issued,
    _checksums,
    _first_difference,
    _lines,
    _members,
    _message,
    _name,
    _order,
)

DENSE, EXPERTS = ("dense", (0, 1, 2, 3)), ("experts", (0, 1))


def logs(*lines: str) -> list[list[Issued]]:
    """A rank each, from words such as "d1 e1 m01": a gather of the dense or expert group, a message from 0 to 1."""
    channels = {"d": DENSE, "e": EXPERTS}
    return [
        [
            Issued(("messages", (int(w[1]), int(w[2]))), "message", True)
            if w[0] == "m"
            else Issued(channels[w[0]], f"gather {w[1]}", False)
            for w in line.split()
        ]
        for line in lines
    ]


def difference(ranks: list[list[Issued]]):
    """The first difference that any rank sees."""
    checksums = [_checksums(log) for log in ranks]
    told = [{_name(key): checksum for key, checksum in each.items()} for each in checksums]
    return min(filter(None, (_first_difference(each, told) for each in checksums)), key=_order, default=None)


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
        (("d1 m01 m01", "d1 m01", "d1", "d1"), (("messages", (0, 1)),)),
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
