"""A thread on every rank that monitors the others while the main thread computes, or waits for them.

- It sends beats (trainer/guards/peers.py), and on rank 0 keeps the time in status.json fresh.
- A step that takes half of `job.timeout_seconds` is a hang. The first rank to notice tells all others, including those
  that are not in a step. Each writes its Python stacks and last collectives to a file in `hangs/step-N/`, and one line
  in run.log names the ranks that the others wait for. All this happens before the time-out ends the run.
- A rank that dies is noticed within seconds by the ranks on its host, which tell all others, as those do that watch its
  beats if its host is gone; a rank that ends with an error tells them itself. Most are about to fail in a collective
  and end by themselves. A rank that is stuck where no exception reaches it, as in a collective of NCCL or a launch that
  the device does not take, is ended by this thread, after a report as of a hang.

So no rank outlives another for longer than `job.timeout_seconds`, wherever it waits.
"""

import faulthandler
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from checkpoint.incarnation import Incarnation
from configs.errors import KeelError, OutageError
from configs.files import AppendedFile, open_plain
from parallelisms.ranks import error_as_json, error_of
from parallelisms.torch_internals import abort_collectives, store_of_the_job, uses_nccl
from trainer.guards.hang import hang_folder, late, line_of_hang, write_report
from trainer.guards.peers import PERIOD_SECONDS, SILENT_SECONDS, Loss, Peers
from trainer.lifecycle import refresh_status

REFRESH_SECONDS = 30.0
GRACE_SECONDS = 15.0
"""How long the main thread may take to notice that a rank has died, before the watchdog ends the process."""
NCCL_GRACE_SECONDS = 5.0
"""The same on GPUs, where a collective never tells that a rank has died."""
_ABORT_SECONDS = 3.0
"""How long NCCL's communicators may take to abort."""
SHOWN_RANKS = 8
_OF_COMMUNICATION = re.compile(r"gloo|nccl|c10d|store|socket|connection|timed? ?out|peer", re.IGNORECASE)


class Watchdog:
    """This rank's watchdog, from the start of the process group to the end of the run; call `step` as it advances."""

    def __init__(
        self,
        folder: Path,
        timeout_seconds: float,
        end: Callable[[list[Loss]], None],
        incarnation: Incarnation | None = None,
        show_life: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            folder: the run folder, which exists.
            timeout_seconds: `job.timeout_seconds`; a hang is reported after half of it.
            end: called in this thread if other ranks have ended and the main thread does not notice; must not return.
            incarnation: of an elastic run, whose sign of life rank 0 gives.
            show_life: called on rank 0 in every period; RuntimeError means that nobody can hear of it.
        """
        self.incarnation = incarnation
        self._folder = folder
        self._timeout = timeout_seconds
        self._end = end
        self._show_life = show_life
        self.rank = dist.get_rank()
        self._store = dist.PrefixStore("watchdog", store_of_the_job())
        self._waits = 0
        self._done: dict[int, list[Any] | None] = {}
        """The error that ended each piece of rank 0's work that the others wait for."""
        self._crash_file = folder / "crashes" / f"rank-{self.rank:05d}-{socket.gethostname()}-{os.getpid()}.txt"
        self._had_handler = faulthandler.is_enabled()
        self._crash = self._open_crash_file()
        self.peers = Peers(self._store, self.rank, dist.get_world_size(), self._crash_file)
        self._lost: dict[int, Loss] = {}
        """Dead ranks, and the first that has ended with an error."""
        self._silent: dict[int, Loss] = {}
        """Ranks whose beats have stopped, for now: they may go on, so this alone ends nothing."""
        self._lost_since = self._last_heard = 0.0
        self._late: list[Loss] = []
        """Ranks that the others wait for, according to the last report of a hang."""
        self._reported: Any = None
        self._warned: set[str] = set()
        self._refreshed = time.monotonic()
        self._collect: tuple[dict[str, Any], float] | None = None
        """The hang that this rank has announced, and when to evaluate the ranks' answers."""
        self._closed = threading.Event()
        self.step(0, "start-up")
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def step(self, step: int, doing: str = "training", may_last: bool = False) -> None:
        """Restart the clock; call it before each step, and before anything else that takes long.

        Args:
            step: optimizer steps completed.
            doing: what begins now.
            may_last: whether it is never a hang, however long it takes.
        """
        self._mark = (step, doing, time.monotonic(), may_last)  # one assignment, so the thread sees the old or the new

    def close(self, why: str = "") -> None:
        """Leave: tell the others that this rank is ending, with the error if there is one. May be called repeatedly."""
        if self._closed.is_set():
            return
        self._closed.set()
        if why and uses_nccl():  # the others are about to be stuck, and write theirs: `torchfrtrace` compares them all
            self._leave_report(why.splitlines()[0])
        with suppress(RuntimeError):
            self.peers.leave(why)
            if why and self.peers.is_first("failed"):  # of ranks that fail alike, one tells
                self.peers.tell({"lost": asdict(self.peers.own_end(self._mark[0]))})
        self._thread.join(timeout=SILENT_SECONDS)
        if self._crash:
            faulthandler.disable()
            if self._had_handler and sys.__stderr__:
                faulthandler.enable(sys.__stderr__)
            self._crash.close()
            with suppress(OSError):
                self._crash_file.unlink()
                self._crash_file.parent.rmdir()  # succeeds for the last rank

    # ------------------------------------------------------------------ waiting for rank 0

    def on_first_rank(self, doing: str, work: Callable[[], None], is_needed: bool = True) -> None:
        """Run something slow on rank 0, for hours if need be, while the others wait; all raise its error.

        Args:
            doing, work: as said.
            is_needed: whether the ranks can't go on without it. If they can, they do when the agent's store is gone,
                through which they would hear of its end.

        Raises:
            OutageError: rank 0 is no longer alive.
        """
        self._waits += 1
        self.step(self._mark[0], doing, may_last=True)
        failure: Exception | None = None
        if self.rank == 0:
            try:
                work()
            except Exception as error:
                failure = error
            try:
                self.peers.tell({"done": self._waits, "failure": failure and error_as_json(failure)})
            except RuntimeError:
                if is_needed:
                    raise
        elif told := self._wait_for_first(doing, is_needed):
            failure = error_of(told)
        self.step(self._mark[0], "start-up")
        if failure is not None:
            raise failure

    def _wait_for_first(self, doing: str, is_needed: bool) -> list[Any] | None:
        """Rank 0's message when it is done. The watchdog's thread receives it; this only polls for it."""
        self._last_heard = time.monotonic()
        while self._waits not in self._done:
            if self.peers.has_lost_agent and not is_needed:
                return None
            silence = time.monotonic() - self._last_heard
            if silence > self._timeout:
                raise OutageError(
                    f"{self.peers.name(0)}, for which all others wait ({doing}), does not answer: "
                    f"no beat for {silence:.0f} s (stopped, or its host is unreachable)"
                )
            time.sleep(PERIOD_SECONDS / 20)
        return self._done.pop(self._waits)

    # ------------------------------------------------------------------ why a run ends

    def explain(self, error: BaseException) -> list[Loss]:
        """The ranks whose end caused this rank's error; empty if the error is this rank's own. May take seconds."""
        if self.peers.world_size == 1 or isinstance(error, KeelError) or not _OF_COMMUNICATION.search(str(error)):
            return []
        deadline = time.monotonic() + SILENT_SECONDS + 2 * PERIOD_SECONDS
        found = self._find()
        while not found and time.monotonic() < deadline:
            time.sleep(PERIOD_SECONDS / 10)
            found = self._find()
        return found or self._late or self.peers.lost_with_store(self._mark[0])

    def _find(self) -> list[Loss]:
        """Dead ranks if there are any, otherwise stopped or silent ones, otherwise the first that has failed."""
        known = list(self._lost.values())
        dead = [loss for loss in known if loss.is_dead]
        return dead or self.peers.lost_neighbors(self._mark[0]) or list(self._silent.values()) or known

    # ------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        period = min(PERIOD_SECONDS, self._timeout / 16)
        while not self._closed.wait(period):
            try:
                self._look_around(period)
            except Exception as error:  # as of torch, on a group that is being destroyed; without this thread, no end
                self._warn(f"the watchdog goes on after an error: {error!r}")

    def _look_around(self, period: float) -> None:
        self._look_for_the_dead()
        step, doing, began, may_last = mark = self._mark
        seconds = time.monotonic() - began
        if self.rank == 0 and self.incarnation:
            with suppress(OSError):
                self.incarnation.show_life()
        if self.rank == 0 and time.monotonic() - self._refreshed >= REFRESH_SECONDS:
            self._refreshed = time.monotonic()
            self._refresh()
        with suppress(RuntimeError):  # without a store, as after the death of torchrun itself, the run continues
            self.peers.beat(step, doing, time.time() - seconds)
            self.peers.find_neighbors()
            self._look_for_the_silent()
            if self.rank == 0:
                self._show_life()
            if not may_last and seconds >= self._timeout / 2 and mark is not self._reported:
                self._reported = mark
                self._announce({"step": step, "doing": doing, "seconds": seconds}, period)
            if may_last and self.rank > 0 and not self.peers.silent(2 * period, [0]):
                self._last_heard = time.monotonic()
            self._hear()
            if self.peers.forged:
                self._warn(self.peers.forged)
            if self._collect and time.monotonic() >= self._collect[1]:
                self._judge(self._collect[0])

    def _warn(self, line: str) -> None:
        """Warn, once for each line."""
        if line in self._warned:
            return
        self._warned.add(line)
        append_to_log(self._folder, f"warning: {line}")
        with suppress(OSError, ValueError):  # its reader may have ended; a progress bar may have replaced sys.stderr
            print(f"[rank {self.rank}] warning: {line}", file=sys.__stderr__, flush=True)

    def _refresh(self, reason: str | None = None) -> None:
        with suppress(OSError):
            refresh_status(self._folder, self._mark[0], reason)

    def _look_for_the_dead(self) -> None:
        for loss in self.peers.lost_neighbors(self._mark[0]):
            if loss.is_dead and loss.beat.rank not in self._lost:
                self._lose(loss)
                if uses_nccl() and self.peers.is_first(f"lost {loss.beat.rank}"):
                    append_to_log(self._folder, f"lost: {loss}")  # NCCL may end this process before the grace is over
                with suppress(RuntimeError):
                    self.peers.tell({"lost": asdict(loss)})
        if not self._lost or self._closed.is_set():
            return
        grace = NCCL_GRACE_SECONDS if uses_nccl() else GRACE_SECONDS
        if time.monotonic() - self._lost_since > grace:
            self._leave_report(said_of(list(self._lost.values())))
            # The device, and ranks that are connected to this one, stop waiting; it may wait for a device that hangs.
            aborting = threading.Thread(target=abort_collectives, name="abort", daemon=True)
            aborting.start()
            aborting.join(_ABORT_SECONDS)
            self._end(list(self._lost.values()))

    def _look_for_the_silent(self) -> None:
        """Tell all ranks which of those that this one watches fall silent, or speak again; one of the watchers does."""
        silent = {loss.beat.rank: loss for loss in self.peers.silent(SILENT_SECONDS, self.peers.watched)}
        news: list[tuple[int, dict[str, Any] | None]] = []
        for rank in self.peers.watched:
            loss = silent.get(rank)
            if (loss is None) == (rank not in self._silent):
                continue
            event = f"silent {rank} {loss.beat.count}" if loss else f"speaks {rank} {self._silent[rank].beat.count}"
            if self.peers.is_first(event):
                news.append((rank, asdict(loss) if loss else None))
        if news:
            self.peers.tell({"silent": news})

    def _leave_report(self, why: str) -> None:
        """Write where this rank is, and its last collectives, before it ends."""
        step, doing, began, _ = self._mark
        header = f"{why}; {doing} after step {step} for {time.monotonic() - began:.0f} s"
        with suppress(Exception):  # nothing that a report lacks may keep a rank from ending
            write_report(self._report_file(step), self.peers.own, header)

    def _lose(self, loss: Loss) -> None:
        self._lost_since = self._lost_since or time.monotonic()
        self._lost.setdefault(loss.beat.rank, loss)

    def _hear(self) -> None:
        for news in self.peers.hear():
            if "lost" in news:
                self._lose(Loss.of(news["lost"]))
            elif "silent" in news:
                for rank, loss in news["silent"]:
                    self._silent.pop(rank, None)
                    if loss:
                        self._silent[rank] = Loss.of(loss)
            elif "hang" in news:
                self._report(news["hang"])
            elif "done" in news:
                self._done[news["done"]] = news["failure"]
            elif "late" in news:
                self._late = [Loss.of(each) for each in news["late"]]
                if self.rank == 0:
                    self._refresh(news["line"])

    # ------------------------------------------------------------------ hangs

    def _announce(self, told: dict[str, Any], period: float) -> None:
        if self.peers.is_first(f"hang {told['step']} {told['doing']}"):
            self.peers.tell({"hang": told})
            self._collect = (told, time.monotonic() + 2 * period)  # all ranks hear of it within a period, and answer

    def _report(self, told: dict[str, Any]) -> None:
        """Write this rank's report, and tell the rank that asks what it has issued."""
        path = self._report_file(told["step"])
        header = f"step {told['step'] + 1} ({told['doing']}) has not ended for {told['seconds']:.0f} s"
        with suppress(OSError):
            self.peers.answer(f"hang {told['step']}", write_report(path, self.peers.own, header))

    def _report_file(self, step: int) -> Path:
        return hang_folder(self._folder, step) / f"rank-{self.rank:05d}.txt"

    def _judge(self, told: dict[str, Any]) -> None:
        """Report which ranks the others wait for."""
        self._collect = None
        issued = self.peers.answers(f"hang {told['step']}")
        everyone = [self.peers.own, *self.peers.beats(range(self.peers.world_size))]
        beats = {beat.rank: beat for beat in everyone}
        losses = {loss.beat.rank: loss for loss in self.peers.lost_neighbors(told["step"])}
        for rank, beat in beats.items():
            if rank not in issued and beat.ended is None:
                losses.setdefault(rank, Loss(beat, "does not answer (stopped, or its host is unreachable)"))
        if not losses:  # otherwise the others are late because of the lost ranks
            losses = {rank: Loss(beats[rank], how) for rank, how in late(issued).items() if rank in beats}
        line = line_of_hang(told, said_of(list(losses.values())), hang_folder(self._folder, told["step"]))
        self.peers.tell({"late": [asdict(loss) for loss in losses.values()], "line": line})
        self._warn(line)

    def _open_crash_file(self) -> TextIO | None:
        """The file to which Python writes its stacks if a signal such as SIGSEGV or SIGBUS ends this process."""
        try:
            self._crash_file.parent.mkdir(exist_ok=True)
            file = os.fdopen(open_plain(self._crash_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w")
        except OSError:
            return None
        faulthandler.enable(file)
        return file


def said_of(losses: list[Loss]) -> str:
    """The lost ranks and their states, in one line."""
    more = len(losses) - SHOWN_RANKS
    return "; ".join(map(str, losses[:SHOWN_RANKS])) + (f"; and {more} more ranks" if more > 0 else "")


def append_to_log(folder: Path, text: str) -> None:
    """Add a line to run.log from a rank, or a thread, that does not have it open."""
    log = AppendedFile(folder / "run.log")
    log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n".encode())
    with suppress(OSError):
        log.flush()
