"""Whether ranks that issue given collectives and messages, in given orders, wait for each other forever.

The rule: each rank waits for everything that it issues, at once, for all ranks that take part. If all come to their
ends like this, there is one order of all collectives and messages of all ranks in which each rank issues its own. On a
GPU a rank waits later and for less: a stream for what was issued before on the same stream or waited for, and never for
what is issued later. Each of these waits follows that same order, so there is no circle among them, either.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from parallelisms.guards.order_guard import Channel
from scripts.rehearsal.play import Event

Programs = Mapping[int, Sequence[Event]]
"""What each rehearsed rank issues, in order, by rank."""


class Matched(NamedTuple):
    """What was found."""

    collectives: int
    """Collectives and messages that all of their rehearsed ranks issued."""
    groups: int
    problem: str | None
    """The first that does not match, for people; None: no rank waits forever."""


def match(programs: Programs) -> Matched:
    """Let the ranks go through their programs; ranks that are not rehearsed are left out of groups and messages."""
    if problem := _different_groups(programs):
        return Matched(0, 0, problem)
    return _Play(programs).run()


def _different_groups(programs: Programs) -> str | None:
    """Groups get their names in the order of their creation: the same name for other ranks is another order."""
    known: dict[str, tuple[tuple[int, ...], int]] = {}
    for rank, events in programs.items():
        for channel in {event.channel for event in events if event.sends is None}:
            ranks, first = known.setdefault(channel.name, (channel.ranks, rank))
            if ranks != channel.ranks:
                return (
                    f"the ranks create their process groups in different orders: group {channel.name} is of ranks "
                    f"{_shown(ranks)} for rank {first}, and of ranks {_shown(channel.ranks)} for rank {rank}"
                )
    return None


class _Play:
    """The state of all ranks."""

    def __init__(self, programs: Programs) -> None:
        self._entries = {rank: deque(_entries(events, set(programs))) for rank, events in programs.items()}
        self._members: dict[Channel, list[int]] = {}
        self._open: dict[int, list[Event]] = {rank: [] for rank in programs}
        """What each rank has issued and waits for."""
        self._at: dict[Channel, dict[int, Event]] = defaultdict(dict)
        """The ranks that have come to a group's next collective."""
        self._ends: dict[tuple[Channel, bool], deque[Event]] = defaultdict(deque)
        """Messages whose other end has not been issued."""
        self._done = 0
        self._channels: set[Channel] = set()

    def run(self) -> Matched:
        ready = deque(sorted(self._entries))
        while ready:
            rank = ready.popleft()
            while not self._open[rank] and self._entries[rank]:
                entry = self._entries[rank].popleft()
                self._open[rank] = list(entry)
                for event in entry:
                    freed, problem = self._issue(rank, event)
                    if problem:
                        return Matched(self._done, len(self._channels), problem)
                    ready.extend(other for other in freed if other != rank)
        return Matched(self._done, len(self._channels), self._stuck())

    def _issue(self, rank: int, event: Event) -> tuple[list[int], str | None]:
        """Issue one; returns the ranks that no longer wait for it, and what does not match."""
        self._channels.add(event.channel)
        if event.sends is None:
            return self._join(rank, event)
        others = self._ends[event.channel, not event.sends]
        if not others:
            self._ends[event.channel, event.sends].append(event)
            return [], None
        other = others.popleft()
        sender, receiver = event.channel.ranks
        if other.what != event.what:
            sent, awaited = (event, other) if event.sends else (other, event)
            return [], (
                f"rank {sender} ({sent.where}) sends rank {receiver} a {sent.what}, but that ({awaited.where}) waits "
                f"for a {awaited.what}"
            )
        self._done += 1
        return self._complete({rank: event, sender if rank == receiver else receiver: other}), None

    def _join(self, rank: int, event: Event) -> tuple[list[int], str | None]:
        there = self._at[event.channel]
        there[rank] = event
        if len(there) < len(self._rehearsed(event.channel)):
            return [], None
        if len({each.what for each in there.values()}) > 1:
            return [], _differ(event.channel, there)
        self._done += 1
        done = dict(there)
        there.clear()
        return self._complete(done), None

    def _complete(self, events: Mapping[int, Event]) -> list[int]:
        for rank, event in events.items():
            self._open[rank].remove(event)
        return list(events)

    def _rehearsed(self, channel: Channel) -> list[int]:
        if channel not in self._members:
            self._members[channel] = [rank for rank in channel.ranks if rank in self._entries]
        return self._members[channel]

    def _stuck(self) -> str | None:
        """Who waits forever, beginning with a rank that the others wait for; None if nobody does."""
        waiting = {rank: events[0] for rank, events in self._open.items() if events}
        if not waiting:
            return None
        first = min(waiting)
        lines = [f"{_says(first, waiting[first])}, for which {self._missing(waiting[first])}"]
        rank = first
        told = {first}
        while (rank := next(self._absent(waiting[rank]))) not in told and rank in waiting:
            told.add(rank)
            lines.append(f"{_says(rank, waiting[rank])}, for which {self._missing(waiting[rank])}")
        return "ranks wait for each other forever:\n  " + "\n  ".join(lines)

    def _absent(self, event: Event) -> Iterator[int]:
        """The ranks that an event waits for."""
        for rank in self._rehearsed(event.channel):
            if event not in self._open[rank] if event.sends is not None else rank not in self._at[event.channel]:
                yield rank

    def _missing(self, event: Event) -> str:
        absent = list(self._absent(event))
        ended = [rank for rank in absent if not self._open[rank]]
        if ended:
            return f"rank {ended[0]} never comes: its run is at its end"
        return f"rank {absent[0]} has not come"


def _entries(events: Sequence[Event], rehearsed: set[int]) -> Iterator[list[Event]]:
    """What a rank issues together, one after the other, as far as it concerns other rehearsed ranks."""
    for _, together in groupby(enumerate(events), key=_entry_of):
        kept = [event for _, event in together if len(rehearsed.intersection(event.channel.ranks)) > 1]
        if kept:
            yield kept


def _entry_of(item: tuple[int, Event]) -> tuple[str, int]:
    """The same for messages of one batch, otherwise of each event its own."""
    place, event = item
    return ("batch", event.batch) if event.batch is not None else ("alone", place)


def _differ(channel: Channel, there: Mapping[int, Event]) -> str:
    (usual, _), *_ = Counter(event.what for event in there.values()).most_common(1)
    odd = next(rank for rank, event in there.items() if event.what != usual)
    usual_rank = next(rank for rank, event in there.items() if event.what == usual)
    return (
        f"ranks issue different collectives to the same group, of ranks {_shown(channel.ranks)}:\n"
        f"  {_says(odd, there[odd])}\n  {_says(usual_rank, there[usual_rank])}"
    )


def _says(rank: int, event: Event) -> str:
    if event.sends is None:
        return f"rank {rank} ({event.where}) waits in {event.what} among ranks {_shown(event.channel.ranks)}"
    sender, receiver = event.channel.ranks
    does = f"waits until rank {receiver} takes" if event.sends else f"waits for rank {sender} to send"
    return f"rank {rank} ({event.where}) {does} a {event.what}"


def _shown(ranks: Sequence[int]) -> str:
    """The ranks of a group, in few words: "0, 8, ..., 56 (8 ranks)"."""
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]} ({len(ranks):,} ranks)"
