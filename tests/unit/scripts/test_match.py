"""The rule of `keel plan --prove`: programs drawn from one order end; what breaks the order is named."""

import random

from hypothesis import given
from hypothesis import strategies as st

from configs.layout import MeshSizes
from parallelisms.guards.order_guard import Channel
from scripts.rehearsal.match import Programs, match
from scripts.rehearsal.play import Event
from scripts.rehearsal.run import ALL_UP_TO, ranks_to_rehearse


def collective(what: str, *ranks: int) -> Event:
    return Event(Channel(f"group {ranks}", ranks), what, "training after step 0", None, None)


def message(what: str, sender: int, receiver: int, sends: bool, batch: int | None = None) -> Event:
    return Event(Channel("messages", (sender, receiver)), what, "training after step 0", sends, batch)


@st.composite
def ordered(draw: st.DrawFn) -> dict[int, list[Event]]:
    """Programs of up to five ranks that follow one order of collectives, messages, and rings of messages."""
    n = draw(st.integers(2, 5))
    programs: dict[int, list[Event]] = {rank: [] for rank in range(n)}
    for number in range(draw(st.integers(1, 12))):
        members = sorted(draw(st.sets(st.integers(0, n - 1), min_size=2)))
        kind = draw(st.sampled_from(["collective", "message", "ring"]))
        if kind == "collective":
            for rank in members:
                programs[rank].append(collective(f"sum {number}", *members))
        elif kind == "message":
            sender, receiver = draw(st.permutations(members))[:2]
            programs[sender].append(message(f"x {number}", sender, receiver, True))
            programs[receiver].append(message(f"x {number}", sender, receiver, False))
        else:
            for place, rank in enumerate(members):
                following = members[(place + 1) % len(members)]
                before = members[place - 1]
                programs[rank].append(message(f"ring {number}", rank, following, True, number))
                programs[rank].append(message(f"ring {number}", before, rank, False, number))
    return programs


@given(ordered())
def test_programs_that_follow_one_order_end(programs):
    found = match(programs)
    assert found.problem is None
    ends = sum(len(events) for events in programs.values())
    assert found.collectives <= ends // 2  # each was issued by two ranks or more


@given(ordered(), st.randoms(use_true_random=False))
def test_a_rank_that_leaves_one_out_is_found(programs, chance: random.Random):
    rank = chance.choice([rank for rank, events in programs.items() if events])
    place = chance.randrange(len(programs[rank]))
    missing = programs[rank].pop(place)
    found = match(programs)

    assert found.problem is not None
    assert any(str(each) in found.problem for each in missing.channel.ranks)


def waits(programs: Programs) -> str:
    found = match(programs).problem
    assert found is not None
    return found


def test_a_circle_over_two_groups_is_named_from_rank_to_rank():
    first = collective("first", 0, 1)
    second = Event(Channel("other", (0, 1)), "second", "validation after step 1", None, None)
    found = waits({0: [first, second], 1: [second, first]})
    assert "rank 0 (training after step 0) waits in first among ranks 0, 1, for which rank 1 has not come" in found
    assert "rank 1 (validation after step 1) waits in second among ranks 0, 1, for which rank 0 has not come" in found


def test_a_rank_that_has_ended_is_named():
    found = waits({0: [collective("sum", 0, 1)], 1: []})
    assert found.endswith("for which rank 1 never comes: its run is at its end")


def test_two_sends_that_wait_for_their_receivers_are_a_circle_unless_they_are_one_batch():
    apart = {rank: [message("x", rank, 1 - rank, True), message("x", 1 - rank, rank, False)] for rank in (0, 1)}
    together = {rank: [event._replace(batch=0) for event in events] for rank, events in apart.items()}
    assert "waits until rank 1 takes a x" in waits(apart)
    assert match(together).problem is None


def test_messages_of_other_sizes_do_not_match():
    found = waits({0: [message("4 elements", 0, 1, True)], 1: [message("8 elements", 0, 1, False)]})
    assert "rank 0 (training after step 0) sends rank 1 a 4 elements, but that" in found
    assert "waits for a 8 elements" in found


def test_ranks_that_are_not_rehearsed_take_part_in_nothing():
    programs = {0: [collective("sum", 0, 1, 2), message("x", 0, 2, True)], 1: [collective("sum", 0, 1, 2)]}
    assert match(programs).problem is None


@given(*[st.integers(1, 6)] * 3, st.sampled_from([1, 2, 4]), st.sampled_from([1, 8]))
def test_the_edges_of_every_axis_are_rehearsed(pp, replicas, shards, cp, tp):
    sizes = MeshSizes(dp_replicate=replicas, dp_shard=shards, tp=tp, cp=cp, pp=pp)
    ranks = ranks_to_rehearse(sizes)
    assert ranks == sorted(set(ranks))
    if sizes.world_size <= ALL_UP_TO:
        assert ranks == list(range(sizes.world_size))
        return
    a_stage = sizes.stage_ranks
    assert {rank // a_stage for rank in ranks} == set(range(pp))
    for stage in (0, pp // 2, pp - 1):
        places = {rank % a_stage for rank in ranks if rank // a_stage == stage}
        # The first and the last rank, and those that are last along one axis only.
        inner = {"tp": 1, "cp": tp, "shard": tp * cp, "replica": tp * cp * shards}
        sizes_of = {"tp": tp, "cp": cp, "shard": shards, "replica": replicas}
        assert {0, a_stage - 1, *((sizes_of[axis] - 1) * stride for axis, stride in inner.items())} <= places
