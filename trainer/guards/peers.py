"""The ranks of a job as they see each other: where they are, what they do, and whether they are alive.

Every two seconds, a thread of every rank writes a *beat* to the store through which the process group was formed. So if
a rank dies or stops and can report nothing, the others name it: ranks on its host by what the kernel knows of its
process, ranks elsewhere by its beat, which no longer changes.

All ranks share one store, so none reads all beats. Rank r watches the ranks r + 1, r + 2, r + 4, r + 8, ... (modulo the
number of ranks; as the fingers of Chord, Stoica et al. 2001, section 4.3), in one request every two seconds, and tells
all others whom it has found. The first lost rank after one that lives is always watched, so of any ranks that are lost
together some are named; of neighbors, such as a host's, up to half of all ranks, each one is. Only an agent such as
torchrun learns the signal that ended a process. But a crash leaves Python's stacks in `crashes/`, with the signal's
name, and SIGKILL leaves none.
"""

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import Store

from configs.secret import Forged, signed, verified

PERIOD_SECONDS = 2.0
SILENT_SECONDS = 3 * PERIOD_SECONDS
"""A rank whose beat has not changed for this long is not running, or its host is unreachable."""


@dataclass(frozen=True)
class Beat:
    """A rank's report of itself."""

    rank: int
    host: str
    pid: int
    space: str
    """Host and namespace in which `pid` is valid; "" if the kernel does not say."""
    born: str
    """When the process started, by the kernel's clock; a later process may reuse `pid`."""
    crash_file: str
    """Holds the rank's stacks after a crash; deleted when the rank ends normally."""
    step: int = 0
    """Optimizer steps completed since the start of the run."""
    doing: str = "start-up"
    since: float = 0.0
    """When it began `doing`; seconds since the epoch."""
    count: int = 0
    """Number of beats so far."""
    ended: str | None = None
    """Why it left on its own ("": no error); None while it runs."""

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host} (process {self.pid})"


@dataclass(frozen=True)
class Loss:
    """A rank that the others wait for in vain, and why."""

    beat: Beat
    how: str
    is_dead: bool = False

    def __str__(self) -> str:
        return f"{self.beat} {self.how}; its last step was {self.beat.step}"

    def as_json(self) -> dict[str, Any]:
        """The entry in status.json."""
        return {name: getattr(self.beat, name) for name in ("rank", "host", "pid", "step")} | {"how": self.how}

    @staticmethod
    def of(told: dict[str, Any]) -> "Loss":
        """The inverse of `dataclasses.asdict`."""
        return Loss(Beat(**told["beat"]), told["how"], told["is_dead"])


class Peers:
    """The ranks of one launch, as seen from one of them. Its methods may be called from several threads."""

    def __init__(self, store: Store, rank: int, world_size: int, crash_file: Path) -> None:
        """Also sends the first beat."""
        self._store = store
        self.world_size = world_size
        self._store_is_gone = self._store_has_no_host = False
        self._asked: float | None = None
        """When the pending request to the store was made; None if none is pending."""
        born = _born(os.getpid())
        space = _space()
        self.own = Beat(rank, socket.gethostname(), os.getpid(), space, born, str(crash_file), since=time.time())
        self._neighbors: dict[int, Beat] = {}
        self._latest: dict[int, Beat] = {}
        self._seen: dict[int, tuple[int, float, int]] = {}
        """The last beat count read of each rank, when it was first read, and how often since then."""
        self.watched = watched_by(rank, world_size)
        self._news = 0
        self._unheard: dict[int, str] = {}
        """The keys of news that were announced, but not written yet."""
        self.forged = ""
        """The first value that was refused, since no rank of this launch has written it."""
        self._send()

    def beat(self, step: int, doing: str, since: float) -> None:
        """Report that this rank is alive, and what it is doing."""
        self.own = replace(self.own, step=step, doing=doing, since=since, count=self.own.count + 1)
        self._send()

    def leave(self, why: str) -> None:
        """Report that this rank is ending, so that the others do not take it for dead."""
        self.own = replace(self.own, ended=why)
        self._send()

    def _send(self) -> None:
        self._set(f"beat/{self.own.rank}", asdict(self.own))

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call the store, but never again once it has failed, since torch prints its own stack each time.

        Raises:
            RuntimeError: the store is gone; if raised by torch, one of its subclasses.
        """
        if self.is_alone:
            raise RuntimeError("the store is gone")
        self._asked = time.monotonic()
        try:
            return getattr(self._store, name)(*arguments)
        except RuntimeError:
            self._store_is_gone = True
            raise
        finally:
            self._asked = None

    def _set(self, key: str, value: dict[str, Any]) -> None:
        self._ask("set", key, signed(key, json.dumps(value)))

    def _existing(self, keys: dict[int, str]) -> dict[int, str]:
        """Those of some keys under which something is written: one request if it is under all, else by halves."""
        if not keys or self._ask("check", list(keys.values())):
            return keys
        if len(keys) == 1:
            return {}
        items = list(keys.items())
        middle = len(items) // 2
        return self._existing(dict(items[:middle])) | self._existing(dict(items[middle:]))

    def _read(self, keys: Mapping[int, str]) -> dict[int, Any]:
        """What ranks have written under keys that exist, in one request; without what somebody else has."""
        found = {}
        values = self._ask("multi_get", list(keys.values())) if keys else []
        for (number, key), value in zip(keys.items(), values, strict=True):
            try:
                found[number] = json.loads(verified(key, value))
            except Forged as error:
                self.forged = self.forged or str(error)
        return found

    @property
    def is_alone(self) -> bool:
        """Whether the store does not answer: its host is down, or its process is dead or stopped."""
        asked = self._asked
        has_no_answer = asked is not None and time.monotonic() - asked > SILENT_SECONDS
        return self._store_is_gone or self._store_has_no_host or has_no_answer

    @property
    def has_lost_agent(self) -> bool:
        """Whether the store is gone, and was not part of rank 0: the agent that had it, such as torchrun, has ended."""
        return self._store_is_gone and not _is_part_of_rank_0()

    def beats(self, ranks: Iterable[int]) -> list[Beat]:
        """The last beats of `ranks`, except those that have not sent one yet."""
        keys = {rank: f"beat/{rank}" for rank in ranks if rank != self.own.rank}
        known = {rank: key for rank, key in keys.items() if rank in self._latest}
        new = {rank: key for rank, key in keys.items() if rank not in known}
        told = self._read(known | self._existing(new))
        found = [Beat(**told[rank]) for rank in keys if rank in told]
        self._latest |= {beat.rank: beat for beat in found}
        return found

    def name(self, rank: int) -> str:
        """A rank with its host and process, if known, without asking the store."""
        return str(self._latest.get(rank, f"rank {rank}"))

    # ------------------------------------------------------------------ news, which each rank reads once

    def tell(self, news: dict[str, Any]) -> None:
        """Send news to all ranks, including this one."""
        self._set(f"news/{self._ask('add', 'news', 1)}", news)

    def hear(self) -> list[dict[str, Any]]:
        """The news since the last call: one request, and two more if there are any."""
        count = self._ask("add", "news", 0)
        self._unheard |= {number: f"news/{number}" for number in range(self._news + 1, count + 1)}
        self._news = count
        written = self._existing(self._unheard)  # a rank that has taken a number writes under it next
        self._unheard = {number: key for number, key in self._unheard.items() if number not in written}
        return list(self._read(written).values())

    def answer(self, question: str, counts: dict[str, int]) -> None:
        """Answer a question that one rank has asked all ranks."""
        self._set(f"{question}/{self.own.rank}", counts)

    def answers(self, question: str) -> dict[int, dict[str, int]]:
        """The ranks' answers so far."""
        return self._read(self._existing({rank: f"{question}/{rank}" for rank in range(self.world_size)}))

    def is_first(self, to: str) -> bool:
        """Whether this rank is the first to call this with `to`; also True if the store is gone."""
        try:
            return self._ask("add", f"first/{to}", 1) == 1
        except RuntimeError:
            return True

    # ------------------------------------------------------------------ who is alive

    def find_neighbors(self) -> None:
        """Learn which ranks are on this host; call it repeatedly until all ranks have sent a beat."""
        first = 0
        count = self.world_size
        if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun gives a host consecutive ranks
            first = self.own.rank - int(os.environ["LOCAL_RANK"])
            count = int(os.environ["LOCAL_WORLD_SIZE"])
        here = range(first, first + count)
        self.beats(rank for rank in {0, *here} if rank not in self._latest)  # rank 0: see `lost_with_store`
        known = [self._latest[rank] for rank in here if rank in self._latest]
        self._neighbors = {beat.rank: beat for beat in known if self.own.space and beat.space == self.own.space}

    def lost_neighbors(self, step: int) -> list[Loss]:
        """Ranks of this host whose process is stopped, or is gone without having announced its end.

        Args:
            step: this rank's step. Ranks advance together, and a dead rank's last beat may be some steps old.
        """
        lost = []
        for known in self._neighbors.values():
            state = _state(known)
            beat = replace(known, step=max(known.step, step))
            if state in ("T", "t"):
                lost.append(Loss(beat, "is stopped (SIGSTOP, or a debugger)"))
            elif state in ("", "Z", "X") and os.path.exists(known.crash_file):
                lost.append(_death(beat))
        self._store_has_no_host = _is_part_of_rank_0() and any(loss.beat.rank == 0 for loss in lost)
        return lost

    def lost_with_store(self, step: int) -> list[Loss]:
        """Rank 0, whose host has the store, if that is gone: then nothing is heard of any rank.

        Args:
            step: as for `lost_neighbors`.
        """
        known = self._latest.get(0)
        if known is None or not self.is_alone:
            return []
        how = "does not answer: its host's store, by which ranks hear of each other, is gone"
        beat = replace(known, step=max(known.step, step))
        return [Loss(beat, f"{how} (it was killed, or its host is down or unreachable)")]

    def silent(self, seconds: float, ranks: Iterable[int]) -> list[Loss]:
        """Ranks whose beat has not changed for `seconds`, by this rank's clock, since it was first read.

        It has been read twice since then: if this rank, or the store, was stopped meanwhile, nothing is known.
        """
        now = time.monotonic()
        lost = []
        for beat in self.beats(ranks):
            count, since, times = self._seen.get(beat.rank, (-1, now, 0))
            if beat.count != count:
                self._seen[beat.rank] = (beat.count, now, 0)
                continue
            self._seen[beat.rank] = (count, since, times + 1)
            if now - since >= seconds and times > 0 and beat.ended is None:
                how = f"does not answer: no beat for {now - since:.0f} s (stopped, or its host is unreachable)"
                lost.append(Loss(beat, how))
        return lost

    def own_end(self, step: int) -> Loss:
        """What the others are told of this rank's own end, after `step` steps."""
        return Loss(replace(self.own, step=step), f"has ended: {self.own.ended}")


def watched_by(rank: int, world_size: int) -> list[int]:
    """The ranks whose beats a rank reads: those at distances of powers of two."""
    distances = [1 << bit for bit in range(world_size.bit_length()) if 1 << bit < world_size]
    return [(rank + distance) % world_size for distance in distances]


def _is_part_of_rank_0() -> bool:
    """Whether the store's server is in the process of rank 0, and not in its agent's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _death(beat: Beat) -> Loss:
    """What is known of a process that is gone."""
    try:
        trace = Path(beat.crash_file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        trace = ""
    if trace:
        signal_name = trace.splitlines()[0].removeprefix("Fatal Python error: ")
        return Loss(beat, f"has crashed ({signal_name}; its stacks are in {beat.crash_file})", is_dead=True)
    how = "was killed: it left no trace, as after SIGKILL (kill -9, or the kernel when memory runs out)"
    return Loss(beat, how, is_dead=True)


# --------------------------------------------------------------------------- what the kernel knows (Linux)


def _space() -> str:
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """State, parent, ... from /proc/PID/stat (proc(5), from the third field on); empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _born(pid: int) -> str:
    return fields[19] if (fields := _stat(pid)) else ""


def _state(beat: Beat) -> str:
    """The state letter of a neighbor's process: R, S, T (stopped), Z (dead, not yet reaped), ...; "" if it is gone."""
    fields = _stat(beat.pid)
    return fields[0] if fields and fields[19] == beat.born else ""
