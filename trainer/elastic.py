"""What an elastic run adds to a launch: taking the run folder over, and ranks that no mesh has a place for."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from torch.distributed import Store

from checkpoint.incarnation import FOLDER, Incarnation, claim
from checkpoint.lock import lock, lock_or_take_over
from configs.elastic import describe
from configs.errors import OutageError
from configs.files import is_folder
from configs.load import LoadedConfig
from configs.secret import Forged, signed, verified
from trainer.lifecycle import EXIT_FAILED, EXIT_PREEMPTED, StopRequest

_TAKE_OVER_SECONDS = 15.0
"""A launch that gives no sign of life for so long (seven of them are due) has lost an elastic run."""
_POLL_SECONDS = 0.5
_FAREWELL_SECONDS = 10.0
_END = "end"
_HEARD = "heard"
_ALIVE = "alive"


@contextmanager
def forming() -> Iterator[None]:
    """Say in one message that ranks did not find each other, as when a host is lost at that moment."""
    try:
        yield
    except RuntimeError as error:
        raise OutageError(f"the ranks could not form a process group: {str(error).splitlines()[0]}") from error


def take_folder(job: LoadedConfig, warn: Callable[[str], None]) -> Incarnation | None:
    """Lock the run folder, and in an elastic run claim the number of this launch.

    Args:
        job: its run folder exists.
        warn: called with what a person should know.

    Raises:
        FolderInUse, OSError: as in `lock`.
    """
    folder = job.config.job.folder
    if not job.choice:
        lock(folder, warn)
        # A run that was elastic keeps its account of where each launch began.
        return claim(folder, facts_of_launch(job)) if is_folder(folder / FOLDER) else None
    lock_or_take_over(folder, warn, min(_TAKE_OVER_SECONDS, job.config.job.timeout_seconds / 2))
    return claim(folder, facts_of_launch(job))


def facts_of_launch(job: LoadedConfig) -> dict[str, Any]:
    """What the record of a launch says of it, besides host, process and time."""
    if not job.choice:
        return {"ranks": int(os.environ.get("WORLD_SIZE", "1"))}
    return {"ranks": job.choice.world_size, "mesh": describe(job.config, job.choice)}


def wait_idle(store: Store, stop: StopRequest, timeout_seconds: float, warn: Callable[[str], None]) -> int:
    """Wait on a rank that does not train; returns its exit code, which is the others' where they tell it.

    If all ranks that train are gone, nobody else notices, so this ends with an error, after which torchrun forms the
    job again.

    Args:
        store: shared by all ranks; the first one gives signs of life there (`show_life`).
        stop: told by signals; torchrun sends one when it forms the job again.
        timeout_seconds: without a sign of life for so long, the ranks that train are gone.
        warn: called with what a person should know.
    """
    sign = ""
    heard = time.monotonic()
    warn = cache(warn)  # once for each text
    while not stop.wait(_POLL_SECONDS):
        try:
            if code := _told(store, _END, warn):
                return _hear_the_end(store, int(code))
            now = _told(store, _ALIVE, warn)
        except RuntimeError:  # the store was in a rank, or on a host, that is gone
            return EXIT_FAILED
        if now != sign:
            sign = now
            heard = time.monotonic()
        elif time.monotonic() - heard > timeout_seconds:
            return EXIT_FAILED
    return EXIT_PREEMPTED


def _told(store: Store, key: str, warn: Callable[[str], None]) -> str:
    """The text that the first rank has written; "" if it has not, or somebody else has, which is ignored."""
    try:
        return verified(key, store.get(key)) if store.check([key]) else ""
    except Forged as error:
        warn(str(error))
        return ""


def _hear_the_end(store: Store, code: int) -> int:
    with suppress(RuntimeError):  # the store may end as soon as the last idle rank says that it knows the code
        store.add(_HEARD, 1)
    return code


def show_life(store: Store) -> None:
    """Let the idle ranks know that the first rank is alive."""
    store.set(_ALIVE, signed(_ALIVE, str(time.monotonic())))


def release(store: Store, n_idle: int, code: int) -> None:
    """Tell the idle ranks the exit code, and wait until they know it, since the store may end with this rank."""
    deadline = time.monotonic() + _FAREWELL_SECONDS
    with suppress(RuntimeError):
        store.set(_END, signed(_END, str(code)))
        while store.add(_HEARD, 0) < n_idle and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)
