"""The grace time: saving a run that is told to stop in the middle of a long step.

After a stop signal the launcher waits (torchrun 30 s, unless --shutdown-timeout says otherwise), and then kills. A step
may take longer than that. But the tensors that a checkpoint holds change only in the update at the end of a step. Until
then they are the last finished step's, and can be saved while the next step is computed.

A thread on every rank waits for a signal to any rank. If the step does not end soon, the thread holds up the update,
and agrees with the other ranks' threads, on a separate process group, that all ranks have finished the same step. Then
the state is saved as at any other time. A rank that has begun its update cannot be interrupted, and may need the other
ranks for it; so if the ranks differ, all release the update and try again. The steps' own collectives bring the ranks
to the same point: while all hold up the update after the same step, no rank is in the checkpoint manager.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Self
from uuid import uuid4

import torch
import torch.distributed as dist

from configs.errors import OutageError
from configs.secret import Forged, signed, verified
from parallelisms.ranks import on_rank_zero
from parallelisms.torch_internals import store_of_all_ranks
from trainer.lifecycle import StopRequest
from trainer.report.console import Console
from trainer.report.units import duration

_TICK_SECONDS = 0.2
"""How often a thread checks whether its own rank was signalled."""
_ASK_SECONDS = 1.0
"""How often a thread asks whether another rank was signalled."""
_HOLD_SECONDS = 0.5
"""How long a thread waits for a rank that is not in the middle of a step, before the others are released."""
_PATIENCE = 0.25
"""Fraction of the grace time to wait for a step that may soon end."""
_NOT_READY = -1
_ENDED = -2
"""Sent instead of a step: this rank is not in the middle of one; this rank's training has ended."""

_STOP = "stop"

Rescue = Callable[[str, dist.ProcessGroup], Callable[[], None] | None]
"""Saves the state after the last step, given a reason and a group for collectives; returns what remains to be done when
training may continue, or None: the state is about to change, so nothing is saved yet."""


@dataclass(frozen=True)
class _Finished:
    """A rank's state while it computes a step: the last finished step, and how to save it."""

    step: float
    """Half a step more, once that step has been computed again while the next one is."""
    rescue: Rescue
    since: float


class Grace:
    """Saves the last finished step if a stop arrives in the middle of a long one; a context around training.

    All ranks enter and leave it. Between `computing` and `updating` the main thread changes what is saved inside
    `changing` alone.
    """

    def __init__(
        self, stop: StopRequest, seconds: float, console: Console, device: torch.device, timeout_seconds: float
    ) -> None:
        """
        Args:
            seconds: `job.grace_seconds`.
            timeout_seconds: how long the threads of two ranks may wait for each other.
        """
        self._stop = stop
        self._seconds = seconds
        self._console = console
        self._device = device
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        # The key must be unique, since a store may be older than this launch (torchrun keeps it over restarts).
        self._key = f"keel/stop/{on_rank_zero(self._group, lambda: uuid4().hex)}"
        self._store: dist.Store | None = store_of_all_ranks()
        """None once it is gone, as after the death of torchrun."""
        self._held_up = threading.Lock()  # held by the thread that decides whether the update may run
        self._held_up.acquire()
        self._finished = _Finished(0, lambda reason, group: lambda: None, 0.0)
        self._is_computing = False
        self._updated = torch.cuda.Event() if device.type == "cuda" else None
        self._closing = threading.Event()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name="grace", daemon=True)
        self._step_seconds = 0.0
        self._save_seconds: float | None = None
        self._said: set[str] = set()
        self.has_begun = False
        """Whether a stop was obeyed in the middle of a step; from then on status.json reports that."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """End the thread, together with the other ranks'; after an error, abandon it.

        What failed in the middle of a step may have been stopped as well, as a compiler is by a signal to the whole
        process group: then the thread gets the time to save the last finished step.
        """
        if isinstance(error, OutageError) and self._stop and self._is_computing:
            self._thread.join(self._seconds)
        self._is_abandoned = kind is not None
        self._closing.set()
        if not self._is_abandoned:
            self._thread.join()
            dist.destroy_process_group(self._group)

    # ----------------------------------------------------------------------- the main thread

    def computing(self, step: int, rescue: Rescue) -> None:
        """Announce that the tensors are those after `step` until `updating`, and that `rescue` saves them."""
        if self._updated is not None:
            self._updated.record()
        self._finished = _Finished(step, rescue, time.monotonic())
        self._is_computing = True
        self._held_up.release()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Compute the last step again inside, also while the next one is computed; waits while tensors are saved.

        Ranks of which some have done so and some have not do not agree on the step that they would save.
        """
        if not self._is_computing:
            yield
            return
        self._held_up.acquire()
        yield
        if self._updated is not None:
            self._updated.record()
        self._finished = replace(self._finished, step=self._finished.step + 0.5)
        self._held_up.release()

    def updating(self) -> None:
        """Announce that the tensors are about to change; waits while they are being saved."""
        self._held_up.acquire()
        self._is_computing = False
        self._step_seconds = time.monotonic() - self._finished.since

    def check(self, save_seconds: float | None, may_judge_step: bool) -> None:
        """Warn, once for each, that a save, or a step with its save, takes longer than the grace time.

        Args:
            save_seconds: duration of the last save; None: there was none yet.
            may_judge_step: whether the last step was typical of those to come.
        """
        self._save_seconds = save_seconds
        save = save_seconds or 0.0
        step = self._step_seconds if may_judge_step else 0.0
        needed = f"{10 * math.ceil((step + 2 * save) / 8)}"
        killed = f"{self._seconds:g} s after a stop signal this run is killed (job.grace_seconds)"
        remedy = f"torchrun --shutdown-timeout {needed} ... --job.grace_seconds {needed}"
        if save > self._seconds:
            self._say_once(
                "save",
                f"{killed}, but a save takes {duration(save)}: a stop loses the training since the last "
                f"checkpoint; {remedy} gives it time",
            )
        elif step + save > self._seconds:
            self._say_once(
                "step",
                f"{killed}, but a step and a save take {duration(step + save)}: a stop saves the last finished step, "
                f"and may lose the step in progress; {remedy} lets it finish",
            )

    def _say_once(self, of: str, text: str) -> None:
        if of not in self._said:
            self._said.add(of)
            self._console.line(text, "yellow")

    # ----------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            finish = self._rescue_when_stopped()
            if finish is not None:
                finish()
        except Exception as error:  # another rank has died, or the disk refused, which all ranks know
            if not self._is_abandoned:
                self._console.warning(f"nothing could be saved in the middle of the step: {error}")

    def _rescue_when_stopped(self) -> Callable[[], None] | None:
        """Wait for a stop and save, unless training ends first, on this rank or another; returns what is left to do.

        All ranks' threads make the same `_agree` calls, and each returns by what it learns there.
        """
        reason = self._wait_for_stop()
        if self._is_abandoned:
            return None
        patience, _ = self._agree(self._patience())
        if patience == _ENDED:
            return None
        self._closing.wait(patience)
        while not self._is_abandoned:
            is_held = self._held_up.acquire(timeout=_HOLD_SECONDS)
            try:
                least, most = self._agree(self._finished.step if is_held else _NOT_READY)
                if least == _ENDED:
                    return None
                if least == most != _NOT_READY and (finish := self._rescue(reason)):
                    return finish
            finally:
                if is_held:
                    self._held_up.release()
            self._closing.wait(_TICK_SECONDS)
        return None

    def _wait_for_stop(self) -> str:
        """Wait for a signal to any rank, or the end of training; returns why to stop, for people."""
        asked = time.monotonic()
        while not self._closing.wait(_TICK_SECONDS):
            if reason := self._stop.arrived():
                self._ask_store("set", self._key, signed(self._key, _STOP))
                return reason
            if time.monotonic() - asked >= _ASK_SECONDS:
                asked = time.monotonic()
                if self._ask_store("check", [self._key]) and self._is_stop(self._ask_store("get", self._key)):
                    break
        return "a signal to another rank"

    def _is_stop(self, content: bytes | None) -> bool:
        """Whether a rank has written it; somebody else's stop is ignored."""
        try:
            return content is not None and verified(self._key, content) == _STOP
        except Forged as error:
            self._say_once("forged", str(error))
            return False

    def _ask_store(self, name: str, *arguments: Any) -> Any:
        """The store's answer; None once the store is gone.

        If this thread ended here, it would leave the other ranks' threads alone in `_agree`. Without a store it learns
        of a signal to another rank at the end of the step, where the main threads vote.
        """
        try:
            return getattr(self._store, name)(*arguments) if self._store else None
        except RuntimeError:
            self._store = None
            return None

    def _patience(self) -> float:
        """Seconds to wait for the end of the step: 0 if it is not expected in time, or a save is slow."""
        patience = min(_PATIENCE * self._seconds, self._seconds - 2 * (self._save_seconds or 0.0))
        left = self._finished.since + self._step_seconds - time.monotonic()
        return 0.0 if left > patience else max(0.0, patience)

    def _agree(self, value: float) -> tuple[float, float]:
        """The least and the greatest value over all ranks; a rank whose training ends contributes _ENDED."""
        said = float(_ENDED) if self._closing.is_set() else value
        both = torch.tensor([-said, said], dtype=torch.float64)  # one MAX reduction finds both extremes
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        return -both[0].item(), both[1].item()

    def _rescue(self, reason: str) -> Callable[[], None] | None:
        self.has_begun = True
        with self._beside_training():
            finish = self._finished.rescue(reason, self._group)
        self.has_begun = finish is not None
        return finish

    def _beside_training(self) -> AbstractContextManager:
        """Use a stream that waits for the last update, but not for the step queued behind it; on a CPU, do nothing."""
        if self._updated is None:
            return nullcontext()
        torch.cuda.set_device(self._device)  # a new thread defaults to GPU 0
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(self._updated)
        return torch.cuda.stream(stream)
