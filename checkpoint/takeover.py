"""How an elastic run's next launch gets the run folder, although the last one may hang with its host."""

import time
from collections.abc import Callable
from pathlib import Path

from checkpoint.incarnation import FOLDER, facts_of, last_sign_of_life, newest_number
from checkpoint.lock import LOCK_NAME, FolderInUse, holder_text, lock

_POLL_SECONDS = 0.5


def lock_or_take_over(folder: Path, warn: Callable[[str], None], seconds: float) -> None:
    """Like `lock`, for an elastic run, whose last launch may take a moment to end, or may hang with its host.

    Args:
        folder, warn: as for `lock`.
        seconds: how long to wait for the end, or for a sign of life, of the launch that has the folder. If it gives
            none, the folder is taken from it, provided that it is elastic, too, and so finds out before it writes.

    Raises:
        FolderInUse, OSError: as in `lock`.
    """
    claims = folder / FOLDER
    deadline = time.monotonic() + seconds
    signs = {last_sign_of_life(claims)}
    while True:
        try:
            return lock(folder, warn)
        except FolderInUse:
            has_ended_waiting = time.monotonic() > deadline
            if not _is_elastic(folder) or (has_ended_waiting and len(signs) > 1):
                raise
        if has_ended_waiting:
            break
        time.sleep(_POLL_SECONDS)
        signs.add(last_sign_of_life(claims))
    warn(f"the last launch has {folder} but has given no sign of life for {seconds:.0f} s: this one takes it over")
    (folder / LOCK_NAME).unlink(missing_ok=True)  # its lock stays with the removed file
    lock(folder, warn)


def _is_elastic(folder: Path) -> bool:
    """Whether the process that has the folder is an incarnation, and thus looks for newer ones before it writes."""
    numbers = range(newest_number(folder / FOLDER), 0, -1)
    facts = (facts_of(folder / FOLDER, number) for number in numbers)
    holder = (folder / LOCK_NAME).read_text(errors="replace")
    return any(holder == holder_text(each.get("pid"), each.get("host")) for each in facts)
