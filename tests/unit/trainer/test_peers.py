"""How ranks that cannot see each other's processes find those that are lost: by a few requests each, at any scale."""

import json
from collections import Counter
from itertools import combinations

import pytest
import torch.distributed as dist

from configs.secret import signed
from tests.scale.store import Recorded
from trainer.guards import peers as peers_module
from trainer.guards.peers import PERIOD_SECONDS, Beat, Peers, watched_by
from trainer.guards.watchdog import Watchdog

HOST = 8
"""Ranks of a host."""


def found_of(lost: set[int], world_size: int) -> set[int]:
    """The lost ranks that some living rank watches."""
    return {each for rank in range(world_size) if rank not in lost for each in watched_by(rank, world_size)} & lost


def test_of_any_ranks_lost_together_some_are_watched_by_one_that_lives():
    for world_size in range(1, 11):
        for count in range(1, world_size):
            for lost in map(set, combinations(range(world_size), count)):
                assert found_of(lost, world_size), (world_size, lost)


def test_of_lost_neighbors_up_to_half_of_all_each_one_is_watched():
    for world_size in (2, 3, 5, 8, 12, 31, 64):
        for first in range(world_size):
            for count in range(1, world_size // 2 + 1):
                lost = {(first + i) % world_size for i in range(count)}
                assert found_of(lost, world_size) == lost, (world_size, lost)


def test_a_rank_watches_few_others_and_is_watched_by_as_many():
    assert watched_by(0, 1) == []
    assert watched_by(0, 2) == [1]
    for world_size in (8, 512, 4096, 16384):
        times = Counter(each for rank in range(world_size) for each in watched_by(rank, world_size))
        assert len(times) == world_size
        assert set(times.values()) == {len(watched_by(7, world_size))}
        assert len(watched_by(7, world_size)) <= 16
        assert 7 not in watched_by(7, world_size)


class World:
    """Watchdogs of some ranks of a launch without their threads, a clock, and the store with all ranks' beats."""

    def __init__(self, monkeypatch, folder, world_size: int, ranks: list[int]) -> None:
        self.now = 1000.0
        monkeypatch.setattr(peers_module.time, "monotonic", lambda: self.now)
        self.store = Recorded(dist.HashStore())
        for rank in range(world_size):
            self.beat(rank, 1)
        self.watchdogs = {}
        for rank in ranks:
            watchdog = object.__new__(Watchdog)
            watchdog.peers = Peers(self.store, rank, world_size, folder / str(rank))
            watchdog._silent = {}
            watchdog._lost = {}
            watchdog._mark = (40, "training", self.now, False)
            self.watchdogs[rank] = watchdog

    def beat(self, rank: int, count: int) -> None:
        beat = Beat(rank, f"host-{rank // HOST}", 100 + rank, f"host-{rank // HOST} pid:[1]", "1", "", 40, count=count)
        self.store.store.set(f"beat/{rank}", signed(f"beat/{rank}", json.dumps(vars(beat))))

    def period(self, but: set[int] = frozenset()) -> None:
        """Every watchdog but these looks and listens; all ranks but these are alive."""
        for rank in self.watchdogs.keys() - but:
            self.beat(rank, int(self.now))
        for rank in sorted(self.watchdogs.keys() - but):
            self.store.asking = rank
            self.watchdogs[rank]._look_for_the_silent()
        for rank in sorted(self.watchdogs.keys() - but):
            self.store.asking = rank
            self.watchdogs[rank]._hear()
        self.now += PERIOD_SECONDS


@pytest.mark.parametrize("world_size", [8, 512, 4096])
def test_a_lost_host_is_known_to_all_after_few_requests_of_each(monkeypatch, tmp_path, world_size):
    """When each rank asked for all beats until one was silent, 4,096 ranks made 33 million requests."""
    lost = set(range(4, 8)) if world_size == 8 else set(range(world_size // 2, world_size // 2 + HOST))
    watchers = {rank for rank in range(world_size) if lost & set(watched_by(rank, world_size))} | {0}
    others = {each for rank in watchers for each in watched_by(rank, world_size)}
    ranks = sorted(watchers | lost | (others if world_size == 8 else set()))
    world = World(monkeypatch, tmp_path, world_size, ranks)
    alive = [rank for rank in ranks if rank not in lost]
    world.period()
    world.store.requests.clear()
    beating = {each for rank in alive for each in watched_by(rank, world_size)} - lost
    for number in range(4):
        for rank in beating:
            world.beat(rank, int(world.now) + number)
        world.period(but=lost)
    for rank in alive:
        assert world.watchdogs[rank]._silent.keys() == lost, rank
    # Two in each of four periods, for beats and for news; two to read all the news, and some of a rank that tells them.
    assert max(world.store.requests[rank] for rank in alive) <= 16


def test_a_rank_that_goes_on_is_no_longer_silent(monkeypatch, tmp_path):
    """Stopped by a debugger, or starved by a program that keeps the interpreter: its news must not outlive it."""
    world = World(monkeypatch, tmp_path, 4, [0, 1, 2, 3])
    for _ in range(5):
        world.period(but={2})
    [found] = world.watchdogs[0]._find()  # what a rank says whose collective fails now
    assert found.beat.rank == 2
    assert "does not answer: no beat for 6 s" in str(found)
    assert {rank: set(each._silent) for rank, each in world.watchdogs.items()} == {0: {2}, 1: {2}, 2: set(), 3: {2}}
    for _ in range(2):
        world.period()
    assert not any(each._silent for each in world.watchdogs.values())


def test_a_watcher_that_was_stopped_itself_raises_no_false_alarm(monkeypatch, tmp_path):
    """Nor does a store that answered nobody for a while: no rank could send its beat."""
    world = World(monkeypatch, tmp_path, 4, [0, 1, 2, 3])
    world.period()
    world.now += 60
    for rank in (0, 1):
        world.store.asking = rank
        world.watchdogs[rank]._look_for_the_silent()  # before the others' beats have arrived
    for _ in range(3):
        world.period()
    assert world.store.store.add("news", 0) == 0


def test_a_rank_that_has_left_is_not_lost_and_one_that_never_came_is_not_waited_for(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, 4, [0, 1, 2, 3])
    world.store.store.delete_key("beat/1")
    world.watchdogs[2].peers.leave("")
    for _ in range(6):
        world.now += PERIOD_SECONDS
        world.beat(3, int(world.now))
        world.watchdogs[0]._look_for_the_silent()
    assert world.watchdogs[0].peers.watched == [1, 2]
    assert not world.watchdogs[0].peers.hear()


def test_news_that_a_dying_rank_has_only_announced_hold_up_no_others(tmp_path):
    here = Peers(dist.HashStore(), 0, 2, tmp_path / "0")
    assert here._ask("add", "news", 1) == 1
    here.tell({"late": [2]})
    assert here.hear() == [{"late": [2]}]
    here._set("news/1", {"late": [1]})  # it was only slow
    here.tell({"late": [3]})
    assert here.hear() == [{"late": [1]}, {"late": [3]}]
    assert here.hear() == []
