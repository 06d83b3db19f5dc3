"""What an elastic run adds to a launch: taking the run folder over, and ranks that no mesh has a place for."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store

from checkpoint.incarnation import FOLDER, Incarnation, claim
from checkpoint.lock import lock
from checkpoint.memory_copies import remove_copies
from checkpoint.run_folders import SHARED, OwnFolders, SharedFolder
from checkpoint.store import SaveFailed
from checkpoint.takeover import lock_or_take_over
from configs.elastic import describe
from configs.errors import OutageError, listed
from configs.load import LoadedConfig
from parallelisms.ranks import gather
from trainer.guards.shared_folder import NotShared
from trainer.lifecycle import EXIT_FAILED, EXIT_PREEMPTED, StopRequest

_TAKE_OVER_SECONDS = 15.0
"""A launch that gives no sign of life for so long (seven of them are due) has lost an elastic run."""
_POLL_SECONDS = 0.5
_FAREWELL_SECONDS = 10.0
_END, _HEARD, _ALIVE = "end", "heard", "alive"


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
        return claim(folder, {"ranks": int(os.environ.get("WORLD_SIZE", "1"))}) if (folder / FOLDER).is_dir() else None
    lock_or_take_over(folder, warn, min(_TAKE_OVER_SECONDS, job.config.job.timeout_seconds / 2))
    return claim(folder, {"ranks": job.choice.world_size, "mesh": describe(job.config, job.choice)})


def folders_of_hosts(
    job: LoadedConfig, folder: Path, lacking: Sequence[str], is_home: bool, log: Callable[[str], None]
) -> SharedFolder:
    """The run folder; each host's own if they share none, and the run can do without.

    Args:
        lacking: who does not see rank 0's run folder.
        is_home: whether this rank does.
        log: called with a line for the user.

    Raises:
        UserError: a folder can't be used, or the job can't do without a shared one.
    """
    config = job.config
    can_do_without = job.choice is not None and config.checkpoint.memory_copies > 0
    if not lacking or not all(gather(can_do_without)):  # ranks with different jobs are named later
        return SHARED
    if config.fault.spikes.action == "rewind":
        raise NotShared(
            'fault.spikes.action = "rewind" needs a run folder that all hosts share (job.output_dir), since the '
            f"checkpoint to go back to may be lost with a host. Other folders than rank 0's:\n  {listed(lacking)}"
        )
    own = OwnFolders.meet(folder, is_home)
    own.unite()
    log(f"elastic: {own.count} hosts have a run folder each; the run's is that of rank 0, {folder.absolute()}")
    return own


def share_the_end(run_folder: SharedFolder, warn: Callable[[str], None]) -> None:
    """Let the folders of all hosts that train say that the run is over, so that none of them starts it again."""
    try:
        run_folder.of(dist.group.WORLD).mirror()
    except SaveFailed as error:
        warn(str(error))


def wait_idle(store: Store, folder: Path, stop: StopRequest, timeout_seconds: float) -> int:
    """Wait on a rank that does not train; returns its exit code, which is that of the others where they tell it.

    If all ranks that train are gone, nobody else notices, so this ends with an error, after which torchrun forms the
    job again.

    Args:
        store: shared by all ranks; the first one gives signs of life there (`show_life`).
        folder: the run folder.
        stop: told by signals; torchrun sends one when it forms the job again.
        timeout_seconds: without a sign of life for so long, the ranks that train are gone.
    """
    sign, heard = 0, time.monotonic()
    while not stop.wait(_POLL_SECONDS):
        try:
            if store.check([_END]):
                return _hear_the_end(store, folder)
            now = store.add(_ALIVE, 0)
        except RuntimeError:  # the store was in a rank, or on a host, that is gone
            return EXIT_FAILED
        if now != sign:
            sign, heard = now, time.monotonic()
        elif time.monotonic() - heard > timeout_seconds:
            return EXIT_FAILED
    return EXIT_PREEMPTED


def _hear_the_end(store: Store, folder: Path) -> int:
    code = int(store.get(_END))
    with suppress(RuntimeError):  # the store may end as soon as the last idle rank says that it knows the code
        store.add(_HEARD, 1)
    remove_copies(folder)
    return code


def show_life(store: Store) -> None:
    """Let the idle ranks know that the first rank is alive."""
    store.add(_ALIVE, 1)


def release(store: Store, n_idle: int, code: int) -> None:
    """Tell the idle ranks the exit code, and wait until they know it, since the store may end with this rank."""
    deadline = time.monotonic() + _FAREWELL_SECONDS
    with suppress(RuntimeError):
        store.set(_END, str(code))
        while store.add(_HEARD, 0) < n_idle and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)
